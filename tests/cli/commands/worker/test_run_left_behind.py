"""`outfitter run` and the processes that its command leaves behind: they keep the devices, whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands.worker.conftest import PATIENCE, finish, line_of
from support.managers.process import OUTFITTER, Manager
from support.processes.ending import wait_until_ended

pytestmark = pytest.mark.slow

LEAVE = "sleep 1000 >/dev/null 2>&1 & echo $!; exit 7"
"""Leaves a process behind."""
LEAVE_AND_WAIT = "setsid sleep 1000 >/dev/null 2>&1 & echo $!; wait"
IN_A_USER_NAMESPACE = ["unshare", "--user", "--map-user=4242"]
LAUNCHED = 20
LAUNCHER = f"""
for _ in $(seq {LAUNCHED}); do
    sh -c 'trap "echo term; exit" TERM; echo up; sleep 1000 >/dev/null 2>&1 & wait' 2>/dev/null &
done
wait
"""
"""Starts so many processes that say when they get SIGTERM, and dies of it without a word."""
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        os.close(1), os.close(2)
        time.sleep(1000)
    os._exit(0)
os.wait()
"""
"""Leaves a daemon behind: in a session of its own, without its parent, deaf to SIGTERM."""


def test_the_devices_are_given_back_only_after_what_the_command_left_behind_has_ended(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "w", "--", "sh", "-c", LEAVE) as process:
        survivor = int(line_of(process))
        assert process.stderr is not None
        said = process.stderr.readline()
        assert (
            f"outfitter: sh has ended; keeps the devices until what it left behind has ended, too: {survivor}" in said
        )
        assert "(sleep 1000)" in said
        assert one_gpu.wait_for_state("w", "allocated")["state"] == "allocated"
        os.kill(survivor, signal.SIGKILL)
        assert finish(process)[0] == 7
    one_gpu.wait_for_state("w", "ended")


def test_a_daemon_without_a_parent_is_waited_for_as_well(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "w", "--", sys.executable, "-c", DAEMON) as process:
        survivor = int(line_of(process))
        assert process.stderr is not None
        assert str(survivor) in process.stderr.readline()
        assert one_gpu.wait_for_state("w", "allocated")
        os.kill(survivor, signal.SIGKILL)
        assert finish(process)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_commands_end_ends_what_it_left_behind(one_gpu: Manager, number: signal.Signals) -> None:
    with one_gpu.popen("run", "--", "sh", "-c", LEAVE) as process:
        survivor = int(line_of(process))
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(number)
        assert finish(process)[0] == 7
        wait_until_ended(survivor)


def test_what_a_run_in_a_user_namespace_leaves_behind_keeps_the_devices(one_gpu: Manager) -> None:
    command = [*IN_A_USER_NAMESPACE, *OUTFITTER, "run", "--worker", "w", "--", "sh", "-c", LEAVE_AND_WAIT]
    with subprocess.Popen(command, env=one_gpu.environment, stdout=subprocess.PIPE, text=True) as process:
        survivor = int(line_of(process))
        try:
            process.kill()
            one_gpu.wait_for(lambda: f"{survivor} (sleep)" in str((one_gpu.record("w") or {}).get("delayed_by")))
        finally:
            os.kill(survivor, signal.SIGKILL)
    one_gpu.wait_for_state("w", "ended")
    assert "not all processes of the worker were searched for" in one_gpu.outfitter("history").stdout


def test_sigterm_reaches_also_those_whose_parent_dies_of_it_at_once(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "w", "--", "sh", "-c", LAUNCHER) as process:
        assert [line_of(process) for _ in range(LAUNCHED)] == LAUNCHED * ["up"]
        assert one_gpu.outfitter("deregister", "--worker", "w").returncode == 0
        assert finish(process)[1].split() == LAUNCHED * ["term"]


def test_kill_survivors_ends_even_a_daemon_that_does_not_want_to(one_gpu: Manager) -> None:
    options = ["--worker", "w", "--kill-survivors", "--kill-after", "200ms"]
    with one_gpu.popen("run", *options, "--", sys.executable, "-c", DAEMON) as process:
        survivor = int(line_of(process))
        assert finish(process)[0] == 0
        wait_until_ended(survivor)
    one_gpu.wait_for_state("w", "ended")


def test_processes_that_end_while_the_command_runs_leave_no_zombies(one_gpu: Manager) -> None:
    count = """
import os, subprocess, time

def is_zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[:2] == ["Z", str(os.getppid())]
    except (FileNotFoundError, ProcessLookupError):
        return False

for _ in range(5):
    subprocess.run(["sh", "-c", "true & true"])
while any(map(is_zombie, filter(str.isdecimal, os.listdir("/proc")))):
    time.sleep(0.01)
"""
    with one_gpu.popen("run", "--", sys.executable, "-c", count) as process:
        assert finish(process)[0] == 0


@pytest.mark.parametrize("kill", [False, True])
def test_when_run_is_killed_the_manager_keeps_the_devices_for_what_is_left(one_gpu: Manager, kill: bool) -> None:
    options = ["--kill-survivors", "--kill-after", "100ms"] if kill else []
    with one_gpu.popen(
        "run", "--worker", "w", *options, "--", sys.executable, "-c", DAEMON + "time.sleep(1000)"
    ) as run:
        survivor = int(line_of(run))
        with one_gpu.popen("run", "--worker", "next", "--", "true") as waiter:
            one_gpu.wait_for_state("next", "pending")
            run.kill()
            run.communicate(timeout=PATIENCE)
            if not kill:
                one_gpu.wait_for(lambda: "delayed_by" in (one_gpu.record("w") or {}))
                record = one_gpu.wait_for_state("w", "releasing")
                program = Path(sys.executable).name
                assert record["delayed_by"] == f"process {survivor} ({program}) of the worker still runs"
                explained = one_gpu.outfitter("explain", "next").stdout
                assert f"process {survivor} ({program})" in explained
                assert waiter.poll() is None
                os.kill(survivor, signal.SIGKILL)
            assert finish(waiter)[0] == 0
            wait_until_ended(survivor)
    assert one_gpu.wait_for_state("w", "ended")["reason_code"] == "owner-died"


def test_a_lost_allocation_ends_what_the_command_left_behind(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "w", "--", "sh", "-c", LEAVE) as process:
        survivor = int(line_of(process))
        assert process.stderr is not None
        process.stderr.readline()
        assert one_gpu.outfitter("deregister", "--worker", "w").returncode == 0
        assert finish(process)[0] == 7
        wait_until_ended(survivor)


def test_the_manager_keeps_the_devices_of_a_deregistered_worker_while_its_command_lives(one_gpu: Manager) -> None:
    deaf = "trap '' TERM; echo ready; sleep 1000 & wait"
    with one_gpu.popen("run", "--worker", "w", "--kill-after", "1s", "--", "sh", "-c", deaf) as process:
        assert line_of(process) == "ready"
        assert one_gpu.outfitter("deregister", "--worker", "w").returncode == 0
        one_gpu.wait_for_state("w", "releasing")
        assert finish(process)[0] == -signal.SIGKILL
    one_gpu.wait_for_state("w", "ended")


def test_run_starts_where_ended_children_are_ignored(one_gpu: Manager) -> None:
    ignoring = ["sh", "-c", 'trap "" CHLD; exec "$@"', "sh", *OUTFITTER, "run", "--", "sh", "-c", "exit 3"]
    done = subprocess.run(ignoring, env=one_gpu.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr

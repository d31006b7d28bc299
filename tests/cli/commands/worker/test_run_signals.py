"""`outfitter run` and signals: to it while it waits, to its command, and both from a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cli.commands.worker.conftest import PATIENCE, finish, line_of
from support.managers.process import OUTFITTER, Manager

pytestmark = pytest.mark.slow

SAY_SIGNALS = """
import signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"):
    signal.signal(getattr(signal, name), lambda number, frame: print(signal.Signals(number).name, flush=True))
print("ready", flush=True)
for line in sys.stdin:
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_while_waiting_withdraws(one_gpu: Manager, number: signal.Signals) -> None:
    with one_gpu.popen("run", "--worker", "holder", "--", "cat", stdin=subprocess.PIPE) as holder:
        one_gpu.wait_for_state("holder", "allocated")
        with one_gpu.popen("run", "--worker", "waiter", "--", "true") as waiter:
            one_gpu.wait_for_state("waiter", "pending")
            waiter.send_signal(number)
            code, out, err = finish(waiter)
        assert (code, out) == (-number, "")
        assert "Traceback" not in err
        record = one_gpu.wait_for_state("waiter", "ended")
        assert record["reason_code"] == "withdrawn"
        assert holder.poll() is None
        holder.communicate(timeout=PATIENCE)


def test_signals_that_are_for_the_command_do_not_end_the_waiting(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "holder", "--", "cat", stdin=subprocess.PIPE) as holder:
        one_gpu.wait_for_state("holder", "allocated")
        with one_gpu.popen("run", "--worker", "waiter", "--", "true") as waiter:
            one_gpu.wait_for_state("waiter", "pending")
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH):
                waiter.send_signal(number)
            holder.communicate(timeout=PATIENCE)
            assert finish(waiter)[0] == 0


def test_signals_to_the_process_group_while_waiting_never_reach_the_command(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "holder", "--", "cat", stdin=subprocess.PIPE) as holder:
        one_gpu.wait_for_state("holder", "allocated")
        with one_gpu.popen("run", "--worker", "waiter", "--", "true", start_new_session=True) as waiter:
            one_gpu.wait_for_state("waiter", "pending")
            os.killpg(waiter.pid, signal.SIGUSR1)
            holder.communicate(timeout=PATIENCE)
            assert finish(waiter)[0] == 0


def test_signals_are_passed_on_and_the_command_decides(shared_manager: Manager) -> None:
    names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"]
    with shared_manager.popen("run", "--", sys.executable, "-c", SAY_SIGNALS, stdin=subprocess.PIPE) as process:
        assert line_of(process) == "ready"
        for name in names:
            process.send_signal(getattr(signal, name))
            assert line_of(process) == name
        assert finish(process)[0] == 0


def test_the_signal_that_ends_the_command_ends_run(shared_manager: Manager) -> None:
    with shared_manager.popen("run", "--", "sh", "-c", "echo ready; exec sleep 1000") as process:
        assert line_of(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == -signal.SIGTERM


def test_ctrl_c_ends_the_script_that_runs_it(shared_manager: Manager) -> None:
    """A shell goes on after Ctrl-C unless its command has died of it."""
    command = [*OUTFITTER, "run", "--", "sh", "-c", "echo ready; exec sleep 1000"]
    with subprocess.Popen(
        ["bash", "-c", '"$@"; echo the script goes on', "bash", *command],
        env=shared_manager.environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as script:  # fmt: skip
        assert line_of(script) == "ready"
        os.killpg(script.pid, signal.SIGINT)
        assert finish(script)[:2] == (-signal.SIGINT, "")


def test_ctrl_c_in_a_terminal_reaches_the_command_once(shared_manager: Manager, tmp_path: Path) -> None:
    counts = """
import signal, sys
count = 0
signals = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", flush=True)
while signal.sigwait(signals) == signal.SIGINT:
    count += 1
    print("interrupted", count, flush=True)
sys.exit(count)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*OUTFITTER, "run", "--", sys.executable, "-c", counts], shared_manager.environment)  # noqa: S606
    try:
        said = b""
        while b"ready" not in said:
            said += os.read(terminal, 1000)
        os.kill(pid, signal.SIGSTOP)  # the command sees Ctrl-C first, so that a second one would not melt into it
        os.write(terminal, b"\x03")
        while b"interrupted" not in said:
            said += os.read(terminal, 1000)
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGTERM)  # passed on by `run`, after whatever it makes of the terminal's signal
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 1


INTERRUPTED_AT_THE_GRANT = """
import os, select, sys
from outfitter_service.cli import main

class Warnings:
    def write(self, text):
        if "continues without infos" in text:  # said last before the command is started
            print("granted", flush=True)
            names = {os.path.realpath(f"/proc/self/fd/{number}"): int(number) for number in os.listdir("/proc/self/fd")}
            select.select([number for name, number in names.items() if "signalfd" in name], [], [])
        return len(text)

    def flush(self):
        pass

sys.stderr = Warnings()
main(["run", "--worker", "interrupted", "--", "echo", "the command ran"])
"""


def test_ctrl_c_in_the_moment_of_the_grant_withdraws(tmp_path: Path) -> None:
    """The terminal's signal is there, not yet read, and the command has not been within its reach."""
    manager = Manager(tmp_path, 'external-resources = ["paper"]\n[external-resource.paper]\namount = 1\n')
    manager.start()
    try:
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(sys.executable, [sys.executable, "-c", INTERRUPTED_AT_THE_GRANT], manager.environment)  # noqa: S606
        said = b""
        try:
            while b"granted" not in said:
                said += os.read(terminal, 1000)
            os.write(terminal, b"\x03")
            with suppress(OSError):  # all who had the terminal have ended
                while more := os.read(terminal, 1000):
                    said += more
            _, status = os.waitpid(pid, 0)
        finally:
            os.close(terminal)
        assert b"the command ran" not in said
        assert os.waitstatus_to_exitcode(status) == -signal.SIGINT
        record = manager.wait_for_state("interrupted", "ended")
        assert record["reason"] == "deregistered: withdrawn"
    finally:
        manager.kill9()


def test_signals_that_were_ignored_at_the_start_stay_ignored(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "holder", "--", "cat", stdin=subprocess.PIPE) as holder:
        one_gpu.wait_for_state("holder", "allocated")
        nohup = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *OUTFITTER, "run", "--worker", "waiter", "--", "true"]
        with subprocess.Popen(nohup, env=one_gpu.environment, stderr=subprocess.DEVNULL) as waiter:
            one_gpu.wait_for_state("waiter", "pending")
            waiter.send_signal(signal.SIGHUP)
            holder.communicate(timeout=PATIENCE)
            assert waiter.wait(PATIENCE) == 0


def test_the_command_starts_with_the_signals_as_they_were(shared_manager: Manager) -> None:
    show = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]

    def standard_signals(text: str) -> list[int]:
        """What is blocked, and what is ignored; 32 and 33 are the C library's own."""
        return [int(line.split()[1], 16) & 0x7FFFFFFF for line in text.splitlines()]

    directly = subprocess.run(show, capture_output=True, text=True, timeout=60)
    within = shared_manager.outfitter("run", "--", *show)
    assert standard_signals(within.stdout) == standard_signals(directly.stdout)
    assert len(standard_signals(within.stdout)) == 2

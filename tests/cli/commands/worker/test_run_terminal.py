"""`outfitter run` in a terminal, under systemd, under cron, and as the first process of a PID namespace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from cli.commands.worker.conftest import PATIENCE, line_of
from outfitter_service.cli._lib.running.no_devices import NONE_VISIBLE
from support import polling
from support.managers.process import OUTFITTER, Manager
from support.processes.terminal import Terminal, terminal

pytestmark = pytest.mark.slow

COMMAND = """
import os, signal, sys
def say(number, frame):
    print(signal.Signals(number).name, *os.get_terminal_size(0), flush=True)
signal.signal(signal.SIGCONT, say)
signal.signal(signal.SIGWINCH, say)
print("pid", os.getpid(), "foreground", os.tcgetpgrp(0) == os.getpgrp(), flush=True)
print("read", sys.stdin.readline().strip(), flush=True)
"""

SUSPENDED = """
import os, signal
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.setpgid(0, 0)
os.tcsetpgrp(0, os.getpid())
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print("read", input(), flush=True)
"""
"""Stops as an interactive bash does at `suspend`: alone, in the foreground, in a process group of its own."""

PAUSED = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("pids", os.getppid(), os.getpid(), "ready", flush=True)
print("passed on", signal.Signals(signal.sigwait([signal.SIGUSR1])).name, flush=True)
"""
"""Says the pids of `outfitter run` and of itself, and what signal it gets."""


def running(manager: Manager, code: str) -> AbstractContextManager[Terminal]:
    """A terminal in which worker `w` runs this Python code."""
    return terminal(manager.environment, *OUTFITTER, "run", "--worker", "w", "--", sys.executable, "-c", code)


def wait_until_stopped(pid: int) -> None:
    polling.until(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text(), lambda: f"{pid} is not stopped")


def test_ctrl_z_stops_run_and_its_command_and_fg_continues_both(one_gpu: Manager) -> None:
    with running(one_gpu, COMMAND) as shell:
        shell.until("pid ")
        command = int(shell.until(" foreground True"))
        shell.type("\x1a")
        shell.until("stopped")
        wait_until_stopped(command)  # a read of the terminal that still goes on would take the next line
        assert one_gpu.wait_for_state("w", "allocated"), "a stopped command keeps its devices"
        shell.type("fg\n")
        shell.until("SIGCONT")
        shell.type("typed\n")
        shell.until("read typed")
        shell.until("over 0")
    one_gpu.wait_for_state("w", "ended")


def test_a_command_that_stops_alone_stops_run_too_and_fg_gives_it_the_terminal_back(one_gpu: Manager) -> None:
    with running(one_gpu, SUSPENDED) as shell:
        shell.until("ready")
        shell.until("stopped")
        assert one_gpu.wait_for_state("w", "allocated"), "a stopped command keeps its devices"
        shell.type("fg\n")
        shell.type("typed\n")
        shell.until("read typed")
        shell.until("over 0")
    one_gpu.wait_for_state("w", "ended")


def test_a_command_that_stopped_alone_ends_with_its_terminal(one_gpu: Manager) -> None:
    with running(one_gpu, SUSPENDED) as shell:
        shell.until("stopped")
    one_gpu.wait_for_state("w", "ended")


def test_a_command_that_is_stopped_and_continued_by_its_pid_does_not_stop_run(one_gpu: Manager) -> None:
    with running(one_gpu, PAUSED) as shell:
        shell.until("pids ")
        run, command = map(int, shell.until(" ready").split())
        os.kill(command, signal.SIGSTOP)
        wait_until_stopped(command)
        os.kill(run, signal.SIGUSR1)
        os.kill(command, signal.SIGCONT)
        shell.until("passed on SIGUSR1")
        shell.until("over 0")
    one_gpu.wait_for_state("w", "ended")


def test_the_command_hears_of_a_new_size_of_the_window(shared_manager: Manager) -> None:
    with terminal(shared_manager.environment, *OUTFITTER, "run", "--", sys.executable, "-c", COMMAND) as shell:
        shell.until("foreground True")
        shell.resize(101, 31)
        shell.until("SIGWINCH 101 31")
        shell.type("\n")
        shell.until("over 0")


def test_ctrl_c_ends_what_the_command_left_behind(one_gpu: Manager) -> None:
    leave = "sleep 1000 & echo left"
    with terminal(one_gpu.environment, *OUTFITTER, "run", "--worker", "w", "--", "sh", "-c", leave) as shell:
        shell.until("left")
        shell.until("sh has ended; keeps the devices")
        shell.type("\x03")
        shell.until("over 0")
    one_gpu.wait_for_state("w", "ended")


def test_the_command_says_to_systemd_that_it_is_ready(shared_manager: Manager, tmp_path: Path) -> None:
    ready = """
import os, socket
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
    notify.sendto(f"READY=1\\nMAINPID={os.getpid()}".encode(), os.environ["NOTIFY_SOCKET"])
print(os.getpid(), flush=True)
"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        unit = shared_manager.environment | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        done = subprocess.run(
            [*OUTFITTER, "run", "--", sys.executable, "-c", ready], env=unit, capture_output=True, text=True, timeout=60
        )
        assert systemd.recv(1000).decode() == f"READY=1\nMAINPID={done.stdout.strip()}"


def test_cron_has_no_terminal_and_hardly_an_environment(shared_manager: Manager) -> None:
    small = {name: shared_manager.environment[name] for name in ("OUTFITTER_BUS", "OUTFITTER_HOST")}
    cron = small | {"PATH": "/usr/bin:/bin", "HOME": "/", "SHELL": "/bin/sh", "LOGNAME": "root"}
    done = subprocess.run(
        [*OUTFITTER, "run", "--", "sh", "-c", "cat; echo $OUTFITTER_HOST; exit 5"],
        env=cron, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (5, cron["OUTFITTER_HOST"]), done.stderr


NAMESPACE = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


def in_namespace() -> bool:
    """Whether this machine lets us make a PID namespace."""
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False, timeout=60).returncode == 0


def test_as_the_first_process_of_a_pid_namespace_it_passes_signals_on_and_the_lease_decides(one_gpu: Manager) -> None:
    if not in_namespace():
        return  # containers of some machines make none
    command = "trap 'exit 9' TERM; (true &); echo ready; while :; do sleep 0.01; done"
    run = [*NAMESPACE, *OUTFITTER, "run", "--worker", "w", "--", "sh", "-c", command]
    with subprocess.Popen(run, env=one_gpu.environment, stdout=subprocess.PIPE, text=True) as process:
        assert line_of(process) == "ready"
        record = one_gpu.wait_for_state("w", "allocated")
        assert record["request"]["lease_s"] is not None
        [first] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert Path(f"/proc/{first}/status").read_text().partition("NSpid:")[2].split()[:2] == [first, "1"]
        os.kill(int(first), signal.SIGTERM)
        assert process.wait(PATIENCE) == 9
    one_gpu.wait_for_state("w", "ended")


def test_a_command_whose_grant_is_empty_sees_no_device_of_any_vendor(tmp_path: Path) -> None:
    manager = Manager(tmp_path, 'external-resources = ["paper"]\n[external-resource.paper]\namount = 1\n')
    manager.start()
    try:
        inherited = manager.environment | {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}
        done = subprocess.run(
            [*OUTFITTER, "run", "--", "env"], env=inherited, capture_output=True, text=True, timeout=60
        )
        said = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        assert {name: said[name] for name in NONE_VISIBLE} == NONE_VISIBLE
        assert said["CUDA_VISIBLE_DEVICES"] == "-1"
    finally:
        manager.kill9()


def test_a_command_with_devices_keeps_the_variables_of_other_vendors(shared_manager: Manager) -> None:
    inherited = shared_manager.environment | {"HIP_VISIBLE_DEVICES": "3"}
    done = subprocess.run([*OUTFITTER, "run", "--", "env"], env=inherited, capture_output=True, text=True, timeout=60)
    said = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert said["HIP_VISIBLE_DEVICES"] == "3"
    assert "ONEAPI_DEVICE_SELECTOR" not in said

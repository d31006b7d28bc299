"""`outfitter run` that loses its lease: all its processes are dead when the next worker gets the device."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands.worker.conftest import PATIENCE, finish, line_of
from support.managers.process import OUTFITTER, Manager, StartManager

pytestmark = pytest.mark.slow

WITH_FOREIGN_PROC = (
    "unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--pid", "--fork", "--kill-child",
)  # fmt: skip
"""What starts a program in a PID namespace of its own, where /proc has the pids of this one."""
APART = (*WITH_FOREIGN_PROC, "--mount-proc")
"""What starts a program in a PID namespace of its own."""
USING = """
import fcntl, os, signal, sys
device = open(sys.argv[1])
fcntl.flock(device, fcntl.LOCK_EX)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.close(1), os.close(2)
    sys.stdin.read()
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_DFL if sys.argv[2] == "obeys" else signal.SIG_IGN)
print("ready", flush=True)
if sys.argv[2] == "ends":
    os._exit(0)
sys.stdin.read()
"""
"""Locks a file, and so does its child, which is deaf to SIGTERM. The file is free when both have ended. Its second
argument says what it does itself. What else ends both is the end of its input."""
TRYING = """
import fcntl, sys
fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
"""Fails while anybody else has locked the file."""
CHILD_FIRST = """
import signal, subprocess, sys
child = subprocess.Popen(["cat"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
sys.exit(-child.wait())
"""
"""Ends after its child, with the number of the signal that ended the child."""


@pytest.mark.parametrize(("command", "code"), [("ignores", -9), ("obeys", -15), ("ends", 0)])
def test_all_processes_are_dead_when_the_next_worker_gets_the_device(
    start_manager: StartManager, tmp_path: Path, command: str, code: int
) -> None:
    """However long --kill-after is. The worker cannot write to its bus any more, and no manager watches its process."""
    manager = start_manager(gpus=1, program=[*APART, *OUTFITTER])
    device = tmp_path / "device"
    device.touch()
    options = ["--worker", "w", "--lease", "3s", "--kill-after", "1h", "--kill-survivors"]
    using = [sys.executable, "-c", USING, str(device), command]
    with manager.popen("run", *options, "--", *using, stdin=subprocess.PIPE) as process:
        assert line_of(process) == "ready"
        with manager.popen("run", "--worker", "next", "--", sys.executable, "-c", TRYING, str(device)) as waiter:
            manager.wait_for_state("next", "pending")
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
            code_of_next, _, errors = finish(waiter)
            assert code_of_next == 0, errors
        assert finish(process)[0] == code
    assert manager.wait_for_state("w", "ended")["reason_code"] == "lease-expired"


@pytest.mark.parametrize("program", [OUTFITTER, [*WITH_FOREIGN_PROC, *OUTFITTER]], ids=["here", "with-foreign-proc"])
def test_a_lost_allocation_ends_the_command_and_its_children_at_once(one_gpu: Manager, program: list[str]) -> None:
    """Not one after the other: here the command ends only after its child."""
    command = [*program, "run", "--worker", "w", "--", sys.executable, "-c", CHILD_FIRST]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=one_gpu.environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert line_of(process) == "ready"
        assert one_gpu.outfitter("deregister", "--worker", "w").returncode == 0
        assert process.wait(PATIENCE) == 15


def test_run_is_refused_where_proc_does_not_show_it(shared_manager: Manager) -> None:
    """It could not end what its command starts."""
    hiding = ["sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    command = [*WITH_FOREIGN_PROC, "--mount", *hiding, *OUTFITTER, "run", "--", "true"]
    done = subprocess.run(command, env=shared_manager.environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "/proc does not show this process" in done.stderr) == (125, True), done.stderr

"""`outfitter run` where a standard stream is closed, full or not read: notices are lost, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands.worker.conftest import PATIENCE, line_of
from support.managers.process import OUTFITTER, Manager
from support.processes.standard_error import MUTE, mute, redirected

pytestmark = pytest.mark.slow

ENDING = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("begun", flush=True)
signal.sigwait([signal.SIGTERM])
print("asked", flush=True)
sys.exit(3)
"""
"""A command that ends in order when it is asked to, at whatever moment that is."""


@pytest.mark.parametrize("kind", MUTE)
def test_who_has_waited_runs_its_command_although_nobody_can_read_why_it_waited(one_gpu: Manager, kind: str) -> None:
    held = one_gpu.outfitter("register", "--worker", "hold", "--resource", "gpu=1", "--lease", "none", "--wait", "20")
    assert held.returncode == 0, held.stderr
    with (
        mute(kind, [*OUTFITTER, "run", "--worker", "w", "--", "echo", "got it"]) as (command, stderr),
        _started(one_gpu, command, stderr) as waiter,
    ):
        one_gpu.wait_for_state("w", "pending")
        assert one_gpu.outfitter("deregister", "--worker", "hold").returncode == 0
        out, _ = waiter.communicate(timeout=PATIENCE)
        assert (waiter.returncode, out) == (0, "got it\n")


@pytest.mark.parametrize("kind", MUTE)
def test_a_command_whose_devices_are_lost_is_asked_to_end_although_nobody_can_read_why(
    one_gpu: Manager, kind: str
) -> None:
    with (
        mute(kind, [*OUTFITTER, "run", "--worker", "w", "--", sys.executable, "-c", ENDING]) as (command, stderr),
        _started(one_gpu, command, stderr) as running,
    ):
        assert line_of(running) == "begun"
        assert one_gpu.outfitter("deregister", "--worker", "w").returncode == 0
        out, _ = running.communicate(timeout=PATIENCE)
        assert (running.returncode, out) == (3, "asked\n")


@pytest.mark.parametrize("kind", MUTE)
def test_the_exit_code_is_the_same_where_no_error_can_be_printed(shared_manager: Manager, kind: str) -> None:
    program = shared_manager.folder / "no-format"
    program.write_bytes(b"\x00\x01")
    program.chmod(0o755)
    for code, arguments in {
        125: ["--resource", "gpu=3", "--", "true"],
        126: ["--", str(program)],
        127: ["--", "no-such-command-anywhere"],
        7: ["--", "sh", "-c", "exit 7"],
    }.items():
        if (kind, code) == ("not read", 127):
            continue  # nobody has asked for devices, so it waits for the reader as other programs do
        with (
            mute(kind, [*OUTFITTER, "run", *arguments]) as (command, stderr),
            _started(shared_manager, command, stderr) as process,
        ):
            assert process.communicate(timeout=PATIENCE) == ("", None)
            assert process.returncode == code, arguments


def test_a_command_has_dev_null_for_each_stream_that_was_closed(shared_manager: Manager, tmp_path: Path) -> None:
    found = tmp_path / "found"
    look = (
        "import os; names = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)];"
        f"open({os.fspath(found)!r}, 'w').write(' '.join(names))"
    )
    command = redirected([*OUTFITTER, "run", "--", sys.executable, "-c", look], "<&- >&- 2>&-")
    done = subprocess.run(command, env=shared_manager.environment, timeout=PATIENCE, check=False)
    assert done.returncode == 0
    assert found.read_text().split() == ["/dev/null"] * 3


def _started(manager: Manager, command: list[str], stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=manager.environment, cwd=manager.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=stderr, text=True,
    )  # fmt: skip

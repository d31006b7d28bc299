"""Commands under a filter that refuses a system call: the message names the call, and who may refuse it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outfitter.testing import FakeOutfitter
from support.managers.process import OUTFITTER, environment
from support.managers.scripted import ScriptedManager
from support.processes.seccomp import PIDFD_OPEN, PIDFD_SEND_SIGNAL, refusing

CODES = pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
LEASE = (sys.executable, "-c", "from outfitter_service.cli.lease import main; main()")


def done(tmp_path: Path, call: int, code: int, *command: str) -> subprocess.CompletedProcess[str]:
    url = f"sqlite://{tmp_path}/bus/bus.db?synchronous=NORMAL"
    variables = environment(OUTFITTER_BUS=url, OUTFITTER_HOST="h")
    with ScriptedManager(url, "h", FakeOutfitter({"gpu": [{"id": "a", "index": "0"}]})):
        return subprocess.run(
            refusing(call, code, *command), env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )


def refused(code: int) -> str:
    return (
        f": {os.strerror(code)} (pidfd_open(2) needs Linux 5.3, and the seccomp profile of a container may refuse it)"
    )


@CODES
def test_run_says_which_call_is_refused(tmp_path: Path, code: int) -> None:
    found = done(tmp_path, PIDFD_OPEN, code, *OUTFITTER, "run", "--", "touch", f"{tmp_path}/begun")
    assert (found.returncode, found.stdout) == (125, "")
    assert "outfitter: the kernel does not let this process watch process " in found.stderr
    assert refused(code) in found.stderr
    assert not (tmp_path / "begun").exists()


@CODES
def test_hold_says_which_call_is_refused(tmp_path: Path, code: int) -> None:
    found = done(tmp_path, PIDFD_OPEN, code, *OUTFITTER, "hold", "--no-stdin")
    assert found.returncode == 125
    assert f"watch process {os.getpid()}{refused(code)}" in found.stderr
    line = json.loads(found.stdout)
    assert (line["type"], line["code"]) == ("error", "failed")
    assert refused(code) in line["reason"]


@CODES
def test_lease_says_which_call_is_refused(tmp_path: Path, code: int) -> None:
    found = done(tmp_path, PIDFD_OPEN, code, *LEASE)
    assert (found.returncode, found.stdout) == (1, "")
    assert f"watch process {os.getpid()}{refused(code)}" in found.stderr


@CODES
def test_a_context_says_which_call_is_refused(tmp_path: Path, code: int) -> None:
    program = f"from outfitter import RuntimeContext\nwith RuntimeContext(ends_with={os.getpid()}): pass"
    found = done(tmp_path, PIDFD_OPEN, code, sys.executable, "-c", program)
    assert found.returncode == 1
    assert f"ends_with: the kernel does not let this process watch process {os.getpid()}{refused(code)}" in found.stderr


@CODES
def test_run_says_that_it_could_end_nothing(tmp_path: Path, code: int) -> None:
    found = done(tmp_path, PIDFD_SEND_SIGNAL, code, *OUTFITTER, "run", "--", "touch", f"{tmp_path}/begun")
    assert (found.returncode, found.stdout) == (125, "")
    assert (
        f"nothing could end what the command starts: pidfd_send_signal(2): {os.strerror(code)} (it needs Linux 5.1, "
        "and the seccomp profile of a container may refuse it)"
    ) in found.stderr
    assert not (tmp_path / "begun").exists()


SEARCHING = """
import os, subprocess
from outfitter_service.runtime.survivors.processes import Mark, open_survivor, search
mark = Mark("h-refused", "w", str(os.getpid()), os.getuid())
names = {"OUTFITTER_HOST": mark.host, "OUTFITTER_WORKER": mark.worker, "OUTFITTER_INCARNATION": mark.incarnation}
process = subprocess.Popen(["/bin/sleep", "1000"], env=names)
try:
    print(open_survivor(search([mark]).survivors[mark][0]))
except PermissionError as error:
    print(error.strerror)
finally:
    process.kill()
"""


@CODES
def test_a_survivor_has_not_ended_because_the_call_is_refused(tmp_path: Path, code: int) -> None:
    command = refusing(PIDFD_OPEN, code, sys.executable, "-c", SEARCHING)
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert refused(code) in found.stdout, found.stderr

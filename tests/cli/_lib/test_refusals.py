"""What commands say where the kernel shows no process, or starts no further one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outfitter_service.cli._lib.errors import describe
from outfitter_service.cli._lib.process_limit import explain

MOUNTING = ("unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount", "sh", "-c")
LEASE = str(Path(sys.executable).parent / "outfitter-lease")

SOMEBODY_ELSE = """
import os, resource, sys
from outfitter_service.cli._lib.holding.owner import OwnerProcess
from outfitter_service.cli._lib.running.child import Child
from outfitter_service.query.errors import OutfitterCliError

OwnerProcess(os.getpid())  # it loads what somebody else may not read
if os.geteuid() == 0:  # root is denied nothing: be somebody else
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    {attempt}
except OutfitterCliError as error:
    print(error)
"""


def attempted(attempt: str) -> str:
    """What a command would print, as a user who is not root and may start nothing."""
    done = subprocess.run(
        [sys.executable, "-c", SOMEBODY_ELSE.format(attempt=attempt)], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("/proc", "cannot be identified: /proc is not mounted: mount it"),
        ("/proc/{pid}", "cannot be identified: /proc hides it (hidepid): run this as its user"),
    ],
)
def test_an_owner_that_proc_does_not_show_is_refused_with_the_reason(place: str, words: str) -> None:
    pid = os.getpid()
    hidden = f'mount -t tmpfs none {place.format(pid=pid)} && exec "$@"'
    command = [*MOUNTING, hidden, "sh", LEASE, "1", "--owner-pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"outfitter-lease: process {pid} {words}")
    assert len(done.stderr.splitlines()) == 1


def test_an_owner_of_another_user_is_refused_with_both_users() -> None:
    assert "cannot be identified: it is user 0's, and this is user" in attempted("OwnerProcess(1)")


def test_a_command_that_a_limit_does_not_let_start_is_refused_with_the_limit() -> None:
    said = attempted("Child(['true'], mask=())")
    assert said.startswith("no further process or thread can be started: a limit is reached (RLIMIT_NPROC of user ")
    assert ": 0, pids.max" in said
    assert said.rstrip().endswith("or `--pids-limit` of a container")


def test_a_thread_that_a_limit_does_not_let_start_is_no_defect() -> None:
    assert describe(RuntimeError("can't start new thread")) == explain()
    assert "(a defect of Outfitter" in describe(RuntimeError("something else"))


def test_another_error_of_a_fork_is_not_taken_for_a_limit() -> None:
    assert explain(errno.ENOMEM) == "no further process can be started: Cannot allocate memory"

"""`outfitter demo`: what a person sees first must be true, quick, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.managers.process import OUTFITTER, environment

pytestmark = pytest.mark.slow


def processes_of(folder: Path) -> list[str]:
    """The processes that work in `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "cwd").readlink().is_relative_to(folder):
                found.append(process.name)
        except OSError:
            continue
    return found


def wait_for_their_end(folder: Path) -> None:
    """Those that the kernel ends with their parent are gone a moment after it."""
    deadline = time.monotonic() + 30
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_it_shows_a_queue_moving_on_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [*OUTFITTER, "demo"], env=environment(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for words in ("clara is pending", "the queue has moved on to clara", "no GPU was ever lent twice", "owner-died"):
        assert words in done.stdout
    assert "curl" not in done.stdout  # what it shows is gone when it ends
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_one_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [*OUTFITTER, "demo"], env=environment(TMPDIR=str(tmp_path)), stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if "anna" in line:
                break
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
    wait_for_their_end(tmp_path)


TOLD_TO_END_WHILE_IT_LOOKS_ON = """
import os, signal, sys
from outfitter_service.cli import main

told = []

def tell(event, _arguments):
    if event == "socket.bind" and not told:  # one of the tasks that look on makes its reader
        told.append(event)
        os.kill(os.getpid(), signal.SIGTERM)

sys.addaudithook(tell)
main(["demo"])
"""


def test_one_that_is_told_to_end_while_it_looks_on_cleans_up_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END_WHILE_IT_LOOKS_ON],
        env=environment(TMPDIR=str(tmp_path)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert list(tmp_path.iterdir()) == []


TOLD_TO_END_WHILE_IT_STARTS_ONE = """
import os, signal, subprocess, sys
from outfitter_service.cli import main

fork_exec, started = subprocess._fork_exec, []

def fork_and_be_told(*arguments):
    started.append(fork_exec(*arguments))
    if len(started) == 1:
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    return started[-1]

subprocess._fork_exec = fork_and_be_told
try:
    main(["demo"])
finally:
    for pid in started:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        print("left behind:", pid, file=sys.stderr)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_told_to_end_while_it_starts_a_process_ends_that_one_too(
    tmp_path: Path, number: signal.Signals
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END_WHILE_IT_STARTS_ONE, number.name],
        env=environment(TMPDIR=str(tmp_path)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert done.returncode == 128 + number
    assert "left behind" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_killed_one_takes_its_processes_with_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*OUTFITTER, "demo"], env=environment(TMPDIR=str(tmp_path)), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "boris, an" in line:
                break
        assert len(processes_of(tmp_path)) >= 3
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    wait_for_their_end(tmp_path)

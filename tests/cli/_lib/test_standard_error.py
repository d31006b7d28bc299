"""Lines for a standard error that nobody reads, or that takes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outfitter_service.standard_error import BackgroundWriter
from support.processes.standard_error import MUTE, fill, mute, redirected

pytestmark = pytest.mark.slow

MAIN = (sys.executable, "-m", "outfitter_service.cli")
PATIENCE_S = 30.0


def _loss(count: int) -> str:
    return f"{count} lost\n"


def test_lines_beyond_the_longest_queue_are_dropped_and_counted_where_they_would_stand() -> None:
    reader, writer = os.pipe()
    fill(writer)
    lines = BackgroundWriter(writer, _loss, longest=3)
    lines.put(b"first\n")
    with lines._changed:
        assert lines._changed.wait_for(lambda: not lines._waiting, PATIENCE_S)  # the thread is stuck with it
    for number in range(5):
        lines.put(f"{number}\n".encode())
    assert lines.dropped == 2
    lines.finish(0.0)
    got = bytearray()
    reading = threading.Thread(target=lambda: _read_to(reader, b"lost\n", got))
    reading.start()
    reading.join(PATIENCE_S)
    assert bytes(got).lstrip(b"x") == b"first\n0\n1\n2\n2 lost\n"
    lines.put(b"later\n")
    lines.finish(PATIENCE_S)
    assert os.read(reader, 100) == b"later\n"
    assert lines.dropped == 2
    os.close(reader)


def test_lines_that_cannot_be_written_are_counted_before_the_next_one_that_can(tmp_path: Path) -> None:
    target = os.open("/dev/full", os.O_WRONLY)
    lines = BackgroundWriter(target, _loss)
    for text in (b"one\n", b"two\n"):
        lines.put(text)
        lines.finish(PATIENCE_S)
    assert lines.dropped == 2
    free = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(free, target)
    for text in (b"three\n", b"four\n"):
        lines.put(text)
        lines.finish(PATIENCE_S)
    assert (tmp_path / "log").read_bytes() == b"2 lost\nthree\nfour\n"
    assert lines.dropped == 2


@pytest.mark.parametrize("kind", [kind for kind in MUTE if kind != "not read"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["status"], 0), (["no-such-command"], 2), (["status", "--bus", "odd:"], 1), (["verify", "--bus", "odd:"], 125)],
)
def test_a_command_ends_with_the_same_code_where_its_warnings_and_errors_cannot_be_printed(
    tmp_path: Path, kind: str, arguments: list[str], code: int
) -> None:
    environment = {**os.environ, "OUTFITTER_BUS": f"sqlite://{tmp_path}/bus.db"}
    topics = subprocess.run([*MAIN, "topics", "create"], env=environment, capture_output=True, timeout=60, check=False)
    assert topics.returncode == 0, topics.stderr
    with mute(kind, [*MAIN, *arguments]) as (command, stderr):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, timeout=60, check=False)
    assert done.returncode == code
    assert b"outfitter:" not in done.stdout


def test_closed_streams_are_dev_null_before_a_command_opens_anything(tmp_path: Path) -> None:
    code = (
        "import os, sys; from outfitter_service.cli._lib import standard_streams as s; s.open_closed();"
        f"found = [os.readlink(f'/proc/self/fd/{{n}}') for n in range(3)] + [s.was_closed(n) for n in range(3)];"
        f"open({os.fspath(tmp_path / 'found')!r}, 'w').write(repr(found))"
    )
    command = redirected([sys.executable, "-c", code], "<&- 2>&-")
    assert subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60, check=False).returncode == 0
    assert (tmp_path / "found").read_text() == repr(["/dev/null"] * 3 + [True, False, True])


def _read_to(reader: int, end: bytes, got: bytearray) -> None:
    while not got.endswith(end):
        got += os.read(reader, 1 << 20)

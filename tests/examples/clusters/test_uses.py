"""The judge of examples on clusters finds each device that two living users have, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters import uses
from support.clusters.uses import Process, Use, overlaps
from support.processes.ending import wait_until_ended


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "uses"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which lives until the test ends it."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with process:
        yield process
        process.kill()


def test_a_device_of_a_living_process_is_an_overlap(file: Path, other: subprocess.Popen[bytes]) -> None:
    Use(file, "GPU-0", pid=other.pid)
    Use(file, "GPU-1").beat()
    assert overlaps(file) == []
    Use(file, "GPU-0", name="second")
    [found] = overlaps(file)
    assert str(other.pid) in found


def test_a_zombie_uses_nothing(file: Path, other: subprocess.Popen[bytes]) -> None:
    Use(file, "GPU-0", pid=other.pid)
    process = Process.of(other.pid)
    assert process.is_alive()
    other.kill()
    wait_until_ended(other.pid)  # nobody has waited for it: it is a zombie
    assert not process.is_alive()
    Use(file, "GPU-0").beat()
    assert overlaps(file) == []


def test_a_use_that_has_ended_is_no_overlap_although_its_process_lives(file: Path) -> None:
    first = Use(file, "GPU-0", name="first")
    first.end()
    Use(file, "GPU-0", name="second").beat()
    assert overlaps(file) == []


def test_a_beat_after_somebody_else_has_begun_is_an_overlap(file: Path) -> None:
    first = Use(file, "GPU-0", name="first")
    first.end()
    Use(file, "GPU-0", name="second")
    first.beat()
    assert len(overlaps(file)) == 1


def test_a_device_is_away_from_a_users_last_word_until_somebody_begins_with_it(file: Path) -> None:
    said = [
        ("begin", 10.0, "first", "GPU-0"), ("begin", 11.0, "other", "GPU-1"), ("beat", 12.0, "first", "GPU-0"),
        ("begin", 12.5, "second", "GPU-0"), ("end", 13.0, "other", "GPU-1"), ("begin", 20.0, "third", "GPU-1"),
        ("beat", 90.0, "third", "GPU-1"),
    ]  # fmt: skip
    keys = ("what", "at", "name", "device")
    text = [json.dumps({"pid": 1, "ticks": 1, **dict(zip(keys, each, strict=True))}) for each in said]
    file.write_text("\n".join(text) + "\n")
    assert uses.longest_away(file) == 7.0
    assert [(span.name, span.begun, span.last) for span in uses.spans(file)] == [
        ("first", 10.0, 12.0), ("other", 11.0, 13.0), ("second", 12.5, 12.5), ("third", 20.0, 90.0),
    ]  # fmt: skip


def test_another_program_can_begin_a_use_for_a_process(file: Path, other: subprocess.Popen[bytes]) -> None:
    program = Path(sys.modules[Use.__module__].__file__ or "")
    subprocess.run([sys.executable, program, file, "GPU-0", str(other.pid)], check=True, timeout=60)
    Use(file, "GPU-0", name="second")
    assert len(overlaps(file)) == 1


def test_a_line_that_is_being_written_counts_once_it_is_whole(file: Path) -> None:
    Use(file, "GPU-0").beat()
    text = file.read_text()
    file.write_text(text[:-2])
    assert [said["what"] for said in uses.lines(file)] == ["begin"]
    file.write_text(text)
    assert [said["what"] for said in uses.lines(file)] == ["begin", "beat"]

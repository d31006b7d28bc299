"""The checker looks at no file of the embedded bus under a second name: its log would be another one, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from outfitter_proto import topics
from outfitter_proto.bus import connect
from outfitter_verify import UnreadableError, verify

PARTS = ("bus.db", "bus.db-wal", "bus.db-shm")


@contextmanager
def used(folder: Path) -> Iterator[Path]:
    """A bus that somebody uses, so that its log is there."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(connect(f"sqlite://{folder}/bus.db")) as bus,
    ):
        portal.call(partial(topics.create, bus, "outfitter", partitions=1))
        yield folder / "bus.db"


def refused(path: Path) -> str:
    with pytest.raises(UnreadableError) as caught:
        verify(f"sqlite://{path}")
    return str(caught.value)


@pytest.mark.parametrize("part", PARTS)
def test_a_hard_link_is_refused_under_both_names(tmp_path: Path, part: str) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    second.mkdir()
    with used(first):
        for each in PARTS:
            os.link(first / each, second / each) if each == part else (second / each).touch()
        for folder in (first, second):
            assert f"{folder / part} has more than one name (2 hard links)" in refused(folder / "bus.db")


def test_a_symbolic_link_is_refused_and_a_directory_behind_one_is_not(tmp_path: Path) -> None:
    with used(tmp_path / "a") as path:
        (tmp_path / "link.db").symlink_to(path)
        assert f"{tmp_path}/link.db is a symbolic link" in refused(tmp_path / "link.db")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        assert verify(f"sqlite://{tmp_path}/b/bus.db").ok


@pytest.mark.parametrize("part", PARTS)
def test_a_file_that_is_mounted_alone_is_refused(tmp_path: Path, part: str) -> None:
    second = tmp_path / "b c"  # a blank is written as \\040 in the table of mounts
    second.mkdir()
    with used(tmp_path / "a") as path:
        for each in PARTS:
            (second / each).touch()
        script = 'mount --bind "$1" "$2" && exec "$3" -m outfitter_verify "$4"'
        command = ["unshare", "--mount", "sh", "-c", script, "sh", path.with_name(part), second / part, sys.executable]
        done = subprocess.run([*command, f"sqlite://{second}/bus.db"], capture_output=True, text=True, check=False)
    if done.stderr.startswith(("unshare", "mount")):
        pytest.skip(f"no mount here: {done.stderr}")
    assert done.returncode == 2
    assert f"{second / part} is a mount point of its own" in done.stderr


def test_a_file_that_was_renamed_is_refused_without_its_log(tmp_path: Path) -> None:
    with used(tmp_path / "a") as path:
        other = path.rename(path.with_name("other.db"))
        assert f"{path} is not there, but its log {path}-wal is" in refused(path)
        assert f"{path}-wal is the log of a file that is not there" in refused(other)
        assert sorted(each.name for each in other.parent.iterdir() if "other" in each.name) == ["other.db"]
        other.rename(path)
        assert verify(f"sqlite://{path}").ok

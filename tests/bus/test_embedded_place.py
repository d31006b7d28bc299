"""Where an embedded bus may live, and the errors that say what to do where it may not."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from outfitter_proto.bus import BusConfigurationError, Entry, TopicSpec, connect
from outfitter_proto.bus.embedded import log
from outfitter_proto.bus.embedded.database import Database
from outfitter_proto.bus.embedded.place import Place, parse


@pytest.mark.parametrize(
    ("url", "path", "synchronous"),
    [
        ("sqlite:///var/lib/outfitter/bus.db", "/var/lib/outfitter/bus.db", "FULL"),
        ("sqlite:////var/lib/outfitter/bus.db", "/var/lib/outfitter/bus.db", "FULL"),
        ("sqlite:/x/bus.db", "/x/bus.db", "FULL"),
        ("sqlite:///x/y/../bus.db?synchronous=NORMAL", "/x/bus.db", "NORMAL"),
        ("sqlite:///x/a%20b?synchronous=full", "/x/a b", "FULL"),
    ],
)
def test_a_url_names_an_absolute_path_with_three_slashes_or_four(url: str, path: str, synchronous: str) -> None:
    assert parse(url) == Place(Path(path), synchronous)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:bus.db",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/bus.db",
        "sqlite://:memory:",
        "sqlite:///x/bus.lock",
        "sqlite:///x/bus.db?synchronous=OFF",
        "sqlite:///x/bus.db?sync=FULL",
    ],
)
def test_a_url_that_names_no_such_path_is_refused_with_one_that_would_do(url: str) -> None:
    with pytest.raises(BusConfigurationError, match=r"sqlite:///absolute/path/bus\.db"):
        connect(url)


async def test_a_missing_directory_is_made_for_owner_and_group_alone(tmp_path: Path) -> None:
    async with connect(f"sqlite://{tmp_path}/new/bus.db") as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        await bus.publish("t", 0, Entry(b"k", b"v"))
        reader = await bus.open_reader("t", 0, start=None, committed=True)
        (socket,) = (tmp_path / "new" / "bus.wake").iterdir()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
        assert modes == {
            "bus.db": 0o660,
            "bus.db-wal": 0o660,
            "bus.db-shm": 0o660,
            "bus.lock": 0o660,
            "bus.wake": 0o2770,
        }
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o2770
        assert stat.S_IMODE(socket.stat().st_mode) == 0o660
        await reader.aclose()
        assert not socket.exists()


async def test_what_is_made_for_a_bus_is_closed_to_others_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another process that starts at the same time refuses it, or somebody puts a file of theirs there."""
    first: dict[str, int] = {}
    change = Path.chmod

    def look_and_change(path: Path, mode: int) -> None:
        first[path.name] = path.stat().st_mode
        change(path, mode)

    monkeypatch.setattr(Path, "chmod", look_and_change)
    umask = os.umask(0)
    try:
        async with connect(f"sqlite://{tmp_path}/new/bus.db"):
            pass
    finally:
        os.umask(umask)
    assert {name: bool(mode & stat.S_IRWXO) for name, mode in first.items()} == {"new": False, "bus.wake": False}


async def start_refused(url: str) -> str:
    """The message of the refusal."""
    with pytest.raises(BusConfigurationError) as caught:
        await connect(url).start()
    return str(caught.value)


async def test_a_directory_whose_parent_is_missing_is_refused_with_its_path_and_the_remedy(tmp_path: Path) -> None:
    message = await start_refused(f"sqlite://{tmp_path}/no/such/bus.db")
    assert f"{tmp_path}/no/such" in message
    assert "--bus" in message


async def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bus.db").symlink_to(tmp_path / "other.db")
    assert "symbolic link" in await start_refused(f"sqlite://{tmp_path}/bus.db")
    assert not (tmp_path / "other.db").exists()


async def test_a_symbolic_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bus.lock").symlink_to(tmp_path / "other")
    assert "symbolic link" in await start_refused(f"sqlite://{tmp_path}/bus.db")
    assert not (tmp_path / "other").exists()


async def test_a_directory_that_everybody_may_write_is_refused_unless_it_is_sticky(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert f"chmod o-w {tmp_path}" in await start_refused(f"sqlite://{tmp_path}/bus.db")
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o1777)
    async with connect(f"sqlite://{tmp_path}/bus.db"):
        pass


def test_in_a_directory_that_everybody_may_write_another_users_file_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path / "bus.db", "FULL")
    mine = tmp_path.stat()
    others = os.stat_result((*mine[:4], os.geteuid() + 4711, *mine[5:]))
    place.check_owner(others)  # a directory of one's own: whoever may write here was let in
    tmp_path.chmod(0o1777)
    place.check_owner(mine)
    with pytest.raises(BusConfigurationError, match="belongs to user"):
        place.check_owner(others)


async def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bus.db").touch()
    (tmp_path / "bus.db").chmod(0o666)
    assert "chmod o-w" in await start_refused(f"sqlite://{tmp_path}/bus.db")


async def test_a_file_system_that_is_not_known_to_be_local_is_refused() -> None:
    assert "not known to be local" in await start_refused("sqlite:///proc/bus.db")


async def test_another_programs_database_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "bus.db") as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = (tmp_path / "bus.db").read_bytes()
    assert "another program" in await start_refused(f"sqlite://{tmp_path}/bus.db")
    assert (tmp_path / "bus.db").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["bus.db"]


async def test_a_file_that_is_no_database_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "bus.db").write_bytes(b"no database at all" * 100)
    assert "no SQLite database" in await start_refused(f"sqlite://{tmp_path}/bus.db")
    assert (tmp_path / "bus.db").read_bytes() == b"no database at all" * 100
    assert [path.name for path in tmp_path.iterdir()] == ["bus.db"]


async def test_a_bus_of_a_later_format_is_refused(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/bus.db"
    async with connect(url):
        pass
    with sqlite3.connect(tmp_path / "bus.db") as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    assert "format 99" in await start_refused(url)


async def test_a_file_that_is_just_becoming_a_bus_is_no_strangers(tmp_path: Path) -> None:
    """Two programs open a new bus: one looks at what the file is while the other one makes the tables."""
    path = tmp_path / "bus.db"
    path.touch(mode=0o660)
    other = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)

    def make(statement: str) -> None:
        if "application_id" in statement:
            log.set_up(other)

    def look(connection: sqlite3.Connection) -> bool:
        connection.set_trace_callback(make)
        return log.recognise(connection)

    database = Database(Place(path, "FULL"))
    with closing(other):
        await database.open(look, lambda _: other.close())
    await database.close()


UNPRIVILEGED = """
import os, sys
import anyio
from outfitter_proto.bus import BusError, Entry, connect
from outfitter_proto.bus.embedded import EmbeddedBus

async def main():
    if os.geteuid() == 0:  # root is denied nothing: be somebody else
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        async with connect(sys.argv[1]) as bus:
            await bus.publish("t", 0, Entry(b"k", b"v"))
    except BusError as error:
        print(type(error).__name__, error)
    else:
        print("published")

anyio.run(main)
"""


@pytest.mark.parametrize("file_mode", [None, 0o440, 0o444], ids=["none", "not-ours", "read-only"])
async def test_a_user_who_may_not_write_is_told_whose_group_it_takes(file_mode: int | None) -> None:
    # Not in tmp_path: its parents are closed to everybody else.
    with tempfile.TemporaryDirectory(prefix="outfitter-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if file_mode is not None:
            async with connect(f"sqlite://{folder}/bus.db") as bus:
                await bus.create_topics([TopicSpec("t", 1, {})])
            for path in (folder / "bus.db", folder / "bus.lock"):
                path.chmod(file_mode)
        folder.chmod(0o555)
        command = [sys.executable, "-c", UNPRIVILEGED, f"sqlite://{folder}/bus.db"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        folder.chmod(0o755)
    assert answer.startswith("BusConfigurationError")
    assert "group" in answer
    assert str(folder) in answer

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

from outfitter_proto.bus import BusConfigurationError, Create, Entry, MissingBusError, TopicSpec, connect
from outfitter_proto.bus.embedded import log
from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.location import Location, check_directory, parse


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
    assert parse(url) == Location(Path(path), synchronous)


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
    with pytest.raises(BusConfigurationError, match=r"write sqlite:///path/to/bus\.db"):
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


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o703, 0o1702, 0o3777])
async def test_a_directory_that_everybody_may_write_is_refused_sticky_or_not_and_nothing_is_made_there(
    tmp_path: Path, mode: int
) -> None:
    tmp_path.chmod(mode)
    assert f"chmod o-w {tmp_path}" in await start_refused(f"sqlite://{tmp_path}/bus.db")
    assert list(tmp_path.iterdir()) == []


def as_seen(path: Path, **changes: int) -> os.stat_result:
    """What lstat would say of `path`, were it somebody else's or of another mode."""
    found = path.lstat()
    values = {"st_mode": found.st_mode, "st_uid": found.st_uid, "st_gid": found.st_gid} | changes
    mode, uid, gid = values["st_mode"], values["st_uid"], values["st_gid"]
    return os.stat_result((mode, *found[1:4], uid, gid, *found[6:]))


STRANGER = os.geteuid() + 4711
OUR_GROUP, ANOTHER_GROUP = os.getegid(), max([os.getegid(), *os.getgroups()]) + 1


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "taken"),
    [
        (os.geteuid(), ANOTHER_GROUP, 0o700, True),
        (os.geteuid(), ANOTHER_GROUP, 0o2770, True),
        (0, ANOTHER_GROUP, 0o755, True),
        (STRANGER, OUR_GROUP, 0o2770, True),
        (STRANGER, OUR_GROUP, 0o770, True),
        (STRANGER, OUR_GROUP, 0o755, False),
        (STRANGER, ANOTHER_GROUP, 0o755, False),
        (STRANGER, ANOTHER_GROUP, 0o770, False),
        (STRANGER, ANOTHER_GROUP, 0o2770, os.geteuid() == 0),
        (STRANGER, ANOTHER_GROUP, 0o1777, False),
        (os.geteuid(), OUR_GROUP, 0o1777, False),
    ],
)
def test_a_directory_is_ours_or_roots_or_shared_with_its_group(
    tmp_path: Path, uid: int, gid: int, mode: int, taken: bool
) -> None:
    found = as_seen(tmp_path, st_uid=uid, st_gid=gid, st_mode=stat.S_IFDIR | mode)
    if taken:
        check_directory(tmp_path, found)
    else:
        with pytest.raises(BusConfigurationError, match=str(tmp_path)):
            check_directory(tmp_path, found)


@pytest.mark.parametrize("name", ["bus.db", "bus.db-wal", "bus.db-shm", "bus.db-journal", "bus.lock", "bus.wake"])
def test_what_lies_beside_is_of_somebody_who_may_write_the_directory_and_no_others(tmp_path: Path, name: str) -> None:
    place = Location(tmp_path / "bus.db", "FULL")
    path = tmp_path / name
    path.touch(mode=0o660)
    place.check_rights(path, path.lstat())
    place.check_rights(path, as_seen(path, st_uid=0))
    with pytest.raises(BusConfigurationError, match=f"{name} belongs to user"):
        place.check_rights(path, as_seen(path, st_uid=STRANGER))
    with pytest.raises(BusConfigurationError, match=f"chmod o-w {path}"):
        place.check_rights(path, as_seen(path, st_mode=stat.S_IFREG | 0o662))
    tmp_path.chmod(0o2770)
    place.check_rights(path, as_seen(path, st_uid=STRANGER))  # let in by the group


@pytest.mark.parametrize("name", ["bus.db", "bus.db-wal", "bus.db-shm", "bus.db-journal", "bus.lock"])
@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "directory", "open to all"])
async def test_a_planted_part_of_the_bus_is_refused_before_sqlite_takes_it(
    tmp_path: Path, name: str, kind: str
) -> None:
    url = f"sqlite://{tmp_path}/bus.db"
    async with connect(url):
        pass
    path = tmp_path / name
    if path.exists():
        path.rename(tmp_path / "kept")
    match kind:
        case "link":
            (tmp_path / "target").touch()
            path.symlink_to(tmp_path / "target")
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case _:
            path.touch()
            path.chmod(0o666)
    if (name, kind) == ("bus.lock", "open to all"):  # ours: it is closed, and taken
        async with connect(url):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
        return
    assert str(path) in await start_refused(url)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("path", ["missing/bus.db", "a/b/c/bus.db", "bus.db", "empty.db", "missing/../bus.db"])
async def test_who_only_looks_makes_no_bus_and_says_that_there_is_none(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty.db").touch(mode=0o660)
    with pytest.raises(BusConfigurationError, match="there is no bus at"):
        await connect(f"sqlite://{tmp_path}/{path}", create=Create.NOTHING).start()
    assert [found.name for found in tmp_path.iterdir()] == ["empty.db"]
    assert (tmp_path / "empty.db").stat().st_size == 0


async def test_who_only_looks_uses_the_bus_that_is_there(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/bus.db"
    async with connect(url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
    async with connect(url, create=Create.NOTHING) as bus:
        assert await bus.publish("t", 0, Entry(b"k", b"v")) == 0


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

    database = Database(Location(path, "FULL"))
    with closing(other):
        await database.open(look, lambda _: other.close())
    await database.close()


PARTS = ["bus.db", "bus.db-wal", "bus.db-shm", "bus.lock"]
"""A bus's files while it is in use."""


@pytest.mark.parametrize("part", PARTS)
async def test_a_file_with_a_second_name_is_refused_under_both(tmp_path: Path, part: str) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    second.mkdir()
    async with connect(f"sqlite://{first}/bus.db") as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        os.link(first / part, second / part)
        for folder in (first, second):
            with pytest.raises(BusConfigurationError, match=f"{folder / part} has more than one name .2 hard links."):
                async with connect(f"sqlite://{folder}/bus.db") as other:
                    await other.layouts(["t"])
        await bus.publish("t", 0, Entry(b"k", b"v"))  # who was there before goes on: nobody else comes


@pytest.mark.parametrize("part", PARTS)
async def test_a_file_that_is_mounted_alone_is_refused(tmp_path: Path, part: str) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    second.mkdir()
    (second / part).touch(0o660)
    async with connect(f"sqlite://{first}/bus.db") as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        done = mounted(first / part, second / part, f"sqlite://{second}/bus.db")
    assert f"BusConfigurationError {second / part} is a mount point of its own" in done
    assert "mount its directory in place of the file" in done


async def test_a_directory_that_is_mounted_is_the_same_bus(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    second.mkdir()
    async with connect(f"sqlite://{first}/bus.db") as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        assert mounted(first, second, f"sqlite://{second}/bus.db") == "published\n"
        assert await bus.offsets("t", 0) == (0, 1)


def mounted(source: Path, target: Path, url: str) -> str:
    """What a process says that publishes on a bus, in a mount namespace with one bind mount."""
    script = 'mount --bind "$1" "$2" && exec "$3" -c "$4" "$5"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", source, target, sys.executable, PUBLISHING, url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not done.stdout:
        pytest.skip(f"no mount here: {done.stderr}")
    return done.stdout


PUBLISHING = """
import sys
import anyio
from outfitter_proto.bus import BusError, Entry, connect

async def main():
    try:
        async with connect(sys.argv[1]) as bus:
            await bus.publish("t", 0, Entry(b"k", b"v"))
    except BusError as error:
        print(type(error).__name__, error)
    else:
        print("published")

anyio.run(main)
"""


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


async def test_who_may_make_the_file_alone_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(MissingBusError, match="there is no bus at"):
        await connect(f"sqlite://{tmp_path}/nope/bus.db", create=Create.FILE).start()
    assert list(tmp_path.iterdir()) == []
    async with connect(f"sqlite://{tmp_path}/bus.db", create=Create.FILE) as bus:
        assert await bus.layouts(["t"]) == {}

"""Ledgers and messages of earlier versions (record.py), served by this one, and a ledger of a later one, refused.

A golden file has two hosts and cluster scope. The first host's manager was stopped, the second one's killed. `mark` is
where the second host's recorded commits go on: they are published again while this version serves the first host, as
in a rolling upgrade.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from outfitter_proto.bus import Entry, connect
from outfitter_proto.names import control_topic, managers_topic, topics
from support.checker.verdict import verified_with_replay
from support.managers.process import Manager, ManagerError
from support.managers.recorded import Make, in_turn, managers, unpacked

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
MANY = "many"


class Recorded(NamedTuple):
    """A golden file, unpacked, and what is in it."""

    database: Path
    hosts: list[str]
    mark: dict[str, int]
    ledger: dict[str, dict[str, Any]]


@pytest.fixture(params=NAMES)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recorded]:
    """One golden file, for one test at a time."""
    told = json.loads((GOLDEN / f"{request.param}.json").read_text())
    recording = GOLDEN / f"{request.param}.db.gz"
    with in_turn(recording):
        yield Recorded(unpacked(recording, tmp_path), told["hosts"], told["mark"], told["ledger"])


@pytest.fixture
def make(recorded: Recorded, tmp_path: Path) -> Iterator[Make]:
    """Makes a manager of this version on the golden bus: `make(host, gpus)`, or `make(host, config=…, …)`."""
    with managers(tmp_path) as manager:
        yield lambda host, gpus=0, **options: manager(host, recorded.database, gpus, **options)


def devices(record: dict[str, Any]) -> list[str]:
    return [info["id"] for info in record.get("resources", {}).get("gpu", [])]


def essence(manager: Manager) -> dict[str, tuple[str, list[str], Any]]:
    """State, devices and token of all workers."""
    return {
        "/".join((record["host"], record["worker"], record["incarnation"])): (
            record["state"], devices(record), record.get("token"),
        )
        for record in manager.records()
    }  # fmt: skip


def of_workers(ledger: dict[str, Any]) -> dict[str, tuple[str, list[str], Any]]:
    """The same, as it was recorded."""
    return {
        key: (record["state"], devices(record), record.get("token"))
        for key, record in ledger.items()
        if record["type"] == "allocation"
    }


def test_there_are_golden_ledgers() -> None:
    assert len(NAMES) >= 3


def test_a_recorded_ledger_means_what_it_meant(recorded: Recorded, make: Make) -> None:
    for cluster in ("outfitter", MANY):
        manager = make(recorded.hosts[0], 1, cluster=cluster)
        assert essence(manager) == of_workers(recorded.ledger[cluster])
        assert {record["state"] for record in manager.records()} >= {"allocated"}
        verified_with_replay(manager)


def test_hosts_are_upgraded_one_after_the_other(recorded: Recorded, make: Make) -> None:
    first, second = recorded.hosts
    ledger = of_workers(recorded.ledger["outfitter"])
    tape = cut(recorded)
    new = make(first, 3)
    new.start()
    # it goes on with what the earlier version has lent, and answers what was said since
    assert essence(new)[f"{first}/kept/1"] == ledger[f"{first}/kept/1"]
    new.wait_for(lambda: essence(new)[f"{first}/left/1"][0] == "ended")
    assert devices(new.wait_for_state("waits", "allocated")) == ["GPU-1", "GPU-2"]
    # the other host's manager still has the earlier version, and works beside it
    anyio.run(play, recorded, tape)
    assert new.outfitter("register", "--worker", "another", "--lease", "none").returncode == 0
    new.wait_for_state("another", "pending")
    assert new.readiness() == "ok\n"
    # now it is upgraded, too
    other = make(second, 3)
    other.start()
    assert essence(other)[f"{second}/kept/1"] == ledger[f"{second}/kept/1"]
    granted = other.wait_for_state("new", "allocated")
    assert other.wait_for_state("client", "allocated")["request"]["labels"] == {"a": "b"}
    assert granted["token"] > max(token for key, (_, _, token) in ledger.items() if key.startswith(second) and token)
    for manager in (new, other):
        manager.restart()
        manager.stop()
    verified_with_replay(new)


def test_a_replica_takes_the_partitions_of_an_earlier_version(recorded: Recorded, make: Make) -> None:
    host = recorded.hosts[0]
    config = (
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "static"\n'
        'param.devices = "GPU-0;GPU-1"\n'
    )
    replica = make(host, config=config, cluster=MANY, arguments=["--scope", "cluster"])
    replica.start()
    assert essence(replica) == of_workers(recorded.ledger[MANY])
    # the first of these versions gave other ids to the devices, which are held back until both workers have ended
    for worker in ("left", "kept"):
        assert replica.outfitter("deregister", "--worker", worker).returncode == 0
    assert replica.outfitter("register", "--worker", "new", "--lease", "none", "--wait", "60").returncode == 0
    replica.stop()
    verdict = replica.outfitter("verify")
    assert verdict.returncode == 0, verdict.stdout


def test_an_older_version_refuses_a_ledger_that_needs_what_it_does_not_know_and_changes_nothing(
    recorded: Recorded, make: Make
) -> None:
    """This version is the older one here. Version 0.2 says that the checkpoint has format 2, and that it knows 1."""
    first, second = recorded.hosts
    key = f"@checkpoint/host/{first}"
    later = {**recorded.ledger["outfitter"][key], "format": 2, "needs": ["seals"], "of_a_later_version": True}
    anyio.run(publish, recorded, topics().allocations, key, json.dumps(later).encode())
    manager = make(first, 3)
    ends = bounds(recorded)
    for arguments in ([], ["--adopt-ledger"], ["--take-over"]):
        with pytest.raises(
            ManagerError, match=f"{key} needs seals, and this version knows .*orders.*: run the version"
        ):
            manager.start(*arguments)
    saved = manager.outfitter("backup", "--out", "later.gz")
    assert saved.returncode == 0, saved.stderr
    assert bounds(recorded) == ends
    other = make(second, 3)
    other.start()  # its own host is of no later version
    restored = make(first, 1)
    restored.bus_url = f"sqlite://{recorded.database.parent}/other.db"
    assert restored.outfitter("topics", "create").returncode == 0
    done = restored.outfitter("restore", str(manager.folder / "later.gz"))
    assert "of a later version of Outfitter" in done.stderr


def bounds(recorded: Recorded) -> list[tuple[object, ...]]:
    """The offsets of each partition of the topics that the recorded version knows."""
    with closing(sqlite3.connect(recorded.database)) as connection, connection:
        return connection.execute(
            "SELECT topic, part, start, next FROM part WHERE topic NOT IN (SELECT id FROM topic WHERE name IN (?, ?))",
            (managers_topic("outfitter"), control_topic("outfitter")),
        ).fetchall()


async def publish(recorded: Recorded, topic: str, key: str | bytes, value: bytes | None) -> None:
    async with connect(f"sqlite://{recorded.database}") as bus:
        await bus.publish(topic, 0, Entry(key.encode() if isinstance(key, str) else key, value))


class Row(NamedTuple):
    """A recorded message."""

    topic: str
    key: bytes
    value: bytes | None


def cut(recorded: Recorded) -> list[Row]:
    """Cut the bus off at the mark, but for the registrations; what was written later."""
    tape: list[Row] = []
    with closing(sqlite3.connect(recorded.database)) as connection, connection:
        for name in (topics().allocations, topics().history):
            [(number,)] = connection.execute("SELECT id FROM topic WHERE name = ?", (name,)).fetchall()
            where = (number, recorded.mark[name])
            rows = connection.execute("SELECT key, value FROM record WHERE topic = ? AND off >= ? ORDER BY off", where)
            tape += [Row(name, *row) for row in rows]
            connection.execute("DELETE FROM record WHERE topic = ? AND off >= ?", where)
            connection.execute("UPDATE part SET next = ? WHERE topic = ?", where[::-1])
    assert len(tape) > 4
    return tape


async def play(recorded: Recorded, tape: list[Row]) -> None:
    """Publish what was cut off."""
    async with connect(f"sqlite://{recorded.database}") as bus:
        for row in tape:
            await bus.publish(row.topic, 0, Entry(row.key, row.value))

"""Cluster scope on the embedded bus: one manager serves the hosts of whole partitions."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from outfitter_proto.partitioning import partition_of
from support.checker.verdict import verdict
from support.managers.fleet import PARTITIONS, Fleet, hosts
from support.managers.process import StartManager


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    async with Fleet(tmp_path, url, "outfitter") as fleet:
        yield fleet


async def test_one_manager_answers_the_hosts_of_all_partitions(fleet: Fleet) -> None:
    fleet.start("one")
    names = hosts(12)
    assert {partition_of(name, PARTITIONS) for name in names} == set(range(PARTITIONS))
    await fleet.register(names, ["a", "b", "c"])
    expected = {"a": "allocated", "b": "allocated", "c": "pending"}
    await fleet.are({(name, worker): state for name in names for worker, state in expected.items()})
    for name in names:
        assert fleet.records[f"{name}/c/1"]["reason_code"] == "busy"
        writers = {fleet.records[f"{name}/{worker}/1"]["writer"] for worker in "abc"}
        assert writers == {f"partition/{partition_of(name, PARTITIONS)}"}
        assert fleet.records[f"@host/{name}"]["manager"]["stopped_at"] is None
    await fleet.deregister(names, ["a"])
    await fleet.are({(name, "c"): "allocated" for name in names})
    assert not (await verdict(fleet.url)).violations


async def test_an_orderly_end_says_of_every_host_that_nobody_manages_it_and_a_restart_goes_on(fleet: Fleet) -> None:
    one = fleet.start("one")
    names = hosts(6)
    await fleet.register(names, ["a"])
    await fleet.answered()
    assert one.stop() == 0
    await fleet.until(lambda records: all(records[f"@host/{name}"]["manager"]["stopped_at"] for name in names))
    await fleet.register(names, ["b"])
    fleet.start("one")
    await fleet.are({(name, worker): "allocated" for name in names for worker in "ab"})
    assert not any(fleet.records[f"@host/{name}"]["manager"]["stopped_at"] for name in names)
    assert not (await verdict(fleet.url)).violations


async def test_nobodys_messages_are_dead_letters_of_the_partitions_owner(fleet: Fleet) -> None:
    manager = fleet.start("one")
    name = hosts(1)[0]
    own = partition_of(name, PARTITIONS)
    body = {"type": "register", "host": name, "worker": "a", "incarnation": "1"}
    await fleet.say(body, partition=(own + 1) % PARTITIONS)
    await fleet.say(body, key=None)
    await fleet.say(body, key=b"no/name")
    await fleet.register([name], ["last"])
    await fleet.answered()
    manager.wait_for(lambda: manager.metric("outfitter_dead_letters_total") == 3)
    assert f"{name}/a/1" not in await fleet.read()
    assert not (await verdict(fleet.url)).violations


async def test_a_key_of_any_length_is_one_dead_letter_and_what_comes_behind_it_is_answered(fleet: Fleet) -> None:
    manager = fleet.start("one")
    name = hosts(1)[0]
    own = partition_of(name, PARTITIONS)
    body = {"type": "register", "host": name, "worker": "a", "incarnation": "1"}
    await fleet.say(body, partition=own, key=b"\0" * 60_000)
    await fleet.register([name], ["last"])
    await fleet.answered()
    await anyio.to_thread.run_sync(
        lambda: manager.wait_for(lambda: manager.metric("outfitter_dead_letters_total") == 1)
    )
    assert "at most 253" in manager.log_tail()


async def test_a_damaged_record_refuses_its_host_alone(fleet: Fleet, tmp_path: Path) -> None:
    one = fleet.start("one")
    names = hosts(8)
    await fleet.register(names, ["a"])
    await fleet.are({(name, "a"): "allocated" for name in names})
    one.kill9()
    sick, *well = names
    damage(tmp_path / "bus.db", f"{sick}/a/1")
    manager = fleet.start("one", session="2s")
    await fleet.register(well, ["b"])
    fleet.asked.discard(f"{sick}/a/1")
    await fleet.answered()
    await fleet.say({"type": "register", "host": sick, "worker": "b", "incarnation": "1"})
    manager.wait_for(lambda: manager.metric("outfitter_dead_letters_total") == 1)
    assert f"{sick}/b/1" not in await fleet.read()
    assert f"{sick}/a/1" in manager.log_tail()


def damage(path: Path, key: str) -> None:
    """Cut the ledger's last value under `key` in half."""
    with closing(sqlite3.connect(path)) as database, database:
        [topic] = database.execute("SELECT id FROM topic WHERE name = 'outfitter.allocations'").fetchone()
        select = "SELECT part, off, value FROM record WHERE topic = ? AND key = ? ORDER BY off"
        *place, value = database.execute(select, (topic, key.encode())).fetchall()[-1]
        half = value[: len(value) // 2]
        database.execute("UPDATE record SET value = ? WHERE topic = ? AND part = ? AND off = ?", (half, topic, *place))


async def test_managers_of_both_scopes_refuse_to_share_topics(fleet: Fleet, start_manager: StartManager) -> None:
    fleet.start("one")
    name = f"t-{secrets.token_hex(5)}"  # a machine has one manager of a host
    await fleet.register([name], ["a"])
    await fleet.answered()
    own = start_manager(fleet.config, bus=fleet.url, host=name, ready=False)
    assert own.wait() == 1
    assert f"partition/{partition_of(name, PARTITIONS)}" in own.log_tail()
    assert "host scope and of cluster scope must not share topics" in own.log_tail()


async def test_a_manager_of_cluster_scope_refuses_the_topics_of_hosts_managers(
    fleet: Fleet, start_manager: StartManager
) -> None:
    name = f"t-{secrets.token_hex(5)}"  # a machine has one manager of a host
    start_manager(fleet.config, bus=fleet.url, host=name)
    many = fleet.start("many", ready=False)
    assert many.wait() == 1
    assert f"host/{name}" in many.log_tail()


async def test_a_driver_that_looks_at_its_own_machine_is_refused_in_cluster_scope(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    fleet.config = (
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\n'
        f'driver = "files"\nparam.path = "{tmp_path}/devices"\n'
    )
    fleet.start("one")
    await fleet.register(["h"], ["a"])
    await fleet.are({("h", "a"): "failed"})
    assert "cluster scope" in fleet.records["h/a/1"]["reason"]

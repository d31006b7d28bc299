"""Managers that must not work beside each other in cluster scope: of another scope, or under one replica's name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from outfitter_service.runtime.identity import of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.processor.takeover import ForeignManagerError
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.kafka.broker import KafkaBroker
from support.managers.fleet import Fleet, hosts
from support.managers.in_process import CLUSTER, serving, static


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path, f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL", "outfitter") as fleet:
        yield fleet


@pytest.mark.parametrize("end", ["stopped", "killed"])
async def test_a_second_replica_on_the_embedded_bus_is_refused_and_serves_once_the_first_has_ended(
    fleet: Fleet, end: str
) -> None:
    first = fleet.start("one")
    second = fleet.start("two", ready=False)
    words = "more replicas need Kafka"
    await anyio.to_thread.run_sync(lambda: second.wait_for(lambda: words in second.log_tail()))
    assert words in second.readiness()
    await fleet.register(hosts(4), ["a"])
    await fleet.answered()
    instances = await fleet.instances()
    assert len(set(instances.values())) == 1
    if end == "stopped":
        assert await anyio.to_thread.run_sync(first.stop) == 0
    else:
        first.kill9()
    await anyio.to_thread.run_sync(lambda: second.wait_for(lambda: second.readiness() == "ok\n"))
    await fleet.register(hosts(4), ["b"])
    await fleet.answered()
    assert not set(instances.values()) & set((await fleet.instances()).values())
    assert not (await verdict(fleet.url)).violations


@pytest.mark.kafka
async def test_two_processes_under_one_replicas_name_are_one_too_many(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    async with Fleet(tmp_path, kafka_broker.url, kafka_broker.new_cluster()) as fleet:
        first = fleet.start("one")
        other = Fleet(tmp_path / "other", fleet.url, fleet.cluster)
        second = other.start("one")
        fleet.managers.append(second)
        assert await anyio.to_thread.run_sync(first.wait) == 1
        assert "replica" in first.log_tail().splitlines()[-1]
        await fleet.register(hosts(4), ["a"])
        await fleet.answered()


async def test_of_managers_of_both_scopes_that_start_at_one_moment_at_least_one_gives_up(
    tmp_path: Path,
) -> None:
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    identity = of_partition(replica_identity(CLUSTER), 0)
    committing: list[str] = []
    both = anyio.Event()

    def at_once(name: str) -> FaultyBus:
        async def script(point: str) -> None:
            if point == "commit:before" and not both.is_set():
                committing.append(name)
                if len(committing) == 2:
                    both.set()
                await both.wait()

        return FaultyBus(url, script)

    async with at_once("host") as one, at_once("cluster") as two:
        of_host = serving(one, static(1), tmp_path, ready=False)
        of_cluster = serving(
            two, static(1), tmp_path, ready=False, identity=identity, scope=PartitionScope(0, 1, identity.writer)
        )
        async with of_host as first, of_cluster as second:
            with anyio.fail_after(20):
                while not (first.ended.is_set() or second.ended.is_set()):  # noqa: ASYNC110 - either of two
                    await anyio.sleep(0.01)
            failures = [manager.failure for manager in (first, second) if manager.failure is not None]
            assert failures
            assert all(isinstance(_only(failure), ForeignManagerError) for failure in failures)


def _only(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        [error] = error.exceptions
    return error


async def test_a_partition_is_not_taken_by_who_is_told_that_it_is_anothers(tmp_path: Path) -> None:
    """As for a replica that slept over the replay of its ledger: it asks before it fences the first time, too."""
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    identity = of_partition(replica_identity(CLUSTER), 0)
    taken: list[str] = []
    asked = anyio.Event()

    async def script(point: str) -> None:
        if point.startswith("open_writer"):
            taken.append(point)

    async def anothers() -> bool:
        asked.set()
        return False

    async with FaultyBus(url, script) as bus:
        scope = PartitionScope(0, 1, identity.writer)
        manager = serving(
            bus, static(1), tmp_path, ready=False, identity=identity, scope=scope, owns_partition=anothers
        )
        async with manager as serving_none:
            with anyio.fail_after(20):
                await asked.wait()
            await serving_none.stop()
    assert taken == []

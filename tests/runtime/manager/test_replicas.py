"""Several managers of cluster scope on a real broker: what moves, what stays, and that nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from support.checker.verdict import verdict
from support.kafka.broker import KafkaBroker
from support.managers.fleet import PARTITIONS, Fleet, hosts
from support.managers.process import Manager
from support.polling import pause_s
from support.processes.freezing import freeze

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
NAMES = hosts(24)


@pytest.fixture
async def fleet(kafka_broker: KafkaBroker, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path, kafka_broker.url, kafka_broker.new_cluster()) as fleet:
        yield fleet


async def in_thread(call: object, *arguments: object) -> object:
    return await anyio.to_thread.run_sync(lambda: call(*arguments))  # type: ignore[operator]  # whatever it is


def owned(manager: Manager) -> set[int]:
    """The partitions that a manager says it serves."""
    return {n for n in range(PARTITIONS) if manager.metric("outfitter_partition_ready", partition=str(n)) == 1}


async def shared_out(*managers: Manager) -> None:
    """Wait until these managers serve all partitions among them, each its share."""
    begun = time.monotonic()
    with anyio.fail_after(60):
        while True:
            shares = [await in_thread(owned, manager) for manager in managers]
            fair = all(len(share) >= PARTITIONS // len(managers) for share in shares)  # type: ignore[arg-type]
            if fair and sum(len(share) for share in shares) == PARTITIONS:  # type: ignore[arg-type]
                return
            await anyio.sleep(pause_s(time.monotonic() - begun))


async def clean(fleet: Fleet) -> None:
    report = await verdict(fleet.url, fleet.cluster)
    assert not report.violations, report.violations
    assert fleet.asked <= (await fleet.read()).keys()


async def test_scaling_from_one_to_three_and_back_under_load_loses_and_doubles_nothing(fleet: Fleet) -> None:
    one = fleet.start("one")
    done = anyio.Event()

    async def load() -> None:
        number = 0
        while not done.is_set():
            await fleet.register(NAMES, [f"w{number}"])
            if number:
                await fleet.deregister(NAMES, [f"w{number - 1}"])
            number += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load)
        await fleet.until(lambda records: f"{NAMES[0]}/w0/1" in records)
        two = await in_thread(fleet.start, "two")
        three = await in_thread(fleet.start, "three")
        await shared_out(one, two, three)
        assert await in_thread(one.stop) == 0
        await shared_out(two, three)
        assert await in_thread(two.stop) == 0
        await shared_out(three)
        done.set()
    await fleet.answered()
    assert len(set((await fleet.instances()).values())) == 1
    await clean(fleet)


async def test_a_killed_replica_is_replaced_within_the_session(fleet: Fleet) -> None:
    one, two = fleet.start("one"), fleet.start("two")
    await shared_out(one, two)
    await fleet.register(NAMES, ["a"])
    await fleet.answered()
    one.kill9()
    await fleet.register(NAMES, ["b"])
    await fleet.answered()
    await shared_out(two)
    await clean(fleet)


async def test_a_frozen_replica_that_wakes_up_commits_nothing_and_serves_again_what_it_is_given(fleet: Fleet) -> None:
    one, two = fleet.start("one"), fleet.start("two")
    await shared_out(one, two)
    await fleet.register(NAMES, ["a"])
    await fleet.answered()
    freeze(one.pid)
    await fleet.register(NAMES, ["b"])
    await fleet.answered()
    await shared_out(two)
    os.kill(one.pid, signal.SIGCONT)
    await fleet.register(NAMES, ["c"])
    await fleet.answered()
    await shared_out(one, two)
    await fleet.register(NAMES, ["d"])
    await fleet.answered()
    await clean(fleet)


async def test_a_static_member_that_is_killed_and_restarted_has_its_partitions_again(fleet: Fleet) -> None:
    one, two = fleet.start("one", session="30s"), fleet.start("two", session="30s")
    await shared_out(one, two)
    before = owned(one)
    heard = len(two.log.read_text())
    one.kill9()
    await in_thread(one.start)
    await shared_out(one, two)
    assert owned(one) == before
    await fleet.register(NAMES, ["a"])
    await fleet.answered(within=20)
    assert "partitions assigned" not in two.log.read_text()[heard:]
    await clean(fleet)

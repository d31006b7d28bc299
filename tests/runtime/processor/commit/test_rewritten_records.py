"""Records that are written again without a step, as answers to repeated registrations or for their queue positions:
each host and all together may have so many bytes of them, and what is beyond comes later."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_proto.bus import Bus, connect
from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Owner, Survivors, Token
from outfitter_service.core import model as m
from outfitter_service.runtime.processor.commit import quotas
from outfitter_service.runtime.processor.limits import Limits
from support.checker.verdict import verdict
from support.core import commits
from support.core.core_driver import CoreDriver
from support.jumping_clock import JumpingClock
from support.managers.in_process import TOPICS, InProcessManager, deregister, register, serving, static

MOST_BYTES = 50_000
LIMITS = Limits(lease_grace_s=0.1, rewritten_bytes=2 * MOST_BYTES, checkpoint_interval_s=1e9)
WORKERS = [f"w{number}" for number in range(8)]
OPERATORS: dict[str, Any] = {f"operator-{number}": {} for number in range(200)}
"""They make a record of some 14 kB."""


KEY = AllocationKey("h/w/1")
OWNER = Owner(pid=7, start_ticks=1, pid_ns=1, boot_id="b")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> JumpingClock:
    """No window ends unless it jumps."""
    monkeypatch.setattr(quotas, "WINDOW_S", 3600.0)
    return JumpingClock()


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    async with connect(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus:
        yield bus


@pytest.fixture
async def manager(bus: Bus, tmp_path: Path, clock: JumpingClock) -> AsyncIterator[InProcessManager]:
    async with serving(bus, static(1), tmp_path, limits=LIMITS, clock=clock) as manager:
        yield manager
    assert (await verdict(bus.url)).violations == ()


async def written(manager: InProcessManager, start: int) -> tuple[int, Counter[str]]:
    """Bytes, and the number of records by worker, of the allocations in the ledger from `start` on."""
    size, count = 0, Counter[str]()
    for message in await manager._fetch(TOPICS.allocations, start):
        body = json.loads(message.value or b"{}")
        if body.get("type") == "allocation":
            size += len(message.value)
            count[body["worker"]] += 1
    return size, count


async def end(manager: InProcessManager) -> int:
    """Where the ledger ends now."""
    await manager.records()
    return manager._position


async def say_all(manager: InProcessManager, **fields: Any) -> None:
    """All workers register, with operators or again without."""
    await manager.say(*(register(worker, lease_s=None, **fields) for worker in WORKERS))


async def repeat_all(manager: InProcessManager, times: int) -> None:
    """Each worker registers again, over and over, and each time the manager has decided before the next comes."""
    for number in range(times):
        await say_all(manager, resources={})
        await manager.say(register(f"mark-{number}", resources={}, lease_s=None))
        await manager.state(f"mark-{number}", "allocated")


async def test_repeated_registrations_have_so_many_bytes_of_answers_and_no_more(manager: InProcessManager) -> None:
    await say_all(manager, resources={}, operators=OPERATORS)
    largest = max([len(json.dumps(await manager.state(worker, "allocated"))) for worker in WORKERS])
    start = await end(manager)
    await repeat_all(manager, 20)
    size, count = await written(manager, start)
    assert sum(count[f"mark-{number}"] for number in range(20)) == 20
    assert MOST_BYTES <= size <= MOST_BYTES + largest + 20 * 1000


async def test_each_repeated_registration_is_answered_later_if_not_now(
    manager: InProcessManager, clock: JumpingClock
) -> None:
    """Nothing else happens meanwhile that would have anything written."""
    await say_all(manager, resources={}, operators=OPERATORS)
    for worker in WORKERS:
        await manager.state(worker, "allocated")
    await repeat_all(manager, 5)
    start = await end(manager)
    with anyio.fail_after(30):
        while not (await written(manager, start))[1].keys() >= set(WORKERS):
            clock.ahead_s += quotas.WINDOW_S
            await manager._fetch(TOPICS.allocations, await end(manager), timeout=0.2)


async def test_queue_positions_have_so_many_bytes_and_are_right_in_the_end(
    manager: InProcessManager, clock: JumpingClock
) -> None:
    await manager.say(register("holder", gpu=1, lease_s=None))
    await say_all(manager, gpu=1, operators=OPERATORS)
    for worker in WORKERS:
        await manager.state(worker, "pending")
    start = await end(manager)
    for number in range(10):
        await manager.say(register("first", incarnation=str(number), gpu=1, lease_s=None, priority=9))
        await manager.state("first", "pending", str(number))
        await manager.say(deregister("first", str(number)))
        await manager.state("first", "ended", str(number))
    size, _ = await written(manager, start)
    assert size < 2 * MOST_BYTES
    expected = {worker: position for position, worker in enumerate(WORKERS, start=1)}
    with anyio.fail_after(30):
        while expected != _positions(await manager.records()):
            clock.ahead_s += quotas.WINDOW_S
            await manager._fetch(TOPICS.allocations, await end(manager), timeout=0.2)


async def test_that_runs_are_superseded_is_said_in_so_many_bytes_and_of_those_that_live_in_the_end(
    manager: InProcessManager, clock: JumpingClock
) -> None:
    """A message of a few packed bytes would else have a second record written, as large as the earlier run's."""
    await say_all(manager, resources={}, operators=OPERATORS)
    for worker in WORKERS:
        await manager.state(worker, "allocated")
    largest = max([len(json.dumps(record)) for record in (await manager.records()).values()])
    start = await end(manager)
    for number in range(2, 30):
        await manager.say(*(register(worker, f"{number}", resources={}, lease_s=None) for worker in WORKERS))
    await manager.state(WORKERS[-1], "allocated", "29")
    size, count = await written(manager, start)
    assert sum(count.values()) >= 28 * len(WORKERS)
    assert size <= MOST_BYTES + largest + 28 * len(WORKERS) * 500
    with anyio.fail_after(30):
        while not all(_is_superseded(record) for record in (await manager.records()).values()):
            clock.ahead_s += quotas.WINDOW_S
            await manager._fetch(TOPICS.allocations, await end(manager), timeout=0.2)


def test_what_delays_a_release_is_said_in_so_many_bytes_and_again_when_the_window_is_over() -> None:
    """Processes that take turns change the reason as often as they like."""
    now = 0.0
    most = quotas.Quotas.of(lambda: now, rewritten_bytes=2 * MOST_BYTES)
    core = CoreDriver(m.ResourceSpec(name="gpu"))
    core.report("a")
    core.register("w", 1, owner=OWNER, survivors=Survivors(uid=1234), labels={"long": "x" * 4000})
    core.deregister("w")
    assert core.state("w") == "releasing"

    def delays(reasons: range) -> int:
        """Bytes of the records and steps of so many reports."""
        commit = commits.begin(core.ledger, core.rules, core.now, quotas=most)
        for number in reasons:
            commit.decide(m.ReleaseDelayed(allocation=KEY, token=Token(1), reason=f"process {number} still runs"))
        return commit.rewritten["h"]

    assert 0 < delays(range(100)) <= MOST_BYTES + 5000
    assert core["w"].delayed_by != "process 99 still runs"
    assert delays(range(99, 100)) == 0
    now = quotas.WINDOW_S
    assert most.rewrites.end_windows() == ["h"]
    assert delays(range(99, 100)) > 4000
    assert core["w"].delayed_by == "process 99 still runs"


def test_however_many_hosts_a_worker_names_all_together_have_so_many_bytes_and_each_gets_its_turn() -> None:
    rewrites = quotas.RewriteQuota(lambda: 0.0, most=1000)
    for number in range(100):
        for host in range(20):
            rewrites.postpone(f"invented-{host}", AllocationKey(f"invented-{host}/w{number}/1"))
    rewrites.postpone("honest", AllocationKey("honest/w/1"))
    one_of_each_commit = [next(rewrites.take_waiting()) for _ in range(21)]
    assert len({key.partition("/")[0] for key in one_of_each_commit}) == 21
    rewrites.postpone("honest", AllocationKey("honest/w/1"))
    taken = []
    for key in rewrites.take_waiting():
        rewrites.use(key.partition("/")[0], 10)
        taken.append(key)
    assert len(taken) == 100
    assert Counter(key.partition("/")[0] for key in taken)["honest"] == 1
    assert rewrites.is_spent("another")
    assert not [*rewrites.take_waiting()]
    alone = quotas.RewriteQuota(lambda: 0.0, most=1000)
    alone.use("flooding", 500)
    assert alone.is_spent("flooding")
    assert not alone.is_spent("honest")


def _is_superseded(record: dict[str, Any]) -> bool:
    """Whether a record says that its worker has a newer run, if it has one and lives: the clock that jumps ends leases,
    too, and on a busy machine before the manager has said it."""
    if record.get("worker") not in WORKERS or record["incarnation"] == "29" or record["state"] == "ended":
        return True
    return record.get("reason_code") == "superseded"


def _positions(records: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {one["worker"]: one["queue_position"] for one in records.values() if one.get("worker") in WORKERS}

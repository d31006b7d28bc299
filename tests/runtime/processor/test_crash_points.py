"""A crash, or a failing bus, at any point at all: after a restart the whole committed ledger keeps the promises.

One workload (workers that come, beat, go, come again, are misspelt, on devices that are prepared and taken back, and
operators who take these out) is run once for each point at which the manager waits for the bus, with a fault at just
that point. The bench on which the devices lie outlives the managers, and sees what they did to it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import BusUnavailableError, CommitUnknownError, Entry, FencedError
from outfitter_proto.names import control_topic
from outfitter_verify import Report
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus, no_faults
from support.checker import verdict as checker
from support.core.decided import is_committed
from support.drivers.preparing import BENCHES, Bench
from support.managers.in_process import (
    CLUSTER,
    HOST,
    TOPICS,
    InProcessManager,
    another,
    deregister,
    heartbeat,
    preparing,
    register,
    serving,
    static,
)

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

CONTROL = control_topic(CLUSTER)
FIRST = [
    register("a", gpu=1), register("b", gpu=1), register("c", gpu=2), register("d", gpu=1, priority=5),
    heartbeat("a"), heartbeat("nobody"), register("a", gpu=1), register("a", gpu=2),
    register("b", "2", gpu=1), heartbeat("b"), register("e", fpga=1), deregister("a"), deregister("early"),
]  # fmt: skip
THEN = [deregister("b"), register("early", gpu=1), deregister("d"), register("f", gpu=1), deregister("a")]
LAST = [deregister("c"), deregister("b", "2")]
EXPECTED = {
    "a/1": "ended", "b/1": "ended", "b/2": "ended", "c/1": "ended", "d/1": "ended", "e/1": "failed",
    "early/1": "ended", "f/1": "allocated",
}  # fmt: skip
"""How it must end, whatever happened meanwhile."""


ORDER = {"type": "cordon-order", "host": HOST, "author": "ada", "reason": "dust", "at": "2026-01-31T12:00:00Z"}
ORDERS = [
    ORDER | {"id": "ends", "resource": "gpu"}, ORDER | {"id": "stays", "device": "of-nobody"},
    ORDER | {"id": "ends", "resource": "gpu", "ended_at": "2026-01-31T12:00:01Z"},
]  # fmt: skip


async def play(manager: InProcessManager, *, orders: Sequence[dict[str, str]] = ORDERS) -> None:
    """Say the rest of what has not been said yet, and wait for the end of it."""
    said = await manager.bus.offsets(TOPICS.registrations, 0)
    script = [*FIRST, *THEN, *LAST]
    await give(manager, orders[:-1])
    for body in script[said[1] :]:
        await manager.say(body)
    await give(manager, orders)
    standing = {f"@cordon/{HOST}/stays"} if orders else set()
    await manager.until(
        lambda records: (
            {key for key in records if key.startswith("@cordon/")} == standing
            and all(
                (record := records.get(f"{HOST}/{key}")) is not None and record["state"] == state
                for key, state in EXPECTED.items()
            )
        )
    )


async def give(manager: InProcessManager, orders: Sequence[dict[str, str]]) -> None:
    """Give those of the orders that were not given yet."""
    _, given = await manager.bus.offsets(CONTROL, 0)
    for order in orders[given:]:
        await manager.bus.publish(CONTROL, 0, Entry(order["id"].encode(), json.dumps(order).encode()))


async def verdict(bus: FaultyBus, bench: Bench) -> Report:
    report = await checker.verdict(bus.url)
    assert report.violations == ()
    assert bench.violations == []
    holders = {name: key for key, record in report.last.items() if record["state"] == "allocated"
               for name in (info["id"] for info in record["resources"]["gpu"])}  # fmt: skip
    assert bench.ready_for == holders
    return report


class Nth:
    """A script that does something once, at the `n`th point of those in `points` (all if empty)."""

    def __init__(self, n: int, act: Callable[[], Awaitable[None]], *points: str) -> None:
        self.left = n
        self.done = False
        self.where = ""
        self._act = act
        self._points = points

    async def __call__(self, point: str) -> None:
        if self.done or (self._points and point not in self._points) or point.startswith("publish"):
            return
        self.left -= 1
        if self.left < 0:
            self.done = True
            self.where = point
            await self._act()


async def run_with(url: str, folder: Path, bench: Bench, nth: Nth, crashed: anyio.Event) -> None:
    """The workload, with a fault at one point and a second manager for the rest of it."""
    async with FaultyBus(url) as said:
        await all_topics.create(said, CLUSTER, partitions=1)
        async with FaultyBus(url) as bus, serving(bus, preparing(bench.name), folder, ready=False) as manager:
            bus.script = nth
            manager.bus = said
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:

                    async def watch() -> None:
                        await crashed.wait()
                        scope.cancel()

                    tasks.start_soon(watch)
                    await play(manager)
                    tasks.cancel_scope.cancel()
        async with FaultyBus(url) as bus, serving(bus, preparing(bench.name), folder) as manager:
            await play(manager)
        report = await verdict(said, bench)
        assert report.counts["registrations"] == sum(body["type"] == "register" for body in [*FIRST, *THEN, *LAST])


async def test_a_crash_at_any_point_where_the_manager_waits_for_the_bus(tmp_path: Path) -> None:
    points = set()
    for n in count():
        folder = tmp_path / str(n)
        folder.mkdir()
        bench = BENCHES[str(folder)] = Bench(str(folder))
        crashed = anyio.Event()

        async def crash(crashed: anyio.Event = crashed) -> None:
            crashed.set()
            await anyio.sleep_forever()

        # every point of the beginning, then fewer: what follows is the same cycle again and again
        nth = Nth(n if n < 50 else 50 + (n - 50) * 5, crash)
        await run_with(f"sqlite://{folder}/bus.db?synchronous=NORMAL", folder, bench, nth, crashed)
        points.add(nth.where)
        if not nth.done or n > 70:
            break
    assert {
        "commit:before",
        "commit:after",
        "open_writer:before",
        "open_writer:after",
        "fetch:before",
        "fetch:after",
    } <= points


FAULTS: dict[str, tuple[type[Exception], str]] = {
    "it failed for certain": (BusUnavailableError, "commit:before"),
    "its outcome is unknown, and it did not happen": (CommitUnknownError, "commit:before"),
    "its outcome is unknown, and it happened": (CommitUnknownError, "commit:after"),
    "fenced by a time-out": (FencedError, "commit:before"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_commit_that_fails_at_any_time_is_taken_back_or_found_in_the_ledger(tmp_path: Path, fault: str) -> None:
    error, point = FAULTS[fault]
    for n in count():
        folder = tmp_path / str(n)
        folder.mkdir()
        bench = BENCHES[str(folder)] = Bench(str(folder))

        async def fail() -> None:
            raise error(fault)

        nth = Nth(n, fail, point)
        await run_with(f"sqlite://{folder}/bus.db?synchronous=NORMAL", folder, bench, nth, anyio.Event())
        if not nth.done or n > 8:
            break
    assert n > 2


@pytest.mark.parametrize("seed", range(4))
async def test_faults_of_every_kind_one_after_another(tmp_path: Path, seed: int) -> None:
    """Each call of the bus fails with some probability, before or after it has happened; the manager stays.

    Faults come until six have: each time the manager pauses longer, and the test's patience ends.
    """
    dice = random.Random(seed)
    left = 6
    bench = BENCHES[str(tmp_path)] = Bench(str(tmp_path))
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"

    async def host_registry(point: str) -> None:
        nonlocal left
        if left and dice.random() < 0.12:
            left -= 1
            await anyio.lowlevel.checkpoint()
            error = CommitUnknownError if point.startswith("commit") else BusUnavailableError
            raise error(f"{point}, by chance {seed}")

    async with FaultyBus(url) as said:
        await all_topics.create(said, CLUSTER, partitions=1)
        for body in FIRST:
            await said.publish(TOPICS.registrations, 0, Entry(HOST.encode(), json.dumps(body).encode()))
        async with FaultyBus(url) as bus, serving(bus, preparing(bench.name), tmp_path) as manager:
            bus.script = host_registry
            manager.bus = said
            await play(manager)
            bus.script = no_faults
            await manager.ready()
        assert (await verdict(said, bench)).counts["commits"] > 3


async def test_a_commit_that_hangs_is_not_acted_on_and_a_successor_goes_on(tmp_path: Path) -> None:
    bench = BENCHES[str(tmp_path)] = Bench(str(tmp_path))
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    async with FaultyBus(url) as said, FaultyBus(url) as bus:
        async with serving(bus, preparing(bench.name), tmp_path) as manager:
            manager.bus = said

            async def hang(point: str) -> None:
                if point == "commit:before":
                    await anyio.sleep_forever()

            await manager.until(
                lambda records: records.get("@host/h", {}).get("resources", {}).get("gpu", {}).get("devices")
            )
            bus.script = hang
            await manager.say(register("a", gpu=1))
            await manager.until(lambda _: not is_committed(manager.processor.ledger))
            assert bench.calls == []
            async with (
                FaultyBus(url) as newer,
                serving(newer, preparing(bench.name), tmp_path, identity=another()) as successor,
            ):
                await successor.state("a", "allocated")
        assert (await verdict(said, bench)).counts["managers"] == 2


async def test_the_same_input_gives_the_same_records_whatever_the_batches(
    bus: FaultyBus, serve: Serve, tmp_path: Path
) -> None:
    """Promise 4, from outside: all at once, or one message a commit."""
    found = []
    for name in ("at-once", "one-by-one"):
        folder = tmp_path / name
        folder.mkdir()
        async with FaultyBus(f"sqlite://{folder}/bus.db?synchronous=NORMAL") as own:
            await all_topics.create(own, CLUSTER, partitions=1)
            async with serve(static(), on=own) as manager:
                await manager.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"])
                for body in [*FIRST, *THEN, *LAST]:
                    before = manager.processor.inputs.reader.position
                    await manager.say(body)
                    if name == "one-by-one":
                        await manager.until(lambda _, before=before: manager.processor.position > before)
                await play(manager, orders=())
                kept = ("state", "token", "resources", "reason", "reason_code", "source", "request")
                records = await manager.records()
                found.append(
                    {key: {name: record[name] for name in kept} for key, record in records.items() if key[0] == "h"}
                )
    assert found[0] == found[1]

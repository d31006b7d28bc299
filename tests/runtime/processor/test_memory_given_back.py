"""A ledger may be gigabytes: what nobody needs any more is gone at once, and not when a collector comes to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from traceback import walk_tb
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from outfitter_proto.bus import BusUnavailableError, CommitUnknownError, Entry, Message, Reader
from outfitter_proto.keys import host_writer
from outfitter_proto.records import Allocation, ResolvedRequest, Source
from outfitter_service.core.state.ledger import Ledger, PutAllocation
from outfitter_service.runtime.changelog.restore import SLICE, discard, restore, unchanged
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.input.lookahead import LookAheadBuffer
from outfitter_service.runtime.input.scope import HostScope
from runtime.conftest import Serve
from runtime.processor.test_takeover import ReopeningBus
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import HOST, TOPICS, register, static


@pytest.fixture
def ledgers() -> Iterator[Callable[[], int]]:
    """How many ledgers there are that this test has made. The collector does nothing meanwhile."""

    def count() -> int:
        return sum(type(each) is Ledger for each in gc.get_objects())

    gc.collect()
    before = count()
    gc.disable()
    yield lambda: count() - before
    gc.enable()


async def _lose(error: type[Exception]) -> None:
    """Raise `error`, with a cause as an adapter's have."""
    try:
        raise OSError("the connection is gone")
    except OSError as cause:
        raise error("lost") from cause


@pytest.mark.parametrize("error", [CommitUnknownError, BusUnavailableError])
@pytest.mark.parametrize(
    "failing",
    [
        ["commit:before"],
        ["commit:after"],
        ["commit:before"] * 3,
        ["commit:before", "open_writer:after"],
        ["commit:before", "stable_end:after", "stable_end:after"],
        ["commit:before", "topic:after"],
    ],
    ids=" ".join,
)
async def test_the_ledger_of_a_tenure_that_failed_is_gone_when_the_next_one_has_its_own(
    bus: FaultyBus, serve: Serve, ledgers: Callable[[], int], failing: list[str], error: type[Exception]
) -> None:
    async with serve(static(3)) as manager:
        await manager.say(register("first", gpu=1))
        await manager.state("first", "allocated")
        due = [*failing]

        async def fail(point: str) -> None:
            if due and point == due[0]:
                due.pop(0)
                await _lose(error)

        bus.script = fail
        await manager.say(register("second", gpu=1))
        await manager.state("second", "allocated")
        await manager.say(register("third", gpu=1))
        await manager.state("third", "allocated")
        await manager.ready()
        assert not due
        assert ledgers() == 1


async def test_the_ledger_of_a_writer_that_must_be_reopened_is_gone_when_the_next_one_has_its_own(
    url: str, serve: Serve, ledgers: Callable[[], int]
) -> None:
    async with ReopeningBus(url) as bus, serve(static(3), on=bus) as manager:
        await manager.say(register("first", gpu=1))
        await manager.state("first", "allocated")
        opened = bus.opened
        bus.reopens = True
        await manager.say(register("second", gpu=1))
        await manager.state("second", "allocated")
        bus.reopens = False
        with anyio.fail_after(20):
            while bus.opened == opened:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        await manager.say(register("third", gpu=1))
        await manager.state("third", "allocated")
        await manager.ready()
        assert ledgers() == 1


async def test_an_error_after_the_fence_keeps_nothing_of_what_was_read_before_it(bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(3)) as manager:
        await manager.say(register("first", gpu=1))
        await manager.state("first", "allocated")
    scope = HostScope(HOST, host_writer(HOST))
    seen = await restore(bus, TOPICS.allocations, 0, scope)
    assert seen.ledger.allocations

    async def fail(point: str) -> None:
        if point == "stable_end:before":
            await _lose(BusUnavailableError)

    bus.script = fail
    with pytest.raises(BusUnavailableError):
        await unchanged(bus, TOPICS.allocations, 0, scope, seen)
    assert not seen.ledger.allocations


async def test_an_error_that_is_kept_keeps_no_ledger(bus: FaultyBus, serve: Serve) -> None:
    """As a bus keeps the last one, to tell why it cannot be used."""
    kept: list[BaseException] = []
    neighbour = Entry(b"@host/other", b'{"type": "host"}')
    async with serve(static(3)) as manager:
        await manager.say(register("first", gpu=1))
        await manager.state("first", "allocated")
        async with await bus.open_writer("another", 0) as writer:
            await writer.commit([(TOPICS.allocations, [neighbour])])
        due = ["commit:before", "topic:after"]

        async def fail(point: str) -> None:
            if due and point == due[0]:
                due.pop(0)
                try:
                    await _lose(BusUnavailableError)
                except BusUnavailableError as error:
                    kept.append(error)
                    raise

        bus.script = fail
        await manager.say(register("second", gpu=1))
        await manager.state("second", "allocated")
        await manager.ready()
        of_a_commit, of_a_restart = kept
        assert of_a_commit.__cause__ is not None
        assert (of_a_commit.__traceback__, of_a_commit.__cause__.__traceback__) == (None, None)
        held = in_frames(of_a_restart, "restored")
        assert held
        assert not any(each.ledger.hosts or each.ledger.allocations or each.neighbours for each in held)
        assert manager.processor.ledger.allocations.keys() == {"h/first/1", "h/second/1"}


def in_frames(error: BaseException, name: str) -> list[Any]:
    """What the frames of an error's traceback have under `name`."""
    return [frame.f_locals[name] for frame, _ in walk_tb(error.__traceback__) if name in frame.f_locals]


async def test_a_ledger_is_emptied_in_stretches_between_which_others_are_served() -> None:
    ledger = Ledger()
    since = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(10 * SLICE):
        record = Allocation(
            host=f"h{number % 100}", worker=str(number), incarnation="1", state="allocated",
            request=ResolvedRequest(amounts={}), since=since, writer="w", commit=1,
            source=Source(partition=0, offset=number),
        )  # fmt: skip
        ledger.restore(PutAllocation(record.key, record))
    sizes = [(len(ledger.hosts), len(ledger.allocations))]

    async def look() -> None:
        while sizes[-1] != (0, 0):
            await anyio.lowlevel.checkpoint()
            sizes.append((len(ledger.hosts), len(ledger.allocations)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        await discard(ledger)
    for (hosts, records), (hosts_left, records_left) in pairwise(sizes):
        assert hosts - hosts_left <= 2  # others may come to it after two stretches
        assert records - records_left <= 2 * SLICE


class _OneByOne(FaultyBus):
    """A bus whose every fetch brings one record, and fails when `left` of them are used up."""

    left = 2

    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        reader = await super().open_reader(topic, partition, start=start, committed=committed, lenient=lenient)
        fetch = reader.fetch

        async def fetch_one(*, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
            if self.left == 0:
                raise BusUnavailableError("lost")
            self.left -= 1
            return await fetch(max_records=1, timeout=timeout)

        reader.fetch = fetch_one  # type: ignore[method-assign]
        return reader


async def test_a_replay_that_fails_leaves_nothing_of_what_it_has_read(url: str, bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(3)) as manager:
        await manager.say(register("first", gpu=1))
        await manager.state("first", "allocated")
    async with _OneByOne(url) as slow:
        with pytest.raises(BusUnavailableError) as failed:
            await restore(slow, TOPICS.allocations, 0, HostScope(HOST, host_writer(HOST)))
    assert in_frames(failed.value, "last") == [{}]
    assert slow.left == 0


@pytest.mark.usefixtures("ledgers")
async def test_nothing_is_left_of_a_processor_that_has_ended(serve: Serve) -> None:
    async with serve(static(3)) as manager:
        await manager.say(register("first", gpu=1), register("second", gpu=5))
        await manager.state("first", "allocated")
        await manager.ready()
        processor: Any = manager.processor
        parts = (processor, processor.ledger, processor._loop, processor._reporter.state_gauges)
        kept = [weakref.ref(part) for part in parts]
        processor.stop()
        with anyio.fail_after(20):
            await manager.ended.wait()
    del parts, processor, manager.processor, manager.drivers
    assert [part() for part in kept] == [None] * 4


async def test_a_processor_that_released_its_memory_holds_nothing_large(serve: Serve) -> None:
    async with serve(static(3)) as manager:
        await manager.say(register("first", gpu=1, lease_s=60))
        await manager.state("first", "allocated")
        await manager.reported()
        assert manager.processor.state_counts().leases == 1
    processor = manager.processor
    message = Message(TOPICS.registrations, 0, 1, HOST.encode(), b"", 0)
    place = Cursor(topic_id="", position=0)
    scope = HostScope(HOST, host_writer(HOST))
    lookahead_buffer = processor.inputs.lookahead.lookahead_buffer = LookAheadBuffer(
        0, place, scope, quiet_limit=1, room=1000, most=1
    )
    lookahead_buffer.put([message])
    processor.inputs.reader.put([message])
    await processor.release_memory()
    assert (processor.state_counts().leases, processor.state_counts().records) == (0, 0)
    assert [
        len(each) for each in (processor.ledger.hosts, processor.inputs.reader.messages, lookahead_buffer.messages)
    ] == [0, 0, 0]

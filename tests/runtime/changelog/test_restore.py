"""What a replay takes from the log: the last record under each key, and what records say alike once."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import AsyncIterator, Iterable

import pytest
from msgspec import structs

from outfitter_proto.bus import Entry, Message, Reader
from outfitter_proto.codec import decode_ledger, encode
from outfitter_proto.records import Owner
from outfitter_service.runtime.changelog import restore as restore_module
from outfitter_service.runtime.changelog.restore import LedgerRefusedError, restore
from outfitter_service.runtime.input.scope import HostScope, PartitionScope
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import HOST, TOPICS, register, static

SCOPE = HostScope(HOST, f"host/{HOST}")
EVERYBODY = PartitionScope(0, 1, "partition/0")


class OneByOne(FaultyBus):
    """An embedded bus of which nobody gets more than one message at once."""

    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        reader = await super().open_reader(topic, partition, start=start, committed=committed, lenient=lenient)
        fetch = reader.fetch

        async def fetch_one(*, max_records: int = 1, timeout: float = 1.0) -> list[Message]:
            del max_records
            return await fetch(max_records=1, timeout=timeout)

        reader.fetch = fetch_one  # type: ignore[method-assign]
        return reader


@pytest.fixture(params=[FaultyBus, OneByOne], ids=["at once", "one by one"])
async def bus(url: str, request: pytest.FixtureRequest) -> AsyncIterator[FaultyBus]:
    async with request.param(url) as bus:
        yield bus


@pytest.mark.parametrize("after", ["superseded", "deleted", "last"])
async def test_only_the_last_record_under_a_key_has_to_be_understood(serve: Serve, bus: FaultyBus, after: str) -> None:
    async with serve(static(1), on=bus) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        found = json.dumps((await manager.records())["h/w/1"]).encode()
    values = {"superseded": [b"{", found], "deleted": [b"{", None], "last": [found, b"{"]}[after]
    for value in values:
        await bus.publish(TOPICS.allocations, 0, Entry(b"h/w/1", value))
    if after == "last":
        with pytest.raises(LedgerRefusedError, match="h/w/1"):
            await restore(bus, TOPICS.allocations, 0, SCOPE)
        assert (await restore(bus, TOPICS.allocations, 0, EVERYBODY)).ledger.allocations == {}
        assert list(EVERYBODY.refused) == [HOST]
        assert gc.isenabled(), "garbage is collected again, whatever came of the replay"
        return
    allocations = (await restore(bus, TOPICS.allocations, 0, SCOPE)).ledger.allocations
    assert allocations == ({"h/w/1": decode_ledger(found)} if after == "superseded" else {})
    assert (await restore(bus, TOPICS.allocations, 0, EVERYBODY)).ledger.allocations == allocations
    assert EVERYBODY.refused == {}
    assert gc.isenabled()


class _Circle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


async def test_the_collector_counts_a_replayed_ledger_as_old_and_no_garbage(serve: Serve, bus: FaultyBus) -> None:
    """It looks at young objects soon and twice, and at a million records for a second."""
    async with serve(static(1), on=bus) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
    garbage = weakref.ref(_Circle())
    ledger = (await restore(bus, TOPICS.allocations, 0, SCOPE)).ledger
    young = [id(each) for generation in (0, 1) for each in gc.get_objects(generation)]
    assert id(ledger.allocations) not in young
    assert id(ledger.hosts[HOST].holders.live) not in young
    assert garbage() is None


async def test_what_records_say_alike_is_kept_once(serve: Serve, bus: FaultyBus) -> None:
    async with serve(static(1), on=bus) as manager:
        await manager.say(register("a", gpu=1, labels={"job": "x"}, operators={"o": {"gpu": {"amount": 1}}}))
        await manager.state("a", "allocated")
    first = (await restore(bus, TOPICS.allocations, 0, SCOPE)).ledger.allocations["h/a/1"]
    written = [first]
    for number in range(6):
        labels = {"job": "x" if number % 2 else "y"}
        owner = Owner(pid=number + 1, start_ticks=number, pid_ns=1, boot_id="b") if number < 4 else None
        request = structs.replace(first.request, labels=labels, owner=owner, priority=number)
        if number == 5:
            request = structs.replace(request, amounts={"gpu": 2})
        state = "ended" if number < 3 else "failed"
        another = structs.replace(first, worker=f"w{number}", token=None, resources={}, state=state, request=request)
        written.append(another)
        await bus.publish(TOPICS.allocations, 0, Entry(another.key.encode(), encode(another)))

    kept = (await restore(bus, TOPICS.allocations, 0, SCOPE)).ledger.allocations
    assert kept == {record.key: record for record in written}
    found = list(kept.values())
    assert _different(record.request.labels for record in found) == 2
    for part in ("amounts", "resources", "operators"):
        assert _different(getattr(record.request, part) for record in found) == 2, part
    assert _different(record.state for record in found) == 3
    empty = [part for r in found for part in (r.operators, r.env, r.unavailable, r.cdi, r.shared) if not part]
    assert len(empty) > 3 * len(found)
    assert _different(empty) == 2, "a dict and a list"
    assert _different(record.host for record in found) == _different(record.writer for record in found) == 1
    assert _different(record.request.owner.boot_id for record in found if record.request.owner) == 1


@pytest.mark.parametrize("unlike", ["names", "requests", "labels"])
async def test_what_is_remembered_to_find_what_is_alike_is_bounded(
    serve: Serve, bus: FaultyBus, monkeypatch: pytest.MonkeyPatch, unlike: str
) -> None:
    async with serve(static(1), on=bus) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
    first = (await restore(bus, TOPICS.allocations, 0, SCOPE)).ledger.allocations["h/w/1"]
    written = [first]
    for number in range(1, 9):
        request = first.request
        if unlike == "requests":
            request = structs.replace(request, amounts={"gpu": number + 1})
        elif unlike == "labels":
            request = structs.replace(request, labels={"pod": str(number)})
        writer = f"host/{number}" if unlike == "names" else first.writer
        written.append(structs.replace(first, worker=f"w{number}", request=request, writer=writer))
        await bus.publish(TOPICS.allocations, 0, Entry(written[-1].key.encode(), encode(written[-1])))
    monkeypatch.setattr(restore_module, "MOST_INTERNED", 5)
    kept = (await restore(bus, TOPICS.allocations, 0, SCOPE)).ledger.allocations
    assert kept == {record.key: record for record in written}
    assert 1 < _different(record.host for record in kept.values()) < len(kept)


def _different(parts: Iterable[object]) -> int:
    """How many objects these are."""
    held = list(parts)
    return len({id(part) for part in held})


async def test_workers_that_share_the_same_devices_share_their_infos_in_memory(serve: Serve, bus: FaultyBus) -> None:
    """500 devices take some 150 kB in the record of each of their workers."""
    async with serve(static(20, extra='sharing = "shared"\n'), on=bus) as manager:
        for worker in "vw":
            await manager.say(register(worker, gpu=1))
            await manager.state(worker, "allocated")
    allocations = (await restore(bus, TOPICS.allocations, 0, SCOPE)).ledger.allocations
    first, second = (record.resources for record in allocations.values())
    assert len(first["gpu"]) == 20
    assert first["gpu"] is second["gpu"]

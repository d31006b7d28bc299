"""What a replay takes from the log: the last record under each key, and what records say alike once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from outfitter_proto.bus import Entry, Message, Reader
from outfitter_proto.codec import decode_ledger, encode
from outfitter_proto.records import Allocation
from outfitter_service.runtime import restore as restoring
from outfitter_service.runtime.remit import HostRemit
from outfitter_service.runtime.restore import LedgerRefusedError, restore
from service.conftest import Serve
from support.faulty_bus import FaultyBus
from support.house import HOST, TOPICS, register, static

REMIT = HostRemit(HOST, f"host/{HOST}")


class OneByOne(FaultyBus):
    """An embedded bus of which nobody gets more than one message at once."""

    async def open_reader(self, topic: str, partition: int, *, start: int | None, committed: bool) -> Reader:
        reader = await super().open_reader(topic, partition, start=start, committed=committed)
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
    async with serve(static(1), on=bus) as house:
        await house.say(register("w", gpu=1))
        await house.state("w", "allocated")
        found = json.dumps((await house.records())["h/w/1"]).encode()
    values = {"superseded": [b"{", found], "deleted": [b"{", None], "last": [found, b"{"]}[after]
    for value in values:
        await bus.publish(TOPICS.allocations, 0, Entry(b"h/w/1", value))
    if after == "last":
        with pytest.raises(LedgerRefusedError, match="h/w/1"):
            await restore(bus, TOPICS.allocations, 0, REMIT)
        return
    allocations = (await restore(bus, TOPICS.allocations, 0, REMIT)).ledger.allocations
    assert allocations == ({"h/w/1": decode_ledger(found)} if after == "superseded" else {})


async def test_what_records_say_alike_is_kept_once(
    serve: Serve, bus: FaultyBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(static(1), on=bus) as house:
        await house.say(register("a", gpu=1, labels={"job": "x"}))
        await house.state("a", "allocated")
    first = (await restore(bus, TOPICS.allocations, 0, REMIT)).ledger.allocations["h/a/1"]
    for number in range(6):
        labels = {"job": "x" if number % 2 else "y"}
        another = structs.replace(
            first, worker=f"w{number}", token=None, resources={}, state="ended",
            request=structs.replace(first.request, labels=labels),
        )  # fmt: skip
        await bus.publish(TOPICS.allocations, 0, Entry(another.key.encode(), encode(another)))
    requests = await _requests(bus)
    assert [request["labels"]["job"] for request in requests.values()] == ["x", "y", "x", "y", "x", "y", "x"]
    kept = (await restore(bus, TOPICS.allocations, 0, REMIT)).ledger.allocations
    assert {key: json.loads(encode(record.request)) for key, record in kept.items()} == requests
    assert len({id(record.request) for record in kept.values()}) == 2
    assert len({id(record.state) for record in kept.values()}) == 2
    assert len({id(record.host) for record in kept.values()}) == 1
    monkeypatch.setattr(restoring, "MOST_ALIKE", 1)
    again = (await restore(bus, TOPICS.allocations, 0, REMIT)).ledger.allocations
    assert again == kept
    assert len({id(record.request) for record in again.values()}) == len(again), "what is remembered is bounded"


async def _requests(bus: FaultyBus) -> dict[str, object]:
    """What the log says was asked for, by key."""
    found = {}
    async with await bus.open_reader(TOPICS.allocations, 0, start=None, committed=True) as reader:
        end = await bus.stable_end(TOPICS.allocations, 0)
        while reader.position < end:
            for message in await reader.fetch():
                if (message.key or b"@").startswith(b"h/") and message.value:
                    record = decode_ledger(message.value)
                    assert isinstance(record, Allocation)
                    found[record.key] = json.loads(encode(record.request))
    return found

"""What a ledger needs is said from the commit with the first record that needs it on, and never before.

Devices' records stand here for a kind that a later version will need something for.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from msgspec import structs

from outfitter_proto.records import Device
from outfitter_service.core import decide
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.state.ledger import DropRecord, Ledger, PutRecord
from outfitter_service.core.state.record_kinds import KINDS
from outfitter_service.runtime.changelog import ledger_format
from outfitter_service.runtime.changelog.restore import LedgerRefusedError
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import HOST, TOPICS, InProcessManager, another, register, static

LANES = "lanes"


@pytest.fixture
def laning(monkeypatch: pytest.MonkeyPatch) -> None:
    know_lanes(monkeypatch)


def know_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager of a version in which an event puts a device's record, which needs that `lanes` are known."""

    def put(builder: DecisionBuilder, event: m.DriverRetry) -> None:
        builder.put_record(Device(host=event.host, id="gpu-0", since=builder.now, state="out of service"))

    monkeypatch.setitem(KINDS, Device, structs.replace(KINDS[Device], needs=lambda _: LANES))  # type: ignore[arg-type] # a dict
    monkeypatch.setattr(ledger_format, "NEEDS", ledger_format.NEEDS | {LANES})
    monkeypatch.setitem(decide._INTERNAL, m.DriverRetry, put)  # type: ignore[arg-type] # a dict


async def commits(bus: FaultyBus) -> list[tuple[bool, int, Any]]:
    """Of each commit: whether it has a device's record, its format, and what it needs."""
    found, has_device = [], False
    async with await bus.open_reader(TOPICS.allocations, 0, start=0, committed=True) as reader:
        while messages := await reader.fetch(max_records=10_000, timeout=0.2):
            for message in messages:
                key, record = message.key or b"", msgspec.json.decode(message.value or b"null")
                has_device |= key.startswith(b"@device/") and record is not None
                if key.startswith(b"@checkpoint/host/"):
                    found.append((has_device, record["format"], record.get("needs")))
                    has_device = False
    return found


async def put_a_device(manager: InProcessManager) -> None:
    manager.processor.event_queue.add(m.DriverRetry(host=HOST, resource="gpu"))
    await manager.until(lambda records: f"@device/{HOST}/gpu-0" in records)


@pytest.mark.usefixtures("laning")
async def test_the_commit_of_the_first_record_that_needs_something_says_so_and_each_later_one(
    serve: Serve, bus: FaultyBus
) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("before", gpu=1))
        await manager.state("before", "allocated")
        await put_a_device(manager)
        await manager.say(register("after", gpu=1))
        await manager.state("after", "pending")
        await manager.stop()
    async with serve(static(1), identity=another()) as manager:
        await manager.say(register("later", gpu=1))
        await manager.state("later", "pending")
        await manager.stop()
    found = await commits(bus)
    first = found.index((True, 2, [LANES]))
    assert first > 1
    assert set(found[:first]) == {(False, 1, None)}
    assert len(found) > first + 3
    assert {(form, *needs) for _, form, needs in found[first:]} == {(2, LANES)}


async def test_a_manager_that_lacks_it_refuses_the_ledger_by_name(serve: Serve, bus: FaultyBus) -> None:
    with pytest.MonkeyPatch.context() as patched:
        know_lanes(patched)
        async with serve(static(1)) as manager:
            await put_a_device(manager)
    ends = await bus.offsets(TOPICS.allocations, 0)
    async with serve(static(1), identity=another(), ready=False) as manager:
        said = await manager.ended_by(LedgerRefusedError)
        assert f"@checkpoint/host/{HOST} needs lanes, and this version knows choices, orders, parts" in said
    assert await bus.offsets(TOPICS.allocations, 0) == ends


@pytest.mark.usefixtures("laning")
def test_what_no_commit_has_said_is_not_needed_and_what_one_has_said_stays() -> None:
    ledger, device = (
        Ledger(),
        Device(host=HOST, id="gpu-0", since=datetime(2026, 1, 1, tzinfo=UTC), state="out of service"),
    )
    ledger.begin_commit()
    ledger.change(PutRecord(device))
    ledger.end_commit()  # the commit before that of the record
    ledger.rollback()
    assert ledger.needs == frozenset()
    for _ in range(2):
        ledger.change(PutRecord(device))
        ledger.begin_commit()
        assert ledger.needs == {LANES}
        ledger.rollback()
        assert ledger.needs == frozenset()
    ledger.change(PutRecord(device))
    ledger.begin_commit()
    ledger.end_commit()
    ledger.change(DropRecord(device.key))
    ledger.begin_commit()
    ledger.end_commit()
    assert ledger.needs == {LANES}

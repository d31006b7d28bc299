"""A manager works on no ledger that it does not understand: it refuses the host, and says what would be able to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from outfitter_proto.bus import Entry
from outfitter_service.runtime.changelog.restore import LedgerRefusedError, restore
from outfitter_service.runtime.input.scope import PartitionScope
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import TOPICS, InProcessManager, another, deregister, register, static

Change = Callable[[dict[str, Any]], dict[str, Any]]

CASES: dict[str, tuple[str, Change, str]] = {
    "a state of a later version": ("h/w/1", lambda record: record | {"state": "lent"}, "'lent'"),
    "a type of a later version": ("h/w/1", lambda record: record | {"type": "sublease"}, "sublease"),
    "a format of a later version": ("@checkpoint/host/h", lambda record: record | {"format": 3}, "format 3"),
    "something that a later version needs": (
        "@checkpoint/host/h",
        lambda record: record | {"format": 2, "needs": ["orders", "lanes"]},
        "@checkpoint/host/h needs lanes, and this version knows ",
    ),
    "much that a later version needs": (
        "@checkpoint/host/h",
        lambda record: record | {"format": 2, "needs": [f"order-{n:05}" for n in range(5_000)]},
        f"needs {', '.join(f'order-{n:05}' for n in range(15))}, order…, and this version knows",
    ),
    "a damaged checkpoint": (
        "@checkpoint/host/h",
        lambda record: record | {"at": "yesterday"},
        "is damaged there, and without a checkpoint no manager can continue: restore a backup (service/recover.md",
    ),
    "a damaged record": ("@host/h", lambda record: record | {"since": "yesterday"}, "damaged"),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_ledger_that_is_not_understood_is_refused(serve: Serve, bus: FaultyBus, case: str) -> None:
    key, change, said = CASES[case]
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        found = (await manager.records())[key]
    await bus.publish(TOPICS.allocations, 0, Entry(key.encode(), json.dumps(change(found)).encode()))
    _, end = await bus.offsets(TOPICS.allocations, 0)
    async with serve(static(1), identity=another(), ready=False) as manager:
        assert said in await manager.ended_by(LedgerRefusedError)
    assert (await bus.offsets(TOPICS.allocations, 0))[1] == end, "it wrote to a ledger that it does not understand"


async def without_names(manager: InProcessManager, bus: FaultyBus) -> None:
    """The host's record as version 0.2 wrote it where it had no room for the names of 40 devices."""
    host = (await manager.records())["@host/h"]
    host["resources"]["gpu"] |= {"names_left_out": 40, "names_digest": "4cc1e8ae8b0d9c05"}
    await bus.publish(TOPICS.allocations, 0, Entry(b"@host/h", json.dumps(host).encode()))


async def test_a_record_that_lacks_names_is_refused_while_somebody_holds_a_device(serve: Serve, bus: FaultyBus) -> None:
    async with serve(static(2)) as manager:
        await manager.say(register("w1", gpu=1), register("w2", gpu=1))
        await manager.state("w2", "allocated")
        await without_names(manager, bus)
    async with serve(static(2), identity=another(), ready=False) as manager:
        said = await manager.ended_by(LedgerRefusedError)
        assert "names of devices of gpu" in said
        assert "End these holders first: h/w1/1, h/w2/1." in said


async def test_a_record_that_lacks_names_is_written_anew_where_nobody_holds_a_device(
    serve: Serve, bus: FaultyBus
) -> None:
    async with serve(static(2)) as manager:
        await manager.say(register("w1", gpu=1))
        await manager.state("w1", "allocated")
        await manager.say(deregister("w1"))
        await manager.state("w1", "ended")
        await without_names(manager, bus)
    async with serve(static(2), identity=another()) as manager:
        await manager.say(register("w2", gpu=1))
        await manager.state("w2", "allocated")
        assert "names_left_out" not in (await manager.records())["@host/h"]["resources"]["gpu"]


async def test_only_the_host_whose_record_lacks_names_is_refused_among_many(serve: Serve, bus: FaultyBus) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        await without_names(manager, bus)
        other = (await manager.records())["h/w/1"] | {"host": "other"}
    await bus.publish(TOPICS.allocations, 0, Entry(b"other/w/1", json.dumps(other).encode()))
    scope = PartitionScope(0, 1, "partition/0")
    restored = await restore(bus, TOPICS.allocations, 0, scope)
    assert restored.ledger.allocations.keys() == {"other/w/1"}
    assert "End these holders first: h/w/1." in scope.refused["h"]


async def test_what_is_not_understood_of_another_host_is_passed_over(serve: Serve, bus: FaultyBus) -> None:
    async with serve(static(1)):
        pass
    for key in (b"other/w/1", b"@host/other", b"@checkpoint/host/other", b"@hosts"):
        await bus.publish(TOPICS.allocations, 0, Entry(key, b'{"type":"sublease"}'))
    async with serve(static(1), identity=another()) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")

"""A manager works on no ledger that it does not understand: it refuses the host, and says what would be able to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from outfitter_proto.bus import Entry
from outfitter_service.runtime.changelog.restore import LedgerRefusedError
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import TOPICS, another, register, static

Change = Callable[[dict[str, Any]], dict[str, Any]]

CASES: dict[str, tuple[str, Change, str]] = {
    "a state of a later version": ("h/w/1", lambda record: record | {"state": "lent"}, "'lent'"),
    "a type of a later version": ("h/w/1", lambda record: record | {"type": "sublease"}, "sublease"),
    "a format of a later version": ("@checkpoint/host/h", lambda record: record | {"format": 2}, "format 2"),
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


async def test_what_is_not_understood_of_another_host_is_passed_over(serve: Serve, bus: FaultyBus) -> None:
    async with serve(static(1)):
        pass
    for key in (b"other/w/1", b"@host/other", b"@checkpoint/host/other", b"@hosts"):
        await bus.publish(TOPICS.allocations, 0, Entry(key, b'{"type":"sublease"}'))
    async with serve(static(1), identity=another()) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")

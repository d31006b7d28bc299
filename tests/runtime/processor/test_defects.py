"""A defect of ours in deciding one event leaves nothing stuck: what nothing says again is decided once more later."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import to_builtins

from outfitter_proto.support.processes import process_owner
from outfitter_service.core import model as m
from outfitter_service.runtime.processor import event_queue
from outfitter_service.runtime.processor.commit import commit
from runtime.conftest import Serve
from support.checker.verdict import verdict
from support.drivers.preparing import BENCHES, Bench
from support.managers.in_process import deregister, preparing, register


@pytest.mark.parametrize("kind", [m.OwnerDied, m.LeaseExpired, m.Prepared, m.Unprepared])
async def test_an_event_that_meets_a_defect_once_is_decided_at_the_next_try(
    serve: Serve, tmp_path: Any, kind: type[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[m.Event] = []
    well = commit.decide

    def decide(ledger: Any, rules: Any, event: m.Event, now: Any) -> Any:
        if isinstance(event, kind) and len(failed) < 2:
            failed.append(event)
            raise RuntimeError("a defect")
        return well(ledger, rules, event, now)

    monkeypatch.setattr(commit, "decide", decide)
    monkeypatch.setattr(event_queue, "RETRY_AFTER_S", 0.1)
    BENCHES[str(tmp_path)] = bench = Bench(str(tmp_path), 1)
    async with serve(preparing(bench.name)) as manager:
        owner = to_builtins(process_owner()) if kind is m.OwnerDied else None
        await manager.say(register("w", gpu=1, lease_s=0.2 if kind is m.LeaseExpired else None, owner=owner))
        await manager.state("w", "allocated")
        if kind is m.OwnerDied:
            manager.processor.event_queue.add(m.OwnerDied(allocation="h/w/1", detail="gone"))
        elif kind is not m.LeaseExpired:
            await manager.say(deregister("w"))
        await manager.state("w", "ended")
        await manager.say(register("next", gpu=1))
        await manager.state("next", "allocated")
        assert len(failed) == 2
        assert (await verdict(manager.bus.url)).violations == ()
    assert bench.violations == []

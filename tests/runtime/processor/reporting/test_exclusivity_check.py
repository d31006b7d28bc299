"""The self-check sees a device that is in two live allocations, whoever wrote them, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outfitter_proto.bus import Entry
from outfitter_proto.records import Allocation, ResolvedRequest, Source
from outfitter_service.core.decide import decide
from outfitter_service.runtime.processor.commit import commit
from outfitter_service.runtime.processor.reporting.exclusivity_check import ExclusivityViolation, Holders
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import TOPICS, another, register, static
from support.wire_samples import AT


def record(worker: str, state: str, *devices: str, shared: bool = False) -> Allocation:
    return Allocation(
        host="h", worker=worker, incarnation="1", state=state, since=AT, writer="host/h", commit=1, token=1,
        request=ResolvedRequest(amounts={"gpu": 1}), source=Source(partition=0, offset=0),
        resources={"gpu": [{"id": device} for device in devices]}, shared=["gpu"] if shared else [],
    )  # fmt: skip


class Ledger:
    """Takes commits as the ledger has them."""

    def __init__(self) -> None:
        self.holders = Holders()
        self.records: dict[str, Allocation] = {}

    def take(self, *records: Allocation, dropped: str | None = None) -> list[ExclusivityViolation]:
        changed: dict[str, Allocation | None] = {each.key: each for each in records}
        if dropped is not None:
            changed[dropped] = None
        before = {key: self.records[key] for key in changed.keys() & self.records.keys()}
        self.records |= {each.key: each for each in records}
        return self.holders.update(changed, before=before)


@pytest.mark.parametrize("state", ["preparing", "allocated", "releasing"])
def test_a_device_that_is_given_to_two_is_seen(state: str) -> None:
    ledger = Ledger()
    assert ledger.take(record("a", state, "G0")) == []
    assert ledger.take(record("b", state, "G1", "G0")) == [ExclusivityViolation("G0", "h/b/1", "h/a/1")]


def test_two_in_one_commit_are_seen() -> None:
    assert len(Ledger().take(record("a", "allocated", "G0"), record("b", "allocated", "G0"))) == 1


@pytest.mark.parametrize("state", ["ended", "failed", "pending"])
def test_a_device_that_was_released_in_the_same_commit_is_free(state: str) -> None:
    ledger = Ledger()
    ledger.take(record("a", "allocated", "G0"))
    assert ledger.take(record("b", "allocated", "G0"), record("a", state)) == []


def test_a_record_that_is_deleted_holds_nothing() -> None:
    ledger = Ledger()
    ledger.take(record("a", "allocated", "G0"))
    assert ledger.take(record("b", "allocated", "G0"), dropped="h/a/1") == []


def test_what_is_shared_is_nobodys_alone() -> None:
    ledger = Ledger()
    one, other = record("a", "allocated", "G0", shared=True), record("b", "allocated", "G0", shared=True)
    assert ledger.take(one, other) == []


def test_a_repeated_record_is_no_violation() -> None:
    ledger = Ledger()
    ledger.take(record("a", "allocated", "G0"))
    assert ledger.take(record("a", "releasing", "G0")) == []


async def test_a_ledger_that_breaks_the_promise_is_counted_and_said_so_when_it_is_replayed(
    bus: FaultyBus, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(static(2)) as manager:
        await manager.say(register("a", gpu=1))
        forged = {**(await manager.state("a", "allocated")), "worker": "b"}
        await manager.reported()
        assert manager.metric("outfitter_exclusivity_violations_total") == 0
    await bus.publish(TOPICS.allocations, 0, Entry(b"h/b/1", json.dumps(forged).encode()))
    async with serve(static(2), identity=another()) as manager:
        await manager.ready()
        assert manager.metric("outfitter_exclusivity_violations_total") == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "two live allocations" in line]
    for words in ("host=h", "worker=b", "incarnation=1", "device=gpu:0", "other=h/a/1"):
        assert words in line


async def test_an_event_that_meets_a_defect_of_ours_costs_itself_only(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(ledger: Any, rules: Any, event: Any, now: Any) -> Any:
        message = getattr(event, "message", None)
        if getattr(message, "worker", None) == "poison":
            raise ZeroDivisionError("a defect")
        return decide(ledger, rules, event, now)

    monkeypatch.setattr(commit, "decide", defective)
    async with serve(static(2)) as manager:
        await manager.say(register("poison", gpu=1), register("next", gpu=1))
        await manager.state("next", "allocated")
        [letter] = await manager.dead_letters(1)
        assert letter["reason"] == "internal error: ZeroDivisionError: a defect"
        await manager.reported()
        assert manager.metric("outfitter_events_total", kind="defect") == 1
        assert manager.processor.ready

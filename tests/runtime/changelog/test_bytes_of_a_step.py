"""What history says of a step, and how its bytes come about."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
import structlog

from outfitter_proto import codec
from outfitter_proto.bus import Bus, Entry, Message
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.records import (
    Allocation,
    Checkpoint,
    Commit,
    Deregister,
    Heartbeat,
    Host,
    InputPosition,
    ManagerIdentity,
    Register,
    ResourceRequest,
    Transition,
)
from outfitter_service.core import fast_path
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from outfitter_service.core.state.ledger import Ledger, PutRecord
from outfitter_service.metrics import EVENT_KINDS, Metrics
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.commit.effects import LOGGED
from outfitter_service.runtime.processor.reporting.gauges import StateGauges
from outfitter_service.runtime.processor.reporting.reporter import CommitReporter
from support.core import commits
from support.managers.assignments import assignment_of

GPU = {"resource": "gpu"}

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = topics()
MANAGER = ManagerIdentity(instance="i", version="0", since=NOW)


def known(*hosts: str) -> Ledger:
    """A ledger that knows these hosts: of others no driver is heard."""
    ledger = Ledger()
    for host in hosts:
        ledger.restore(PutRecord(Host(host=host, manager=MANAGER, since=NOW)))
    return ledger


def test_equal_events_that_follow_from_one_batch_are_decided_once() -> None:
    """Each looks at the whole host, after everything that the batch decides."""
    specs = {name: m.ResourceSpec(name=name, amount=1) for name in ("gpu", "disk")}
    commit = commits.begin(known("h", "other"), Rules(writer="host/h", specs=specs), NOW)
    for name in specs:
        commit.decide(m.DriverReport(host="h", resource=name, devices=(m.KnownDevice(id=name, properties={}),)))
    commit.decide(m.DriverReport(host="other", resource="gpu", devices=(m.KnownDevice(id="g", properties={}),)))
    assert list(commit.effects.follow_ups) == [
        m.Reschedule(host=host, cause="driver-report", whole=False) for host in ("h", "other")
    ]


class Midnight(Clock):
    """Its monotonic seconds stand at 0."""

    def monotonic(self) -> float:
        return 0.0


class Writing:
    """Commits of one writer, whose host has so many devices. Messages come an hour after each other, from 1970 on."""

    def __init__(self, devices: int = 1, *, history: bool = True) -> None:
        self.ledger = known("h")
        self.rules = Rules(writer="host/h", specs={"gpu": m.ResourceSpec(name="gpu", amount=1)})
        self.history = history
        self.state_gauges = StateGauges(["gpu"])
        self.offset = 0
        self.begin(NOW)
        devices_of_h = tuple(m.KnownDevice(id=f"g{number}", properties={}) for number in range(devices))
        self.next.decide(m.DriverReport(host="h", resource="gpu", devices=devices_of_h))
        self.commit()
        self.begin(NOW)

    def begin(self, now: datetime) -> None:
        self.next = commits.begin(self.ledger, self.rules, now, history=self.history)

    def say(self, body: Register | Deregister | Heartbeat) -> None:
        at = 3_600_000 * (self.offset // 2)  # two of them at the same time
        self.next.message(Message(NAMES.registrations, 0, self.offset, b"h", encode(body), at))
        self.offset += 1

    def leases(self) -> dict[str, float]:
        """When the leases end, by key, that there are once the batch is settled at second 0."""
        bus = cast("Bus", None)  # leases need none
        found = LivenessTracker(
            assignment_of(bus), grace_s=2.0, default_lease_s=30.0, wake=lambda: None, clock=Midnight()
        )
        found.renew(self.next.effects.renewed)
        found.apply_committed(self.next.effects.allocations)
        return {key: found.leases.deadline(key) for key in self.next.effects.allocations if key in found.leases}

    def commit(self) -> tuple[dict[str, list[Entry]], Checkpoint]:
        """What the commit writes, by topic."""
        self.ledger.begin_commit()
        checkpoint = Checkpoint(
            writer="host/h", instance="i", cluster="c", scope="host", commit=self.ledger.commits, token=1, at=NOW,
            input=InputPosition(topic_id="t", partition=0, from_=0, to=self.offset),
        )  # fmt: skip
        written = dict(self.next.transaction.entries(NAMES, checkpoint))
        self.ledger.end_commit()
        self.state_gauges.update(self.next.effects.allocations, before=self.next.effects.before)
        return written, checkpoint


@pytest.mark.parametrize("history", [True, False])
def test_plain_grants_come_to_the_same_commit_as_the_steps(monkeypatch: pytest.MonkeyPatch, *, history: bool) -> None:
    told: list[dict[str, object]] = []
    for short in (True, False):
        with monkeypatch.context() as patched:
            if not short:
                patched.setattr(fast_path, "grant", lambda *_: None)
            writing = Writing(3, history=history)
            for number, amount in enumerate((1, 2, 1)):
                asked = {"gpu": ResourceRequest(amount=amount)}
                writing.say(Register(host="h", worker=f"w{number}", incarnation="1", resources=asked, lease_s=5.0))
            writing.say(Heartbeat(host="h", worker="w0", incarnation="1"))
            writing.say(Deregister(host="h", worker="w1", incarnation="1"))
            writing.say(Register(host="h", worker="w3", incarnation="1"))
            commit, metrics = writing.next, Metrics(["gpu"])
            assert len(commit.effects.granted["gpu"]) == (3 if short else 0)
            written, _ = writing.commit()
            CommitReporter(metrics).report(commit)
            waited = metrics.registry.get_sample_value("outfitter_allocation_seconds_sum", GPU) or 0.0
            came = sum(time.time() - 3600 * (offset // 2) for offset in (0, 1, 2, 5))
            assert abs(waited - came) < 60
            same = {
                "written": written,
                "weight": (commit.events, commit.transaction.ledger_bytes, commit.transaction.history_bytes),
                "settled": (commit.effects.allocations, list(commit.effects.final_leases), commit.effects.commands),
                "leases": writing.leases(),
                "kinds": [
                    metrics.registry.get_sample_value("outfitter_events_total", {"kind": k}) for k in EVENT_KINDS
                ],
                "steps": [(key, step.to, step.explanation) for key, step in commit.effects.steps],
                "grants": metrics.registry.get_sample_value("outfitter_grants_total", GPU),
                "waits": metrics.registry.get_sample_value("outfitter_allocation_seconds_count", GPU),
            }
            told.append(same)
    assert told[0] == told[1]
    assert told[0]["grants"] == told[0]["waits"] == 4
    assert told[0]["leases"] == {"h/w0/1": 7.0, "h/w2/1": 7.0, "h/w3/1": 32.0}


@pytest.mark.parametrize("history", [True, False])
def test_of_many_grants_the_first_ones_are_logged_and_the_others_counted(*, history: bool) -> None:
    writing = Writing(LOGGED + 8, history=history)
    for number in range(LOGGED + 7):
        writing.say(Register(host="h", worker=f"w{number}", incarnation="1"))
    writing.say(Deregister(host="h", worker="w0", incarnation="1"))
    assert len(writing.next.effects.granted["gpu"]) == LOGGED + 7
    written, _ = writing.commit()
    with structlog.testing.capture_logs() as lines:
        CommitReporter(Metrics(["gpu"])).report(writing.next)
    *named, counted = [line for line in lines if line["log_level"] == "info"]
    assert [(line["event"], line["worker"]) for line in named] == [("allocated", f"w{n}") for n in range(LOGGED)]
    assert counted["more"] == 8
    assert len(written.get(NAMES.history, ())) == (LOGGED + 8 + 1 if history else 0)  # each step, and the commit itself


def test_each_step_of_one_batch_tells_the_record_as_it_was_then() -> None:
    """Two steps of one worker in one commit: history has both records, the ledger the last one."""
    writing = Writing()
    writing.say(Register(host="h", worker="w", incarnation="1", resources={"gpu": ResourceRequest(amount=1)}))
    writing.say(Deregister(host="h", worker="w", incarnation="1"))
    commit = writing.next
    written, checkpoint = writing.commit()
    assert [step.to for _, step in commit.effects.steps] == ["allocated", "ended"]
    *steps, end = written[NAMES.history]
    first, last = (codec.decode_history(entry.value or b"") for entry in steps)
    assert isinstance(first, Transition)
    assert isinstance(first.record, Allocation)
    assert (first.record.state, len(first.record.resources["gpu"])) == ("allocated", 1)
    assert last == commit.effects.steps[1][1]
    assert end.value == encode(Commit(writer="host/h", checkpoint=checkpoint))
    assert [entry.key for entry in written[NAMES.allocations]] == [b"h/w/1", b"@checkpoint/host/h"]


@pytest.mark.parametrize("short", [True, False], ids=["a fast grant", "steps"])
def test_a_record_that_is_forgotten_and_made_anew_in_one_commit_is_another_one(*, short: bool) -> None:
    """Found by the simulation: it looked as if the old one answered another registration now."""
    writing = Writing()
    asked = {"gpu": ResourceRequest(amount=1)}
    gone = Deregister(host="h", worker="w", incarnation="1")
    again = Register(host="h", worker="w", incarnation="1", resources=asked) if short else gone
    if short:
        writing.say(again)
    writing.say(gone)
    writing.commit()
    writing.begin(NOW + timedelta(days=1))
    writing.next.decide(m.Tick(host="h"))
    writing.say(again)
    assert len(writing.next.effects.granted["gpu"]) == short
    assert list(writing.next.effects.renewed) == (["h/w/1"] if short else [])  # the lease of before is still known
    written, checkpoint = writing.commit()
    told = writing.state_gauges.state_counts(Ledger())
    assert (told.records, told.allocations) == (1, Counter([("gpu", "allocated") if short else ("(none)", "ended")]))
    forgotten, anew, _ = written[NAMES.allocations]
    assert forgotten == Entry(b"h/w/1", None)
    assert anew.key == b"h/w/1"
    assert anew.value is not None
    *_, end = written[NAMES.history]
    assert end.value == encode(Commit(writer="host/h", checkpoint=checkpoint))  # and it dropped nothing in the end

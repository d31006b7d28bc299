"""What history says of a step, and how its bytes come about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from outfitter_proto.bus import Entry, Message
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.records import Checkpoint, Commit, Deregister, InputPosition, Register, ResourceRequest
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from outfitter_service.core.ledger import Ledger
from outfitter_service.runtime.batch import Batch

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = topics()


def test_equal_events_that_follow_from_one_batch_are_decided_once() -> None:
    """Each looks at the whole host, after everything that the batch decides."""
    specs = {name: m.ResourceSpec(name=name, amount=1) for name in ("gpu", "disk")}
    batch = Batch(Ledger(), Rules(writer="host/h", specs=specs), NOW, meet=print)
    for name in specs:
        batch.decide(m.DriverReport(host="h", resource=name, devices=(m.KnownDevice(id=name, properties={}),)))
    batch.decide(m.DriverReport(host="other", resource="gpu", devices=(m.KnownDevice(id="g", properties={}),)))
    assert list(batch.follow_ups) == [m.Reschedule(host=host, cause="driver-report") for host in ("h", "other")]


class Writing:
    """Commits of one writer, whose host has one device."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.rules = Rules(writer="host/h", specs={"gpu": m.ResourceSpec(name="gpu", amount=1)})
        self.offset = 0
        self.begin(NOW)
        self.batch.decide(m.DriverReport(host="h", resource="gpu", devices=(m.KnownDevice(id="g0", properties={}),)))

    def begin(self, now: datetime) -> None:
        self.batch = Batch(self.ledger, self.rules, now, meet=lambda _, __: None)

    def say(self, body: Register | Deregister) -> None:
        self.batch.message(Message(NAMES.registrations, 0, self.offset, b"h", encode(body), 0))
        self.offset += 1

    def commit(self) -> tuple[dict[str, list[Entry]], Checkpoint]:
        """What the commit writes, by topic."""
        self.ledger.seal()
        checkpoint = Checkpoint(
            writer="host/h", instance="i", cluster="c", scope="host", commit=self.ledger.commits, token=1, at=NOW,
            input=InputPosition(topic_id="t", partition=0, from_=0, to=self.offset),
        )  # fmt: skip
        written = dict(self.batch.transaction(NAMES, checkpoint))
        self.ledger.settle()
        return written, checkpoint


def test_each_step_of_one_batch_tells_the_record_as_it_was_then() -> None:
    """Two steps of one worker in one commit: history has both records, the ledger the last one."""
    writing = Writing()
    writing.say(Register(host="h", worker="w", incarnation="1", resources={"gpu": ResourceRequest(amount=1)}))
    writing.say(Deregister(host="h", worker="w", incarnation="1"))
    batch = writing.batch
    written, checkpoint = writing.commit()
    assert [step.to for _, step in batch.steps] == ["allocated", "ended"]
    *steps, end = written[NAMES.history]
    assert [entry.value for entry in steps] == [encode(step) for _, step in batch.steps]
    assert end.value == encode(Commit(writer="host/h", checkpoint=checkpoint))
    assert [entry.key for entry in written[NAMES.allocations]] == [b"h/w/1", b"@checkpoint/host/h"]


def test_a_record_that_is_forgotten_and_made_anew_in_one_commit_is_another_one() -> None:
    """Found by the simulation: it looked as if the old one answered another registration now."""
    writing = Writing()
    gone = Deregister(host="h", worker="w", incarnation="1")
    writing.say(gone)
    writing.commit()
    writing.begin(NOW + timedelta(days=1))
    writing.batch.decide(m.Tick(host="h"))
    writing.say(gone)
    written, checkpoint = writing.commit()
    forgotten, anew, _ = written[NAMES.allocations]
    assert forgotten == Entry(b"h/w/1", None)
    assert anew.key == b"h/w/1"
    assert anew.value is not None
    *_, end = written[NAMES.history]
    assert end.value == encode(Commit(writer="host/h", checkpoint=checkpoint))  # and it dropped nothing in the end

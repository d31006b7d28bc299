"""What history says of a step, and how its bytes come about."""

from __future__ import annotations

from datetime import UTC, datetime

from outfitter_proto.bus import Message
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.records import Checkpoint, Commit, Deregister, InputPosition, Register, ResourceRequest
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from outfitter_service.core.ledger import Ledger
from outfitter_service.runtime.batch import Batch

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_equal_events_that_follow_from_one_batch_are_decided_once() -> None:
    """Each looks at the whole host, after everything that the batch decides."""
    specs = {name: m.ResourceSpec(name=name, amount=1) for name in ("gpu", "disk")}
    batch = Batch(Ledger(), Rules(writer="host/h", specs=specs), NOW, meet=print)
    for name in specs:
        batch.decide(m.DriverReport(host="h", resource=name, devices=(m.KnownDevice(id=name, properties={}),)))
    batch.decide(m.DriverReport(host="other", resource="gpu", devices=(m.KnownDevice(id="g", properties={}),)))
    assert list(batch.follow_ups) == [m.Reschedule(host=host, cause="driver-report") for host in ("h", "other")]


def test_each_step_of_one_batch_tells_the_record_as_it_was_then() -> None:
    """Two steps of one worker in one commit: history has both records, the ledger the last one."""
    names = topics()
    batch = Batch(
        Ledger(), Rules(writer="host/h", specs={"gpu": m.ResourceSpec(name="gpu", amount=1)}), NOW, meet=print
    )
    batch.decide(m.DriverReport(host="h", resource="gpu", devices=(m.KnownDevice(id="g0", properties={}),)))
    asked = Register(host="h", worker="w", incarnation="1", resources={"gpu": ResourceRequest(amount=1)})
    for offset, body in enumerate((asked, Deregister(host="h", worker="w", incarnation="1"))):
        batch.message(Message(names.registrations, 0, offset, b"h", encode(body), 0))
    position = InputPosition(topic_id="t", partition=0, from_=0, to=2)
    checkpoint = Checkpoint(
        writer="host/h", instance="i", cluster="c", scope="host", commit=1, token=1, input=position, at=NOW
    )
    written = dict(batch.transaction(names, checkpoint))
    assert [step.to for _, step in batch.steps] == ["allocated", "ended"]
    *steps, end = written[names.history]
    assert [entry.value for entry in steps] == [encode(step) for _, step in batch.steps]
    assert end.value == encode(Commit(writer="host/h", checkpoint=checkpoint))
    assert [entry.key for entry in written[names.allocations]] == [b"h/w/1", b"@checkpoint/host/h"]

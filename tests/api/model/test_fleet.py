"""The model: the newest record of each key, what follows from it, and the event of each change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from outfitter_proto.codec import encode
from outfitter_proto.records import Device, Note, Source, Transition
from outfitter_proto.signs_of_life import SignsOfLife
from outfitter_service.api.model.event_log import Event
from outfitter_service.api.model.fleet import Fleet
from outfitter_service.query import ledger_view
from outfitter_service.query.ledger_view import RecordChange
from support.api import (
    NOW,
    PARTITIONS,
    allocation,
    change,
    checkpoint,
    cordon,
    deletion,
    fleet_of,
    host_record,
    message,
)


def events(fleet: Fleet, after: int = 0) -> list[tuple[str, str | None]]:
    return [(event.kind, event.host) for event in fleet.events.after(after, 100)]


def test_what_was_restored_is_no_event_and_each_later_change_is_one() -> None:
    fleet = fleet_of(host_record("a"))
    assert fleet.events.last == 0
    fleet.change(change(host_record("a", gpus=3)))
    fleet.change(change(allocation("a", "w")))
    fleet.change(change(Device(host="a", id="a-0", since=NOW, state="quarantined")))
    fleet.change(change(checkpoint("host/a"), partition=0))
    assert events(fleet) == [("host", "a"), ("allocation", "a"), ("device", "a")]


def test_an_event_has_the_record_byte_for_byte_and_null_for_a_deletion() -> None:
    fleet = fleet_of()
    record = allocation("a", "w")
    fleet.change(change(record, offset=7))
    fleet.change(change(None, key=record.key))
    first, second = (event.wire.decode().splitlines()[2] for event in fleet.events.after(0, 10))
    assert message(record).value.decode() in first
    assert json.loads(first.removeprefix("data: "))["offset"] == 7
    assert json.loads(second.removeprefix("data: "))["record"] is None
    assert fleet.hosts == []


def written_by_others(value: bytes) -> RecordChange:
    """A change of the key `a/w/run-1` with these bytes."""
    return ledger_view.decode(structs.replace(message(allocation("a", "w")), value=value))


def data_of(event: Event) -> Any:
    """The data of an event as its readers get it: one line of JSON in UTF-8."""
    id_, kind, data, *end = event.wire.splitlines()
    assert (id_[:4], kind[:7], data[:6], end) == (b"id: ", b"event: ", b"data: ", [b""])
    return json.loads(data.removeprefix(b"data: "))


@pytest.mark.parametrize("unknown", [b"\n1", b"\r\n1e999", b'"\xff"'])
def test_a_readable_record_is_one_line_of_json_whatever_its_unknown_fields_are(unknown: bytes) -> None:
    fleet = fleet_of()
    wire = encode(allocation("a", "w"))
    fleet.change(written_by_others(wire[:-1] + b',"later":' + unknown + b"}"))
    (event,) = fleet.events.after(0, 10)
    assert data_of(event)["record"]["worker"] == "w"


@pytest.mark.parametrize("value", [b'{"type":"allocation",bad', b'{\n"bad', b'{"type":"later"', b"\xff", b"{}", b""])
def test_a_record_that_cannot_be_read_counts_as_deleted_in_pages_and_events(value: bytes) -> None:
    fleet = fleet_of(allocation("a", "w"))
    fleet.change(written_by_others(value))
    (event,) = fleet.events.after(0, 10)
    assert (data_of(event)["key"], data_of(event)["record"]) == ("a/w/run-1", None)
    assert fleet.hosts == []


def test_what_is_shown_of_a_host_changes_with_its_records_and_is_computed_once_between() -> None:
    fleet = fleet_of(host_record("a"), allocation("a", "w", devices=["a-0"]))
    before = fleet.devices("a")
    assert [(device.id, device.line().holder_count) for device in before] == [("a-0", 1), ("a-1", 0)]
    assert fleet.devices("a") is before
    fleet.change(change(host_record("b")))
    assert fleet.devices("a") is before
    fleet.change(change(allocation("a", "w", "ended", devices=["a-0"])))
    assert [device.line().holder_count for device in fleet.devices("a")] == [0, 0]


def test_the_newest_run_of_a_worker_is_the_one_that_registered_last() -> None:
    fleet = fleet_of(
        allocation("a", "w", "ended", incarnation="z", offset=1), allocation("a", "w", incarnation="b", offset=2)
    )
    assert [stored.record.incarnation for stored in fleet.workers("a")] == ["b"]


def test_the_newest_run_is_the_same_after_topics_grew_and_the_host_moved_to_a_lower_partition() -> None:
    before, after = allocation("a", "w", "failed", offset=5), allocation("a", "w", incarnation="run-2", offset=8)
    before = structs.replace(before, source=Source(partition=11, offset=5))
    after = structs.replace(after, source=Source(partition=2, offset=8))
    fleet = fleet_of(before, after)
    assert [stored.record.incarnation for stored in fleet.workers("a")] == ["run-2"]
    assert [record.incarnation for record in fleet.ledger.of_worker("w")] == ["run-2"]


def test_the_queue_has_the_order_in_which_it_is_served() -> None:
    fleet = fleet_of(
        allocation("a", "late", "pending", offset=3),
        allocation("a", "holder", offset=0),
        allocation("a", "early", "pending", offset=1),
        allocation("a", "urgent", "pending", offset=9, priority=5),
    )
    assert [stored.record.worker for stored in fleet.queue("a")] == ["urgent", "early", "late"]


def test_hosts_are_in_the_order_of_their_allocations_keys() -> None:
    fleet = fleet_of(*(host_record(host) for host in ("a", "a-b", "a.b", "b")))
    keys = sorted(f"{host}/w/run-1" for host in fleet.hosts)
    assert [key.partition("/")[0] for key in keys] == fleet.hosts


def test_a_host_whose_last_record_is_deleted_is_gone_and_one_that_comes_back_is_there_again() -> None:
    fleet = fleet_of(allocation("a", "w1"))
    assert fleet.hosts == ["a"]
    fleet.change(change(None, key="a/w1/run-1"))
    assert fleet.hosts == []
    fleet.change(change(allocation("a", "w2")))
    assert fleet.hosts == ["a"]
    assert [stored.record.worker for stored in fleet.workers("a")] == ["w2"]


def test_a_record_left_behind_in_another_partition_neither_replaces_nor_deletes_the_hosts_own() -> None:
    fleet = fleet_of(allocation("a", "w"))
    elsewhere = (message(allocation("a", "w")).partition + 1) % PARTITIONS
    fleet.change(change(allocation("a", "w", "failed"), partition=elsewhere))
    fleet.change(change(None, key="a/w/run-1", partition=elsewhere))
    assert [stored.record.state for stored in fleet.allocations("a")] == ["allocated"]
    assert fleet.events.last == 0


def test_the_model_of_one_host_has_nothing_of_another() -> None:
    fleet = fleet_of(host_record("a"), host_record("b"), allocation("b", "w"), host="a")
    fleet.change(change(allocation("b", "w2")))
    fleet.change(change(checkpoint("host/b"), partition=0))
    for name in ("a", "b"):
        note = Note(at=NOW, writer=f"host/{name}", event="start", explanation="")
        fleet.add_step(message(note, key=f"host/{name}"), note, announce=True)
        step = Transition(
            at=NOW, host=name, worker="w", incarnation="i", event="register", to="allocated", explanation="",
            record=allocation(name, "w"),
        )  # fmt: skip
        fleet.add_step(message(step, key=f"{name}/w/i"), step, announce=True)
    assert fleet.hosts == ["a"]
    assert fleet.writers == []
    assert events(fleet) == [("step", "a"), ("step", "a")]


def test_a_writers_position_is_compared_with_the_end_of_its_input() -> None:
    fleet = fleet_of(checkpoint("host/a", partition=1, to=5))
    assert [(each.checkpoint.writer, each.end) for each in fleet.writers] == [("host/a", None)]
    fleet.input_ends[1] = 9
    assert [each.end for each in fleet.writers] == [9]


def test_an_order_in_effect_is_an_event_of_its_kind_and_so_is_its_end() -> None:
    fleet = fleet_of(host_record("a"))
    fleet.change(change(cordon("a")))
    fleet.change(deletion(cordon("a")))
    assert events(fleet) == [("cordon", "a")] * 2
    assert fleet.orders("a") == []


def test_that_the_end_of_a_manager_becomes_planned_is_said_as_an_event() -> None:
    signs, fleet = (
        SignsOfLife(),
        fleet_of(host_record("a", stopped=True), checkpoint("host/a"), allocation("a", "w", "pending")),
    )
    fleet.judge(signs, {}, announce=False)
    fleet.change(change(cordon("a")))
    fleet.judge(signs, {}, announce=True)
    last = data_of(fleet.events.after(0, 10)[-1])
    assert (last["planned"], last["missed"]) == (True, False)

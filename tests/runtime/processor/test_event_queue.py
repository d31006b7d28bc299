"""What waits to be decided: each inventory once, as it is now, and everything that nothing says twice."""

from __future__ import annotations

from datetime import UTC, datetime

import anyio
import pytest
from msgspec import structs

from outfitter_proto.keys import allocation_key
from outfitter_proto.records import CordonOrder
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.processor.event_queue import RETRY_AFTER_S, EventQueue, Wakeup


def report(name: str, *, host: str = "h", resource: str = "gpu", asked: int = 0) -> m.DriverReport:
    devices = (m.KnownDevice(id=name, properties={}),)
    return m.DriverReport(host=host, resource=resource, devices=devices, asked=asked)


def test_a_driver_that_reports_again_and_again_while_nothing_is_decided_piles_up_nothing() -> None:
    event_queue = EventQueue(Clock(), Wakeup())
    event_queue.add(report("first"))
    event_queue.add(m.OwnerDied(allocation="h/w/1", detail=""))
    event_queue.add(report("other", resource="fpga"))
    event_queue.add(report("elsewhere", host="i"))
    for number in range(1000):
        event_queue.add(report(f"{number}"))
    assert [*event_queue.queue] == [
        report("999"), m.OwnerDied(allocation="h/w/1", detail=""), report("other", resource="fpga"),
        report("elsewhere", host="i"),
    ]  # fmt: skip


def test_a_report_after_one_that_was_taken_up_comes_last() -> None:
    event_queue = EventQueue(Clock(), Wakeup())
    event_queue.add(report("first"))
    taken = event_queue.queue.popleft()
    event_queue.add(m.Reschedule(host="h"))
    event_queue.add(report("second"))
    assert [*event_queue.queue] == [m.Reschedule(host="h"), report("second")]
    event_queue.put_back([taken], but=[])
    event_queue.add(report("third"))
    assert [*event_queue.queue] == [report("first"), m.Reschedule(host="h"), report("third")]


def test_the_answers_of_a_driver_that_is_asked_are_all_kept() -> None:
    event_queue = EventQueue(Clock(), Wakeup())
    event_queue.add(report("a", asked=1))
    event_queue.add(report("b", asked=2))
    assert [event.asked for event in event_queue.queue if isinstance(event, m.DriverReport)] == [1, 2]


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_an_event_that_is_its_own_follow_up_comes_again_once_if_its_commit_failed(*, sealed: bool) -> None:
    event_queue = EventQueue(Clock(), Wakeup())
    event, other = m.Reschedule(host="h"), m.Reschedule(host="i")
    event_queue.extend([event, other])
    assert event_queue.pop() is event
    if sealed:
        event_queue.extend([event])
    event_queue.put_back([event], but=[event])
    assert [*event_queue.queue] == [event, other]


async def test_an_event_is_rung_for_and_heard_once() -> None:
    wakeup = Wakeup()
    EventQueue(Clock(), wakeup).add(m.Reschedule(host="h"))
    with anyio.fail_after(20):
        await wakeup.wait(60)
    with anyio.move_on_after(0.01) as silence:
        await wakeup.wait(60)
    assert silence.cancelled_caught


def test_what_delays_a_release_is_replaced_by_what_delays_it_now() -> None:
    event_queue = EventQueue(Clock(), Wakeup())

    def delay(words: str, worker: str = "w") -> m.ReleaseDelayed:
        return m.ReleaseDelayed(allocation=f"h/{worker}/1", token=1, reason=words)

    for number in range(100):
        event_queue.add(delay(f"used by {number}"))
        event_queue.add(delay("used by 1", "v"))
    assert [*event_queue.queue] == [delay("used by 99"), delay("used by 1", "v")]
    end = m.Unprepared(allocation="h/w/1", token=1, confirmed=True)
    event_queue.add(end)
    event_queue.add(delay("used by 100"))
    assert [*event_queue.queue][2:] == [end, delay("used by 100")]


class Hands(Clock):
    """A clock that is set by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def died(worker: str) -> m.OwnerDied:
    return m.OwnerDied(allocation=allocation_key("h", worker, "1"), detail="")


def due(event_queue: EventQueue, clock: Hands, after_s: float) -> list[m.Event]:
    """The events that are tried again after so many seconds, which leave the queue."""
    clock.now += after_s
    event_queue.queue_due_retries()
    events = [*event_queue.queue]
    event_queue.queue.clear()
    return events


def test_of_what_was_set_aside_one_event_is_tried_again_and_the_others_once_that_one_is_committed() -> None:
    clock = Hands()
    event_queue = EventQueue(clock, Wakeup())
    deaths = [died(worker) for worker in "abc"]
    for event in deaths:
        event_queue.set_aside(event)
    assert due(event_queue, clock, RETRY_AFTER_S - 1) == []
    assert due(event_queue, clock, 1) == deaths[:1]
    assert due(event_queue, clock, 1) == []
    event_queue.set_aside(deaths[0])
    assert due(event_queue, clock, RETRY_AFTER_S) == deaths[1:2]
    event_queue.committed(deaths[1:2], notes=0, boot_judged=False)
    assert due(event_queue, clock, 0) == [deaths[2], deaths[0]]


def test_what_was_set_aside_is_not_tried_before_its_time_when_the_partition_is_taken_again() -> None:
    clock = Hands()
    event_queue = EventQueue(clock, Wakeup())
    event_queue.add(report("too-large"))
    event_queue.set_aside(event_queue.pop())
    event_queue.set_aside(m.Reschedule(host="h", whole=False))
    event_queue.restart(["h", "i"])
    event_queue.extend([m.Reschedule(host="h")])
    assert [*event_queue.queue] == [m.Reschedule(host="i")]
    event_queue.queue.clear()
    event_queue.add(report("newer"))
    event_queue.restart(["h"])
    assert [*event_queue.queue] == [report("newer")]
    event_queue.queue.clear()
    assert due(event_queue, clock, RETRY_AFTER_S) == [m.Reschedule(host="h")]


def test_orders_come_first_and_each_after_its_earlier_version_and_are_read_again_after_a_restart() -> None:
    """Else a host's evaluation, which a restart queues, would grant what an order takes out."""
    event_queue = EventQueue(Clock(), Wakeup())
    event_queue.restart(["h"])
    event_queue.add(report("a"))
    at = datetime(2026, 1, 1, tzinfo=UTC)
    given = m.OrderRead(order=CordonOrder(id="o1", host="h", author="ada", reason="dust", at=at))
    ended = m.OrderRead(order=structs.replace(given.order, ended_at=at))
    event_queue.add_orders([given])
    event_queue.add_orders([ended])
    assert [*event_queue.queue] == [given, ended, m.Reschedule(host="h"), report("a")]
    assert event_queue.has_orders
    event_queue.restart(["h"])
    assert not event_queue.has_orders

"""What waits to be decided: each inventory once, as it is now, and everything that nothing says twice."""

from __future__ import annotations

import anyio
import pytest

from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.processor.event_queue import EventQueue, Wakeup


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
    event_queue.give_back([taken], but=[])
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
    event_queue.give_back([event], but=[event])
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

"""What waits to be decided: each inventory once, as it is now, and everything that nothing says twice."""

from __future__ import annotations

import anyio

from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.processor.event_queue import EventQueue, Wakeup


def report(name: str, *, host: str = "h", resource: str = "gpu", asked: int = 0) -> m.DriverReport:
    devices = (m.KnownDevice(id=name, properties={}),)
    return m.DriverReport(host=host, resource=resource, devices=devices, asked=asked)


def test_a_driver_that_reports_again_and_again_while_nothing_is_decided_piles_up_nothing() -> None:
    agenda = EventQueue(Clock(), Wakeup())
    agenda.add(report("first"))
    agenda.add(m.OwnerDied(allocation="h/w/1", detail=""))
    agenda.add(report("other", resource="fpga"))
    agenda.add(report("elsewhere", host="i"))
    for number in range(1000):
        agenda.add(report(f"{number}"))
    assert [*agenda.queue] == [
        report("999"), m.OwnerDied(allocation="h/w/1", detail=""), report("other", resource="fpga"),
        report("elsewhere", host="i"),
    ]  # fmt: skip


def test_a_report_after_one_that_was_taken_up_comes_last() -> None:
    agenda = EventQueue(Clock(), Wakeup())
    agenda.add(report("first"))
    taken = agenda.queue.popleft()
    agenda.add(m.Reschedule(host="h"))
    agenda.add(report("second"))
    assert [*agenda.queue] == [m.Reschedule(host="h"), report("second")]
    agenda.give_back([taken], but=[])
    agenda.add(report("third"))
    assert [*agenda.queue] == [report("first"), m.Reschedule(host="h"), report("third")]


def test_the_answers_of_a_driver_that_is_asked_are_all_kept() -> None:
    agenda = EventQueue(Clock(), Wakeup())
    agenda.add(report("a", asked=1))
    agenda.add(report("b", asked=2))
    assert [event.asked for event in agenda.queue if isinstance(event, m.DriverReport)] == [1, 2]


async def test_an_event_is_rung_for_and_heard_once() -> None:
    bell = Wakeup()
    EventQueue(Clock(), bell).add(m.Reschedule(host="h"))
    with anyio.fail_after(20):
        await bell.wait(60)
    with anyio.move_on_after(0.01) as silence:
        await bell.wait(60)
    assert silence.cancelled_caught


def test_what_delays_a_release_is_replaced_by_what_delays_it_now() -> None:
    agenda = EventQueue(Clock(), Wakeup())

    def delay(words: str, worker: str = "w") -> m.ReleaseDelayed:
        return m.ReleaseDelayed(allocation=f"h/{worker}/1", token=1, words=words)

    for number in range(100):
        agenda.add(delay(f"used by {number}"))
        agenda.add(delay("used by 1", "v"))
    assert [*agenda.queue] == [delay("used by 99"), delay("used by 1", "v")]
    end = m.Unprepared(allocation="h/w/1", token=1, confirmed=True)
    agenda.add(end)
    agenda.add(delay("used by 100"))
    assert [*agenda.queue][2:] == [end, delay("used by 100")]

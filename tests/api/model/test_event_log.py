"""The event log: a reader that comes back gets all later events, or learns that some are gone."""

from __future__ import annotations

import anyio
import pytest

from outfitter_service.api.model import event_log
from outfitter_service.api.model.event_log import EventLog


def filled(count: int) -> EventLog:
    log = EventLog("log")
    for number in range(count):
        log.add("host", "h", b'{"n":%d}' % number)
    return log


def test_an_event_is_sent_with_its_id_its_kind_and_its_data() -> None:
    assert [event.wire for event in filled(1).after(0, 10)] == [b'id: log-1\nevent: host\ndata: {"n":0}\n\n']


def test_a_reader_gets_all_events_after_its_last_one_in_order_and_no_more_than_it_takes() -> None:
    log = filled(10)
    assert [event.sequence for event in log.after(7, 100)] == [8, 9, 10]
    assert [event.sequence for event in log.after(2, 3)] == [3, 4, 5]
    assert not log.after(10, 100)


@pytest.mark.parametrize("event_id", ["other-1", "log-11", "log-x", "log--1", "log-", "", "log-²", f"log-{'9' * 30}"])
def test_an_id_that_is_not_of_this_log_has_no_place_in_it(event_id: str) -> None:
    assert filled(10).sequence_of(event_id) is None


def test_an_id_whose_next_event_is_gone_has_no_place_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MOST_EVENTS", 3)
    log = filled(10)
    assert log.sequence_of("log-6") is None
    assert log.sequence_of("log-7") == 7
    assert [event.sequence for event in log.after(7, 100)] == [8, 9, 10]


def test_the_log_is_bounded_in_bytes_and_keeps_the_last_event_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_log, "MOST_BYTES", 100)
    log = EventLog("log")
    log.add("host", "h", b"1" * 40)
    log.add("host", "h", b"2" * 40)
    assert not log.has_all_after(0)
    log.add("host", "h", b"3" * 1000)
    assert [event.sequence for event in log.after(2, 10)] == [3]
    assert log.sequence_of("log-1") is None


async def test_whoever_waits_goes_on_with_the_next_event() -> None:
    log = filled(1)
    seen: list[int] = []

    async def wait() -> None:
        await log.wait(1)
        seen.append(log.last)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        assert not seen
        log.add("host", "h", b"{}")
    assert seen == [2]

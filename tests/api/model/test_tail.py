"""The newest messages of a topic, in the order of time, within bounds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from outfitter_service.api.model import tail
from outfitter_service.api.model.tail import Tail, TailItem, position_of

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def item(second: int, partition: int = 0, size: int = 1) -> TailItem[int]:
    at = NOW + timedelta(seconds=second)
    return TailItem(position_of(at, partition, second), at, second, size)


def values(of: Tail[int], before: str | None = None) -> list[int]:
    return [each.value for each in of.newest_first(before)]


def test_items_of_several_partitions_are_in_the_order_of_time() -> None:
    of: Tail[int] = Tail()
    for second, partition in ((1, 0), (4, 0), (2, 1), (3, 1), (5, 0)):
        of.add(item(second, partition))
    assert values(of) == [5, 4, 3, 2, 1]


def test_a_page_goes_on_where_the_last_one_ended_whatever_has_come_since() -> None:
    of: Tail[int] = Tail()
    for second in range(5):
        of.add(item(second))
    last = list(of.newest_first())[1].position
    of.add(item(9))
    assert values(of, last) == [2, 1, 0]


def test_the_oldest_items_make_room_and_the_tail_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MOST_ITEMS", 3)
    of: Tail[int] = Tail()
    for second in range(3):
        of.add(item(second))
    assert of.oldest is None
    of.add(item(3))
    assert values(of) == [3, 2, 1]
    assert of.oldest == NOW + timedelta(seconds=1)


def test_the_tail_is_bounded_in_bytes_and_keeps_one_item_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MOST_BYTES", 10)
    of: Tail[int] = Tail()
    for second in range(4):
        of.add(item(second, size=4))
    assert values(of) == [3, 2]
    of.add(item(5, size=1000))
    assert values(of) == [5]
    of.add(item(6, size=4))
    assert values(of) == [6]

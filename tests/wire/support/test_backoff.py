"""The delays between tries."""

from __future__ import annotations

import random

import pytest

from outfitter_proto.support.backoff import Backoff


def test_each_delay_is_twice_the_one_before_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_delay() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_after_a_success_the_delays_begin_again() -> None:
    backoff = Backoff(0.5, 3.0)
    backoff.next_delay()
    backoff.reset()
    assert [backoff.next_delay(), backoff.delay] == [0.5, 1.0]


def test_what_lasted_longer_than_the_longest_delay_counts_as_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_delay(lasted=lasted) for lasted in (0.0, 3.0, 3.1)] == [0.5, 1.0, 0.5]


def test_jitter_spreads_each_delay_and_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(random, "uniform", lambda low, high: asked.append((low, high)) or high)
    backoff = Backoff(1.0, 4.0, jitter=0.5)
    assert [backoff.next_delay() for _ in range(4)] == [1.5, 3.0, 6.0, 6.0]
    assert set(asked) == {(0.5, 1.5)}

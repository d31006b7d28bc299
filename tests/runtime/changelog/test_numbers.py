"""The numbers of a ledger that replaces another one: whatever was lost, no number is given twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from outfitter_service.runtime.changelog.numbers import beyond

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 1000), st.integers(0, 100)), max_size=8))
def test_each_ledger_goes_on_behind_all_that_any_before_it_has_given(
    ledgers: list[tuple[int, int, int]],
) -> None:
    """Each one replaces some earlier one, of which any part may be known, after some seconds and some grants."""
    now, given_so_far = BEGUN, [0, 40]
    for seconds, known, grants in ledgers:
        now += timedelta(seconds=seconds)
        first = beyond(given_so_far[known % len(given_so_far)], now)
        assert first > max(given_so_far)
        given_so_far += [first, first + grants]


def test_a_clock_that_is_behind_leaves_numbers_out() -> None:
    last = beyond(0, BEGUN)
    assert beyond(last, BEGUN - timedelta(days=10)) > last + 2**31

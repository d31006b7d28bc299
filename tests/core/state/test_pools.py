"""The counter of pools: its modes, pair by pair, and that a change is undone by its opposite."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto.records import PoolUse
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.pools import (
    ALONE,
    MOST_REPLICAS,
    PART,
    SEAT,
    SHARED_PART,
    WHOLE,
    Pools,
    is_replica,
    joined,
    may_exclude,
    replica,
)

POOL = CanonicalName("g0")
SIX = joined(PART, SEAT)
HALF = replica(2)
MODES = {"X": ALONE, "S": SEAT, "IX": PART, "IS": SHARED_PART, "SIX": SIX, "half": HALF}
BESIDE = {
    "X": "",
    "S": "S IS",
    "IX": "IX IS",
    "IS": "S IX IS SIX half",
    "SIX": "IS",
    "half": "IS half",
}
"""The uses that are possible beside each: the table of multi-granularity locking, and a half of the device. Who has a
half does not exclude who shares a part."""
USES = st.sampled_from([*MODES.values(), replica(3)])


def used(*uses: PoolUse, base: Pools | None = None) -> Pools:
    pools = Pools(base)
    for use in uses:
        pools.change(POOL, use, 1)
    return pools


@pytest.mark.parametrize(("one", "other"), list(product(MODES, MODES)))
def test_two_uses_of_a_device_are_possible_at_once_as_the_table_says(one: str, other: str) -> None:
    expected = other in BESIDE[one].split()
    for pools in (used(MODES[one]), used(base=used(MODES[one])), used(MODES[one], base=Pools())):
        assert pools.fits(POOL, MODES[other]) == expected
    if not {"half"} & {one, other}:
        assert may_exclude(MODES[one], MODES[other]) == (not expected)


@pytest.mark.parametrize("count", [2, 3, 7, 16, 17, 100, MOST_REPLICAS])
def test_a_device_has_as_many_replicas_as_configured_and_no_more(count: int) -> None:
    pools = Pools()
    for _ in range(count):
        assert pools.fits(POOL, replica(count))
        pools.change(POOL, replica(count), 1)
    assert not pools.fits(POOL, replica(count))


def test_the_only_replica_is_the_whole() -> None:
    assert replica(1) == ALONE
    assert not is_replica(ALONE)


@given(st.lists(USES, max_size=4))
def test_what_a_record_uses_for_several_reasons_is_at_least_each_in_any_order(uses: list[PoolUse]) -> None:
    whole = SHARED_PART
    for use in uses:
        whole = joined(whole, use)
    backwards = SHARED_PART
    for use in reversed(uses):
        backwards = joined(backwards, use)
    assert whole == backwards
    for use, other in product(uses, MODES.values()):
        if not used(use).fits(POOL, other):
            assert not used(whole).fits(POOL, other)


@given(st.lists(USES, max_size=6), st.lists(USES, max_size=4), st.data())
def test_uses_that_end_leave_no_trace_and_an_overlay_sees_what_the_pools_would(
    before: list[PoolUse], more: list[PoolUse], data: st.DataObject
) -> None:
    base = used(*before)
    ended = data.draw(st.lists(st.sampled_from(range(len(before))), unique=True)) if before else []
    overlay = used(*more, base=base)
    for index in ended:
        overlay.change(POOL, before[index], -1)
    plain = used(*more, *[use for index, use in enumerate(before) if index not in ended])
    for use in MODES.values():
        assert overlay.fits(POOL, use) == plain.fits(POOL, use)
    assert (overlay.amount(POOL), overlay.words_of(POOL)) == (plain.amount(POOL), plain.words_of(POOL))
    assert overlay.is_shared(POOL) == plain.is_shared(POOL)
    for use in before:
        base.change(POOL, use, -1)
    assert (base.used, base.words) == ({}, {})


@given(st.lists(USES, max_size=6), USES)
def test_a_change_that_is_said_to_change_nothing_for_others_changes_nothing(
    before: list[PoolUse], use: PoolUse
) -> None:
    pools = used(*before)
    answers = [pools.fits(POOL, each) for each in MODES.values()]
    if not pools.change(POOL, use, 1):
        assert answers == [pools.fits(POOL, each) for each in MODES.values()]
    answers = [pools.fits(POOL, each) for each in MODES.values()]
    if not pools.change(POOL, use, -1):
        assert answers == [pools.fits(POOL, each) for each in MODES.values()]


def test_a_device_has_more_seats_than_a_host_has_workers() -> None:
    assert WHOLE > 100_000

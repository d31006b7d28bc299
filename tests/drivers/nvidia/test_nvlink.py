"""Which GPUs share NVLink."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from outfitter_drivers.nvidia.nvlink import SWITCH, groups, peers

SEVEN = "abcdefg"


def grouped(**ends: list[str]) -> dict[str, list[int]]:
    return groups(peers(ends))


def test_gpus_at_switches_are_one_group() -> None:
    assert grouped(a=[SWITCH], b=[SWITCH], c=[SWITCH]) == {"a": [0], "b": [0], "c": [0]}


def test_a_bridge_makes_a_pair_and_a_gpu_without_one_has_no_group() -> None:
    assert grouped(a=["b"], b=["a"], c=["d"], d=["c"], e=[]) == {"a": [0], "b": [0], "c": [1], "d": [1], "e": []}


def test_gpus_that_are_not_linked_to_each_other_share_no_group() -> None:
    """A chain a - b - c: b is in both groups."""
    assert grouped(a=["b"], b=["a", "c"], c=["b"]) == {"a": [0], "b": [0, 1], "c": [1]}


def test_a_link_to_what_is_no_gpu_here_counts_for_nothing() -> None:
    assert grouped(a=["x"], b=[]) == {"a": [], "b": []}


@given(st.sets(st.tuples(st.sampled_from(SEVEN), st.sampled_from(SEVEN)).filter(lambda pair: pair[0] != pair[1])))
def test_two_gpus_share_a_group_exactly_if_they_are_linked(links: set[tuple[str, str]]) -> None:
    reached = peers({gpu: [other for one, other in links if one == gpu] for gpu in SEVEN})
    numbers = groups(reached)
    for one, other in itertools.combinations(SEVEN, 2):
        assert (not set(numbers[one]).isdisjoint(numbers[other])) == (other in reached[one])
    for number in set(itertools.chain.from_iterable(numbers.values())):
        members = [gpu for gpu in SEVEN if number in numbers[gpu]]
        assert all(other in reached[one] for one, other in itertools.combinations(members, 2))

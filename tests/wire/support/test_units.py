"""Durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto.support import units

DURATIONS = {
    "30s": 30.0,
    "5": 5.0,
    "0.5": 0.5,
    "500ms": 0.5,
    "2m": 120.0,
    "2 min": 120.0,
    "1h30m": 5_400.0,
    "1d 2h": 93_600.0,
    " 10 sec ": 10.0,
    "1.5h": 5_400.0,
    "0s": 0.0,
}


@pytest.mark.parametrize("text", DURATIONS)
def test_a_duration_is_read(text: str) -> None:
    assert units.parse_duration(text) == DURATIONS[text]


@pytest.mark.parametrize("text", ["", "s", "-1s", "1e3", "inf", "nan", "1x", "1s!", "1 2", "+1", "1,5s", "٣s", "1h30"])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="write 30s"):
        units.parse_duration(text)


@given(st.integers(0, 10**12))
def test_a_formatted_duration_reads_back(milliseconds: int) -> None:
    assert units.parse_duration(units.format_duration(milliseconds / 1_000)) == pytest.approx(milliseconds / 1_000)

"""Which devices meet a request's clauses, and which have something in common."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from outfitter_proto.clauses import clauses_of
from outfitter_service.core import model as m
from outfitter_service.core.state import selections
from outfitter_service.core.state.selections import MOST_MEMBERS, Selection

SAME = ("a", "b", "c", "d")


def test_devices_with_many_values_of_many_properties_take_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 values of four properties are 16 million combinations for each device."""
    made = 0

    def counted(*values: Any) -> Iterator[Any]:
        nonlocal made
        for each in product(*values):
            made += 1
            assert made <= 3 * MOST_MEMBERS
            yield each

    monkeypatch.setattr(selections, "product", counted)
    values = ",".join(map(str, range(64)))
    devices = [m.KnownDevice(id=f"g{n}", properties=dict.fromkeys(SAME, values)) for n in range(3)]
    selection = Selection(devices, [None] * 3, clauses_of(None, SAME))
    assert (selection.is_whole, selection.most(lendable=True)) == (False, 1)

"""Properties that mean the same whatever the driver have one name and one form."""

from __future__ import annotations

import pytest

from outfitter_drivers import properties
from support.documents import ROOT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory.total_bytes", "42949672960"),
        ("pci.bus_id", "0000:3b:00.0"),
        ("numa_node", "0"),
        ("compute_capability", "9.0"),
        ("nvlink.group", "0"),
        ("nvlink.group", "g2-0,g4-0"),
        ("my.own", ""),
    ],
)
def test_a_property_of_its_form_is_taken(name: str, value: str) -> None:
    assert properties.fault(name, value) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory.total_bytes", "40 GiB"),
        ("memory.total_bytes", "-1"),
        ("pci.bus_id", "0000:3B:00.0"),
        ("numa_node", "-1"),
        ("driver_version", "r570"),
        ("nvlink.group", "a, b"),
        ("model", ""),
    ],
)
def test_a_property_of_another_form_is_named_with_the_valid_one(name: str, value: str) -> None:
    assert properties.fault(name, value) == f"the property {name} is {value!r}; valid is {properties.FORMS[name]}"


def test_the_page_has_each_of_them() -> None:
    page = (ROOT / "drivers" / "README.md").read_text()
    section = page[page.index("## Properties") : page.index("## The names of a device")]
    assert [name for name in properties.FORMS if f"`{name}`" not in section] == []

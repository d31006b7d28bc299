"""The measured figures that the guide quotes, against tests/results.md: a new measurement changes both."""

from __future__ import annotations

import re

import pytest

from support.documents import ROOT

RESULTS = " ".join((ROOT / "tests" / "results.md").read_text().split())
MEASURED = {
    "size.md": r"\b\d+(?:\.\d+)? (?:µs|ms|MiB)|\b\d+(?:,\d{3})+(?= a second)",
    "failures.md": r"\b\d+\.\d+(?:–\d+\.\d+)? s\b",
}
"""What a measured figure looks like in each page."""
OTHERS = {
    "size.md": {
        "60 MiB": "a manager that serves nobody; tried by hand",
        "240 MiB": "computed: core/test_bounds.py has the limits",
        "280 MiB": "60 MiB and 100,000 times 2.3 kB",
        "32 MiB": "a limit of reference.md",
        "512 MiB": "a setting of the topic",
        "13 µs": "the restore: a second through 77,740",
        "24 ms": "23.8 ms",
        "33 ms": "33.4 ms",
        "4 µs": "a limit of reference.md",
    },
    "failures.md": {
        "0.01–0.11 s": "the crash matrix's smallest and largest",
        "0.8–0.9 s": "of a manager that is killed: outside and in a transaction",
        "0.5 s": "the supervisor's first delay",
    },
}
"""Figures that look measured and are none, or are computed: why."""


def quoted(page: str) -> set[str]:
    text = " ".join((ROOT / "service" / page).read_text().split())
    return set(re.findall(MEASURED[page], text)) - OTHERS[page].keys()


@pytest.mark.parametrize("page", MEASURED)
def test_each_measured_figure_of_the_guide_is_a_result(page: str) -> None:
    assert len(quoted(page)) > 10
    assert {figure for figure in quoted(page) if figure not in RESULTS} == set()

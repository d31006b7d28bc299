"""The names of allocations that a worker's programs inherit."""

from __future__ import annotations

import pytest

from outfitter.session.identity import MOST_OUTER, variables
from outfitter_proto.records import Register

OWN = {"OUTFITTER_HOST": "h", "OUTFITTER_WORKER": "outer", "OUTFITTER_INCARNATION": "1"}


def outer_of(worker: str, incarnation: str) -> list[str] | None:
    """The outer allocations that a program of this worker finds."""
    found = variables("sqlite:///bus", "c", Register(host="h", worker=worker, incarnation=incarnation))
    assert [found[name] for name in OWN] == ["h", worker, incarnation]
    return None if "OUTFITTER_OUTER" not in found else found["OUTFITTER_OUTER"].split(" ")


@pytest.fixture
def inherit(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process was started for the run 1 of the worker `outer`."""
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OUTFITTER_OUTER", raising=False)
    return monkeypatch


def test_a_program_finds_the_allocation_of_the_process_that_its_worker_is_in(inherit: pytest.MonkeyPatch) -> None:
    assert outer_of("inner", "2") == ["h/outer/1"]


def test_a_program_finds_all_outer_allocations_the_newest_last(inherit: pytest.MonkeyPatch) -> None:
    inherit.setenv("OUTFITTER_OUTER", "h/first/1 h/second/1 h/outer/1")
    assert outer_of("inner", "2") == ["h/first/1", "h/second/1", "h/outer/1"]


def test_an_allocation_that_a_process_attached_to_is_no_outer_one(inherit: pytest.MonkeyPatch) -> None:
    assert outer_of("outer", "1") is None
    inherit.setenv("OUTFITTER_OUTER", "h/first/1")
    assert outer_of("outer", "1") == ["h/first/1"]


@pytest.mark.parametrize("name", OWN)
def test_a_process_of_no_allocation_has_no_outer_one(inherit: pytest.MonkeyPatch, name: str) -> None:
    inherit.delenv(name)
    assert outer_of("inner", "2") is None
    inherit.setenv(name, "")
    assert outer_of("inner", "2") is None


def test_only_the_newest_outer_allocations_are_kept(inherit: pytest.MonkeyPatch) -> None:
    inherit.setenv("OUTFITTER_OUTER", " ".join(f"h/w/{number}" for number in range(MOST_OUTER + 5)))
    outer = outer_of("inner", "2")
    assert outer is not None
    assert outer == [*(f"h/w/{number}" for number in range(6, MOST_OUTER + 5)), "h/outer/1"]
    assert len(outer) == MOST_OUTER


@pytest.mark.parametrize("junk", ["x", "a/b", "a/b/c/d", "/b/c", "a/b/" + "c" * 300, "a/b/\u00e9", "@host/h/x"])
def test_what_is_no_allocations_key_is_left_out(inherit: pytest.MonkeyPatch, junk: str) -> None:
    inherit.setenv("OUTFITTER_OUTER", f"{junk}\th/first/1 {junk}")
    assert outer_of("inner", "2") == ["h/first/1", "h/outer/1"]
    inherit.setenv("OUTFITTER_WORKER", f"{junk} h/w/9")
    assert outer_of("inner", "2") == ["h/first/1"]

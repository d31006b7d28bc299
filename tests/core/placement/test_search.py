"""The search for devices that fit together, against trying everything."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from outfitter_proto.clauses import clauses_of
from outfitter_service.core import model as m
from outfitter_service.core.placement import policy, search
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.pools import Pools
from support.core.core_driver import CoreDriver, device

RESOURCES = ("a", "b")
CARDS = ("g0", "g1", "g2")


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, list[m.KnownDevice]]:
    """Up to three cards with up to three parts each; each resource shows some of them."""
    parts = {f"p{card[1]}{n}": card for card in CARDS for n in range(draw(st.integers(0, 3)))}
    everything = [*[device(card) for card in CARDS], *[device(name, part_of=card) for name, card in parts.items()]]
    return {name: draw(st.lists(st.sampled_from(everything), unique_by=lambda d: d.id)) for name in RESOURCES}


def host(layout: dict[str, list[m.KnownDevice]], **replicas: int) -> CoreDriver:
    core = CoreDriver(*[m.ResourceSpec(name=name, replicas=replicas.get(name, 1)) for name in layout])
    for name, devices in layout.items():
        core.report(*devices, resource=name)
    return core


def fit_together(chosen: list[m.KnownDevice]) -> bool:
    ids = [each.id for each in chosen]
    return len(set(ids)) == len(ids) and not any(each.part_of in ids for each in chosen)


def by_trying(layout: dict[str, list[m.KnownDevice]], wanted: dict[str, int]) -> bool:
    ways = [combinations(layout[name], amount) for name, amount in wanted.items()]
    return any(fit_together([each for devices in way for each in devices]) for way in product(*ways))


@settings(max_examples=400, deadline=None)
@given(layouts(), st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 4), min_size=1))
def test_devices_are_found_exactly_where_there_are_some(
    layout: dict[str, list[m.KnownDevice]], wanted: dict[str, int]
) -> None:
    core = host(layout)
    devices = core.host_state.devices
    if any(name not in devices.free_lists for name in wanted):
        return
    budget = search.Budget(HostOverlay(core.host_state))
    found = search.find(wanted, lambda name: range(len(layout[name])), devices, Pools(), (), budget)
    assert (found is not None) == by_trying(layout, wanted)
    if found is not None:
        chosen = [layout[name][position] for name, positions in found.items() for position in positions]
        assert fit_together(chosen)
        assert {name: len(positions) for name, positions in found.items()} == wanted


@pytest.mark.parametrize(("wholes", "parts", "feasible"), [(4, 28, True), (5, 28, False), (8, 0, True), (8, 1, False)])
def test_wholes_and_parts_of_eight_cards_with_seven_parts_each_are_decided_within_the_budget(
    wholes: int, parts: int, feasible: bool
) -> None:
    cards = [device(f"g{n}") for n in range(8)]
    core = host({"gpu": cards, "mig": [device(f"p{n}{k}", part_of=f"g{n}") for n in range(8) for k in range(7)]})
    wanted = {name: amount for name, amount in (("gpu", wholes), ("mig", parts)) if amount}
    assert search.is_feasible(HostOverlay(core.host_state), wanted, (), lendable=True) is feasible


def test_a_search_that_takes_too_long_says_so_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    core = host({"gpu": [device("g0"), device("g1")], "mig": [device("p0", part_of="g0")]})
    overlay = HostOverlay(core.host_state)
    monkeypatch.setattr(search, "MOST_STEPS", 2)
    assert search.is_feasible(overlay, {"gpu": 1, "mig": 1}, (), lendable=True) is None
    monkeypatch.undo()
    assert search.is_feasible(overlay, {"gpu": 1, "mig": 1}, (), lendable=True) is None
    core.report("g0", "g1", "g2")
    assert search.is_feasible(HostOverlay(core.host_state), {"gpu": 1, "mig": 1}, (), lendable=True) is True


def test_one_worker_gets_replicas_of_one_device_only_if_the_resource_says_so() -> None:
    core = host({"gpu": [device("g0"), device("g1")]}, gpu=2)

    def found(amount: int, *repeats: str) -> search.Found | None:
        overlay = HostOverlay(core.host_state)
        wanted = {"gpu": amount}
        return search.find(wanted, lambda _: range(2), overlay.devices, Pools(), repeats, search.Budget(overlay))

    assert found(3) is None
    assert found(3, "gpu") == {"gpu": [0, 0, 1]}
    assert found(5, "gpu") is None


@pytest.mark.parametrize("same", [(), ("group",)])
def test_whatever_is_asked_for_a_search_looks_at_devices_so_often_at_most(
    monkeypatch: pytest.MonkeyPatch, same: tuple[str, ...]
) -> None:
    looks, fits = 0, search._Choice.fits

    def counted(self: search._Choice, resource: str, position: int) -> bool:
        nonlocal looks
        looks += 1
        return fits(self, resource, position)

    monkeypatch.setattr(search._Choice, "fits", counted)
    core = CoreDriver(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="mig"))
    groups = [",".join(str((n * k) % 41) for k in range(8)) for n in range(40)]
    core.report(*[m.KnownDevice(id=f"g{n}", properties={"group": group}) for n, group in enumerate(groups)])
    core.report(*[device(f"p{n}.{k}", part_of=f"g{n}") for n in range(40) for k in range(7)], resource="mig")
    clauses = {"gpu": clauses_of(UNSET, same)} if same else {}
    overlay = HostOverlay(core.host_state)
    found = policy.place(overlay, core.rules.specs, {"gpu": 2, "mig": 7 * 38 + 1}, None, clauses)
    assert isinstance(found, policy.Infeasibility)
    assert looks <= 100_000, "that is three searches with all of their steps"
    assert found.code == "placement-not-found"

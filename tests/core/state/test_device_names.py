"""A device has several names, and several drivers know some of them each: what is held under one name is held under
all, whichever driver says so, says so no longer, or has not said anything yet since a restart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec import UNSET, structs

from outfitter_proto.records import HOLDING_STATES, Allocation
from outfitter_service.core import model as m
from outfitter_service.core.state.host_state import exclusive_ids
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord, SetInventory
from support.core.core_driver import HOST, CoreDriver, asks, device, ill
from support.core.world import whole, written

pytestmark = pytest.mark.timeout(600)  # 250 examples take as long as a busy machine lets them

A, B, C = (m.ResourceSpec(name=name) for name in "abc")


def connected() -> CoreDriver:
    """Resources a and b show one device, which only c's driver knows."""
    core = CoreDriver(A, B, C)
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core.report(device("UUID-0", aliases=("/dev/x0", "PCI-0")), resource="c")
    return core


def restarted(core: CoreDriver, *, configured: Iterable[m.ResourceSpec] | None = None, **rules: Any) -> CoreDriver:
    """The core after a crash: from the ledger alone, no driver having reported. `configured`: the resources that there
    are now, if others."""
    ledger = Ledger()
    for record in core.ledger.allocations.values():
        ledger.restore(PutAllocation(record.key, record))
    ledger.restore(PutRecord(core.host_state.record))
    ledger.resume(commit=core.ledger.commits, token=core.ledger.token)
    again = CoreDriver(*(core.rules.specs.values() if configured is None else configured), ledger=ledger, **rules)
    again.now, again.offset = core.now, core.offset
    again.announce()
    again.say(m.Reschedule(host=HOST))
    return again


def test_a_grant_keeps_all_names_of_its_devices_whoever_connects_them() -> None:
    assert connected().register("w1", resources=asks(a=1)).aliases == {"/dev/x0": ["PCI-0", "UUID-0"]}


@pytest.mark.parametrize("amount", [1, 2])
def test_a_grant_of_devices_with_names_of_their_own_keeps_those_first(amount: int) -> None:
    core = CoreDriver(A, C)
    core.report(device("y", aliases=("z", "b")), "x", resource="a")
    core.report(device("a", aliases=("y",)), resource="c")
    assert core.register("w1", resources=asks(a=amount)).aliases == {"y": ["z", "b", "a"]}


def test_a_device_stays_held_under_all_names_when_the_driver_that_connects_them_names_it_no_longer() -> None:
    core = connected()
    core.register("w1", resources=asks(a=1))
    assert core.register("w2", resources=asks(b=1)).state == "pending"
    core.report(resource="c")
    assert core.state("w2") == "pending"
    core.deregister("w1")
    assert core.has("w2", "b") == ["PCI-0"]


def test_a_device_stays_held_under_all_names_while_it_is_released() -> None:
    core = CoreDriver(m.ResourceSpec(name="a", confirms=True), B, C)
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core.register("w1", resources=asks(a=1))
    core.deregister("w1")
    core.report(device("UUID-0", aliases=("/dev/x0", "PCI-0")), resource="c")
    assert core["w1"].aliases == {"/dev/x0": ["PCI-0", "UUID-0"]}
    core.report(resource="c")
    assert core.register("w2", resources=asks(b=1)).state == "pending"


@pytest.mark.parametrize("first", ["a", "b"])
def test_names_are_known_after_a_restart_before_the_driver_that_connects_them_has_reported(first: str) -> None:
    core = connected()
    core.register("w1", resources=asks(a=1))
    core.register("w2", resources=asks(b=1))
    core = restarted(core)
    names = {"a": "/dev/x0", "b": "PCI-0"}
    for resource in (first, *(names.keys() - {first})):
        core.report(names[resource], resource=resource)
    assert core.state("w2") == "pending"


def test_names_of_free_devices_are_known_after_a_restart_as_well() -> None:
    core = restarted(restarted(connected()))
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core = restarted(core)
    core.report("PCI-0", resource="b")
    core.report("/dev/x0", resource="a")
    assert core.register("w1", resources=asks(a=1)).aliases == {"/dev/x0": ["PCI-0", "UUID-0"]}
    assert core.register("w2", resources=asks(b=1)).state == "pending"
    core.report(resource="c")
    assert core.host_state.record.resources["c"].names is UNSET


def test_a_name_that_is_learnt_after_the_grant_is_in_the_record_of_its_holder() -> None:
    core = CoreDriver(A, B)
    core.report("GPU-a", resource="a")
    core.register("w1", resources=asks(a=1))
    core.report(device("GPU-a", aliases=("0",)), resource="a")
    assert core["w1"].aliases == {"GPU-a": ["0"]}
    core = restarted(core)
    core.report("0", resource="b")
    assert core.register("w2", resources=asks(b=1)).state == "pending"
    assert dict(core.host_state.locks) == {"0": 1}


def test_a_device_whose_id_changes_stays_with_its_holder() -> None:
    core = CoreDriver(A)
    core.report("0", resource="a")
    core.register("w1", resources=asks(a=1))
    core.report(device("GPU-a", aliases=("0",)), resource="a")
    core.report("GPU-a", resource="a")
    assert core.register("w2", resources=asks(a=1)).reason == "waits for 1 a: 0 of 1 free"


def test_names_that_are_connected_for_a_moment_stay_so_for_a_holder_who_was_not_told_yet() -> None:
    core = CoreDriver(A, B, C)
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core.register("w1", resources=asks(a=1))
    core.register("w2", resources=asks(b=2))
    both = m.KnownDevice(id="UUID-0", properties={}, aliases=("/dev/x0", "PCI-0"))
    core.only(m.DriverReport(host=HOST, resource="c", devices=(both,)))
    core.only(m.DriverReport(host=HOST, resource="c"))
    assert core.register("w3", resources=asks(b=1)).state == "pending"
    core.say(m.Reschedule(host=HOST))
    assert core["w1"].aliases == {"/dev/x0": ["PCI-0", "UUID-0"]}
    core.report("u1", resource="c")
    assert core.host_state.inventories["c"].linked == ()


def test_names_are_listed_of_all_devices_even_if_the_record_of_a_host_lists_fewer() -> None:
    core = CoreDriver(A)
    core.report(*(device(f"g{n}", aliases=(f"p{n}",)) for n in range(300)), resource="a")
    assert core.host_state.record.resources["a"].names[:2] == [["g0", "p0"], ["g1", "p1"]]
    assert len(core.host_state.record.resources["a"].names) == 300
    assert core.host_state.record.resources["a"].names_left_out is UNSET


def many_connected(count: int, **rules: Any) -> CoreDriver:
    """Resources a and b show the same devices, which only c's driver knows."""
    core = CoreDriver(A, B, C, **rules)
    core.report(*(f"/dev/x{n}" for n in range(count)), resource="a")
    core.report(*(f"PCI-{n}" for n in range(count)), resource="b")
    return core


def links(count: int) -> list[m.KnownDevice]:
    return [device(f"UUID-{n}".ljust(90, "u"), aliases=(f"/dev/x{n}", f"PCI-{n}")) for n in range(count)]


@pytest.mark.parametrize("max_bytes", [1_000_000, 20_000])
def test_no_device_is_lent_twice_after_a_restart_without_the_driver_that_knew_more_names_than_are_listed(
    max_bytes: int,
) -> None:
    core = many_connected(300, max_bytes=max_bytes)
    core.report(*links(300), resource="c")
    again = restarted(core, max_bytes=max_bytes)
    again.report(*(f"/dev/x{n}" for n in range(300)), resource="a")
    again.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    for n in range(150, 300):
        again.register(f"a{n}", resources=asks(a=1))
    for n in range(300):
        again.register(f"b{n}", resources=asks(b=1))
    again.report(*links(300), resource="c")
    held = [
        again.host_state.canonical(each) for record in again.host_state.live.values() for each in exclusive_ids(record)
    ]
    assert len(held) == len(set(held)) == 300


@pytest.mark.parametrize("later", [20_000, 1_000_000], ids=["the same limit", "a higher limit, and the fast path"])
def test_a_host_whose_record_has_no_room_for_its_names_lends_nothing_until_their_driver_names_as_many(
    later: int,
) -> None:
    core = many_connected(300, max_bytes=20_000)
    core.report(*links(300), resource="c")
    core.register("holder", resources=asks(a=1))
    recorded = core.host_state.record.resources["c"]
    assert recorded.names_left_out + len(recorded.names or ()) == 300
    again = restarted(restarted(core, max_bytes=20_000), max_bytes=later)
    again.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    assert "names" in again.register("w", resources=asks(b=1)).reason
    again.report(*links(10), resource="c")
    assert again.state("w") == "pending"
    again = restarted(again, max_bytes=later)
    again.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    again.report(*links(10), resource="c")
    assert again.state("w") == "pending"
    again.report(*links(300), resource="c")
    assert again.state("w") == "allocated"


@pytest.mark.parametrize("releases", [False, True], ids=["held", "being released"])
def test_a_holder_takes_no_names_for_which_its_record_has_no_room(releases: bool) -> None:
    core = CoreDriver(m.ResourceSpec(name="a", prepares=True), B, C, max_bytes=4000)
    core.report("x", resource="a")
    granted = core.register("w1", resources=asks(a=1))
    core.say(m.Prepared(allocation=granted.key, token=granted.token))
    if releases:
        core.deregister("w1")
    core.report(device("b-".ljust(3000, "b"), aliases=("x",)), resource="b")
    known = core["w1"].aliases["x"]
    core.report(device("c-".ljust(3000, "c"), aliases=("x",)), resource="c")
    assert core.state("w1") == ("releasing" if releases else "allocated")
    assert core["w1"].aliases["x"] == known
    assert max(map(written, core.decisions)) <= 4000


def test_a_name_that_replaces_another_leaves_a_driver_with_as_many_names_incomplete() -> None:
    core = many_connected(300, max_bytes=20_000)
    core.register("holder", resources=asks(b=180))
    core.report(*links(300), resource="c")
    assert not core["holder"].aliases, "its record has no room for more names"
    again = restarted(core, max_bytes=20_000)
    again.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    again.report(*(f"/dev/x{n}" for n in range(300)), resource="a")
    other = structs.replace(links(10)[9], aliases=("/dev/y9", "PCI-9"))
    again.report(*links(9), other, *links(300)[10:], resource="c")
    assert "names" in again.register("w", resources=asks(a=1)).reason
    again.report(*reversed(links(300)), resource="c")
    assert again.state("w") == "allocated"


@pytest.mark.parametrize("max_bytes", [20_000, 5_000])
def test_a_report_with_other_names_is_believed_after_a_restart_once_nobody_holds_a_device(max_bytes: int) -> None:
    core = many_connected(300, max_bytes=20_000)
    core.report(*links(300), resource="c")
    core.register("holder", resources=asks(a=1))
    again = restarted(core, max_bytes=max_bytes)
    again.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    again.report(*links(10), resource="c")
    assert again.register("w1", resources=asks(b=1)).state == "pending"
    again.register("w2", resources=asks(b=1))
    again.deregister("holder")
    assert (again.state("w1"), again.state("w2")) == ("allocated", "allocated")
    assert again.host_state.record.resources["c"].names_left_out is UNSET


def connected_for_a_holder_whose_record_does_not_say_it() -> CoreDriver:
    """a's device is held, and c's driver connects it with b's at the last moment before a crash."""
    core = CoreDriver(A, B, C)
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core.register("w1", resources=asks(a=1))
    both = m.KnownDevice(id="UUID-0", properties={}, aliases=("/dev/x0", "PCI-0"))
    core.only(m.DriverReport(host=HOST, resource="c", devices=(both,)))
    return core


@pytest.mark.parametrize("how", [None, *[state for state in m.SpecState if state != m.SpecState.OK]])
def test_names_stay_connected_while_a_device_is_held_although_their_resource_is_not_in_effect_any_more(
    how: m.SpecState | None,
) -> None:
    core = connected_for_a_holder_whose_record_does_not_say_it()
    specs = [A, B] if how is None else [A, B, m.ResourceSpec(name="c", state=how)]
    again = restarted(core, configured=specs)
    again.report("PCI-0", resource="b")
    assert again.register("w2", resources=asks(b=1)).state == "pending"
    again = restarted(again)
    again.report("PCI-0", resource="b")
    assert again.state("w2") == "pending"
    again.report("/dev/x0", resource="a")
    again.deregister("w1")
    assert again.state("w2") == "allocated"
    again.deregister("w2")
    left = again.host_state.record.resources
    assert ("c" not in left) if how is None else (left["c"].names is UNSET)


def test_a_removed_resource_that_had_too_many_names_holds_up_the_host_only_while_somebody_holds_a_device() -> None:
    core = many_connected(300, max_bytes=20_000)
    core.report(*links(300), resource="c")
    core.register("holder", resources=asks(a=1))
    again = restarted(core, max_bytes=20_000, configured=[A, B])
    again.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    assert again.register("w1", resources=asks(b=1)).state == "pending"
    again.register("w2", resources=asks(b=1))
    again.deregister("holder")
    assert (again.state("w1"), again.state("w2")) == ("allocated", "allocated")
    assert "c" not in again.host_state.record.resources


def test_a_record_keeps_that_it_lacks_names_of_a_resource_for_which_it_has_no_room_at_all() -> None:
    others = [m.ResourceSpec(name=f"r{n}") for n in range(60)]
    core = CoreDriver(A, B, C, *others, max_bytes=8_000)
    core.report(*(f"/dev/x{n}" for n in range(300)), resource="a")
    core.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    core.register("holder", resources=asks(a=1))
    core.report(*links(300), resource="c")
    assert core.host_state.record.resources.keys() < core.rules.specs.keys()
    again = restarted(core, max_bytes=8_000)
    again.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    assert "names" in again.register("w", resources=asks(b=1)).reason
    again.report(*links(300), resource="c")
    assert again.state("w") == "allocated"


def test_a_host_without_holders_lends_again_when_the_driver_has_reported_with_fewer_names() -> None:
    core = many_connected(300, max_bytes=20_000)
    core.report(*links(300), resource="c")
    again = restarted(core, max_bytes=20_000)
    again.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    assert again.register("w", resources=asks(b=1)).state == "pending"
    again.report(*links(10), resource="c")
    assert again.state("w") == "allocated"
    assert again.register("w2", resources=asks(b=1)).state == "allocated"


def test_a_holder_whose_record_has_no_room_for_names_keeps_its_devices_and_holds_up_nobody() -> None:
    core = CoreDriver(A, B, C, max_bytes=20_000)
    core.report(*(f"x{n}" for n in range(200)), resource="a")
    core.report("other", "free", resource="b")
    assert core.register("big", resources=asks(a=180)).state == "allocated"
    core.register("small", resources=asks(b=1))
    core.report(*(device(f"u{n}", aliases=(f"x{n}", "y" * 90 + str(n))) for n in range(200)), resource="c")
    assert core.host_state.classes["x7"] == ("u7", "x7", "y" * 90 + "7")
    core.report(ill("other"), "y" * 90 + "7", "free", resource="b")
    assert core["small"].resources["b"][0]["health"] == "unhealthy"
    assert core.register("w", resources=asks(b=1)).resources["b"][0]["id"] == "free"
    assert core.register("w2", resources=asks(b=1)).state == "pending"
    core.deregister("small")
    assert core.state("small") == "ended"
    assert max(map(written, core.decisions)) <= 20_000, "what cannot be written would be tried for ever"
    again = restarted(core, max_bytes=20_000)
    again.report("y" * 90 + "7", "free", resource="b")
    assert again.state("w2") == "pending"


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_devices_that_a_report_connects_are_one_in_whatever_order_it_names_them(order: tuple[int, ...]) -> None:
    named = [device("a", aliases=("x",)), device("b", aliases=("y",)), device("c", aliases=("x", "y"))]
    core = CoreDriver(A)
    core.report(*(named[place] for place in order), resource="a")
    assert core.host_state.inventories["a"].healthy == 1
    assert core.register("w1", resources=asks(a=1)).state == "allocated"
    assert core.register("w2", resources=asks(a=1)).state == "pending"


def test_names_that_only_a_repeated_entry_of_a_report_has_count_as_well() -> None:
    core = CoreDriver(A, B)
    core.report(device("GPU-a", aliases=("pci1",)), device("pci1", aliases=("cuda0",)), resource="a")
    core.report("cuda0", resource="b")
    assert core.register("w1", resources=asks(a=1)).aliases == {"GPU-a": ["pci1", "cuda0"]}
    assert core.register("w2", resources=asks(b=1)).state == "pending"


@pytest.mark.parametrize("repeated", [("a", "a"), ("a", "x")])
def test_a_device_that_is_named_twice_has_the_names_and_the_illness_of_both(repeated: tuple[str, str]) -> None:
    first, second = repeated
    core = CoreDriver(A, B)
    core.report(device(first, aliases=("x",)), ill(second, "overheated"), resource="a")
    [known] = core.host_state.inventories["a"].devices
    assert (known.id, known.health, known.reason) == ("a", "unhealthy", "overheated")
    assert core.register("w1", resources=asks(a=1)).reason_code == "infeasible"


# --- any order of reports, grants and restarts ---------------------------------------------------------

NAMES = {"d": ("d0", "d1"), "e": ("a0", "b0", "c0")}
"""Two devices by all their names."""

CHANGED = st.sampled_from([None, None, *"abc"])
"""The resource whose configuration has changed when the manager starts again, if any."""

CROWDS = st.sampled_from([(0, 0), (0, 0), (0, 0), (30, 0), (30, 30), (260, 0)])
"""How many more devices a driver reports, and which of them have other names than before: more names than a record has
room for, or more devices than it lists."""


def crowded(resource: str, count: int, since: int) -> list[m.KnownDevice]:
    """Ill devices that no other driver reports. The first 30 have long names, by `since`."""
    devices = [ill(f"{resource}-{n}") for n in range(count)]
    names = [f"{since}-{resource}-{n}".ljust(200, "n") for n in range(30)]
    return [structs.replace(one, aliases=(name,)) for one, name in zip(devices, names, strict=False)] + devices[30:]


SHOWN = st.lists(
    st.tuples(st.sampled_from("de"), st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)), max_size=3
)


def _one(groups: Iterable[Iterable[str]], name: str) -> set[str]:
    """All names of one device."""
    names, sets = {name}, [set(group) for group in groups]
    while more := [group for group in sets if not group.isdisjoint(names) and not group <= names]:
        names.update(*more)
    return names


class Names(RuleBasedStateMachine):
    """Drivers that name some devices, by some of their names; what they name wrongly is not drawn."""

    @initialize(
        shared=st.sampled_from([None, None, "b"]),
        confirms=st.booleans(),
        chunk=st.integers(1, 3),
        max_bytes=st.sampled_from([800_000, 8_000]),
    )
    def begin(self, shared: str | None, confirms: bool, chunk: int, max_bytes: int) -> None:
        self.specs = {
            name: m.ResourceSpec(name=name, shared=name == shared, confirms=confirms and name == "a") for name in "abc"
        }
        self.bounds = {"chunk": chunk, "max_bytes": max_bytes}
        self.core = CoreDriver(*self.specs.values(), **self.bounds)
        self.unreported = set("abc")
        self.told: dict[str, list[tuple[str, ...]]] = {}
        self.held: dict[str, dict[str, set[str]]] = {}
        self.count = 0

    @rule(
        resource=st.sampled_from("abc"),
        shown=SHOWN,
        crowd=CROWDS,
        crashes=st.sampled_from([False, False, True]),
        changed=CHANGED,
    )
    def report(
        self,
        resource: str,
        shown: list[tuple[str, list[int]]],
        crowd: tuple[int, int],
        crashes: bool,
        changed: str | None,
    ) -> None:
        """Where the manager `crashes`, it has told no holder of the report."""
        spec = self.core.rules.specs.get(resource)
        if spec is None or spec.state != m.SpecState.OK:
            return
        devices = []
        for kind, picked in shown:
            names = [NAMES[kind][n % len(NAMES[kind])] for n in picked]
            names = list(dict.fromkeys(names))
            devices.append(m.KnownDevice(id=names[0], properties={}, aliases=tuple(names[1:])))
        devices = [*crowded(resource, *crowd), *devices]  # what has no room is cut from the end
        self.told[resource] = [(one.id, *one.aliases) for one in devices]
        self.unreported.discard(resource)
        self.learn()
        if crashes:
            self.core.only(m.DriverReport(host=HOST, resource=resource, devices=tuple(devices)))
            self.restart(changed, None)
        else:
            self.core.report(*devices, resource=resource)
        self.look()

    @rule(amounts=st.dictionaries(st.sampled_from("abc"), st.integers(1, 2), min_size=1, max_size=2))
    def register(self, amounts: dict[str, int]) -> None:
        self.count += 1
        self.core.register(f"w{self.count}", resources=asks(**amounts))
        self.look()

    @rule(
        kind=st.sampled_from("de"),
        order=st.permutations("abc"),
        crowd=CROWDS,
        removed=st.booleans(),
        again=st.one_of(st.none(), CROWDS, st.just("as many")),
    )
    def connect_late(
        self, kind: str, order: list[str], crowd: tuple[int, int], removed: bool, again: tuple[int, int] | str | None
    ) -> None:
        """A driver connects two names just before a crash. Later it may name another device, or be gone; of the others
        it may name as many as before."""
        holds, connects, wants = order
        other = "d" if kind == "e" else "e"
        self.report(holds, [(kind, [0])], (0, 0), False, None)
        self.register({holds: 1})
        self.report(connects, [(kind, [0, 1])], crowd, True, connects if removed else None)
        if again is not None:
            self.report(connects, [(other, [0, 1])], again if isinstance(again, tuple) else crowd, False, None)
        self.report(wants, [(kind, [1])], (0, 0), False, None)
        self.register({wants: 1})

    @precondition(lambda self: self.core.ledger.allocations)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(record.worker for record in self.core.ledger.allocations.values())))
        self.core.deregister(worker)
        self.look()

    @precondition(lambda self: any(one.state == "releasing" for one in self.core.ledger.allocations.values()))
    @rule()
    def release(self) -> None:
        for record in list(self.core.ledger.allocations.values()):
            if record.state == "releasing":
                self.core.say(m.Unprepared(allocation=record.key, token=record.token or 0, confirmed=True))
        self.look()

    @rule(changed=CHANGED, state=st.sampled_from([None, m.SpecState.DISABLED]))
    def restart(self, changed: str | None, state: m.SpecState | None) -> None:
        """The manager starts again; a resource may not be configured then, or not be in effect."""
        specs = {name: spec for name, spec in self.specs.items() if name != changed or state is not None}
        if changed is not None and state is not None:
            specs[changed] = structs.replace(specs[changed], state=state)
        self.core = restarted(self.core, configured=specs.values(), **self.bounds)
        self.unreported = {name for name, spec in specs.items() if spec.state == m.SpecState.OK}
        self.look()

    def forget(self) -> None:
        """Nobody holds a device: what a resource said that is not in effect any more counts no longer."""
        specs = self.core.rules.specs
        for name in [*self.told]:
            if name not in specs or specs[name].state != m.SpecState.OK:
                del self.told[name]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        return [group for told in self.told.values() for group in told]

    def learn(self) -> None:
        """What is connected stays so for those who hold it."""
        for held in self.held.values():
            for device_id, names in held.items():
                held[device_id] = {other for name in names for other in _one([*self.groups, names], name)}

    def look(self) -> None:
        live = {key: one for key, one in self.core.ledger.allocations.items() if one.state in HOLDING_STATES}
        self.held = {key: held for key, held in self.held.items() if key in live}
        if not self.held:
            self.forget()  # whoever holds a device now has got it since then
        for key in live.keys() - self.held.keys():
            self.held[key] = {one: _one(self.groups, one) for one in self.ids(live[key])}
            for other in self.held.keys() - {key}:
                self.look_at_both(live[key], live[other])
        for key, record in live.items():
            for device_id, names in self.held[key].items():
                known = {device_id, *(record.aliases or {}).get(device_id, ())}
                if self.bounds["max_bytes"] < 100_000:
                    continue  # the record may have no room for them
                assert known >= names, f"{key} knows {device_id} as {known}, and not as {names}"
        if not live:
            incomplete = set(self.core.host_state.incomplete)
            assert incomplete <= self.unreported, "names of the past hold up a host for ever"
        self.rebuild()

    def look_at_both(self, one: Allocation, other: Allocation) -> None:
        for device_id, names in self.held[one.key].items():
            for another, more in self.held[other.key].items():
                alone = device_id in exclusive_ids(one) or another in exclusive_ids(other)
                assert names.isdisjoint(more) or not alone, f"{one.key} has {device_id}, {other.key} has {another}"

    def rebuild(self) -> None:
        """The indexes are a function of records and reports."""
        rebuilt = Ledger()
        for record in self.core.ledger.allocations.values():
            rebuilt.restore(PutAllocation(record.key, record))
        for resource, inventory in self.core.host_state.inventories.items():
            rebuilt.restore(SetInventory(HOST, resource, inventory))
        rebuilt.restore(PutRecord(self.core.host_state.record))
        rebuilt.resume(commit=self.core.ledger.commits, token=self.core.ledger.token)
        assert whole(rebuilt) == whole(self.core.ledger)

    def ids(self, record: Allocation) -> list[str]:
        return [info["id"] for infos in record.resources.values() for info in infos]


Names.TestCase.settings = settings(
    max_examples=250, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_names_in_any_order = Names.TestCase

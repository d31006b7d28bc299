"""Who holds a device, when resources, drivers and holders call it differently."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec import structs

from outfitter_proto.records import Allocation, Host, InventoryDevice, ResourceInventory
from outfitter_proto.signs_of_life import UNKNOWN
from outfitter_service.core import model as m
from outfitter_service.core.hosts import host_record as recorded
from outfitter_service.core.state import lending
from outfitter_service.core.state.ledger import PutRecord
from outfitter_service.query.device_lines import DeviceLine, lines_of
from outfitter_service.query.explanation import explain
from outfitter_service.query.ledger_view import LedgerView
from outfitter_service.runtime.processor.reporting.gauges import StateGauges
from support.api import allocation, change, host_record
from support.core.core_driver import HOST, CoreDriver, asks, restarted


def host_with(**resources: list[list[str]]) -> Host:
    """A host whose drivers report devices by these names, the id first, as its manager records it."""
    core = CoreDriver(*(m.ResourceSpec(name=name) for name in resources))
    for name, devices in resources.items():
        core.report(
            *(m.KnownDevice(id=one[0], properties={}, aliases=tuple(one[1:])) for one in devices), resource=name
        )
    return structs.replace(record_of(core), host="a")


def record_of(core: CoreDriver) -> Host:
    """The host's record now, put into the ledger as a manager does."""
    state = core.host_state
    record = recorded(state.record, core.rules, state.devices.inventories, core.now, keeps_names=state.keeps_names)
    if record is not None:
        core.ledger.change(PutRecord(record))
    found: Host = state.record
    return found


def view_of(*records: Any) -> LedgerView:
    ledger = LedgerView()
    for record in records:
        ledger.put(change(record))
    return ledger


def having(resource: str, device: str, **more: Any) -> Allocation:
    """The allocation of `w1`, which has this device."""
    return structs.replace(allocation("a", "w1", **more), resources={resource: [{"id": device, "index": "0"}]})


def held_by(lines: list[DeviceLine]) -> dict[tuple[str, str], list[str]]:
    return {(line.resource, line.id): [holder.worker for holder in line.holders] for line in lines}


def test_a_device_that_two_resources_show_under_two_names_is_held_in_both() -> None:
    host = host_with(gpu=[["GPU-a", "0"]], cuda=[["0"]])
    holder = having("cuda", "0", aliases={"0": ["GPU-a"]})
    lines = lines_of(view_of(host, holder), host)
    assert held_by(lines) == {("gpu", "GPU-a"): ["w1"], ("cuda", "0"): ["w1"]}
    assert {line.resource: line.aliases for line in lines} == {"gpu": ["0"], "cuda": ["GPU-a"]}


def test_the_hosts_record_alone_connects_the_names_of_a_device() -> None:
    host = host_with(gpu=[["GPU-a", "0"]], cuda=[["0"]])
    holder = having("cuda", "0")
    assert held_by(lines_of(view_of(host, holder), host))["gpu", "GPU-a"] == ["w1"]


def test_the_holders_record_alone_connects_the_names_of_a_device() -> None:
    host = host_with(gpu=[["GPU-a"]])
    holder = having("gpu", "0", aliases={"0": ["GPU-a"]})
    assert held_by(lines_of(view_of(host, holder), host)) == {("gpu", "GPU-a"): ["w1"]}


def test_a_device_that_its_driver_has_renamed_is_one_line_which_is_held() -> None:
    host = host_with(gpu=[["GPU-b", "GPU-a"]])
    holder = allocation("a", "w1", devices=["GPU-a"])
    waiter = allocation("a", "w2", "pending")
    ledger = view_of(host, holder, waiter)
    (line,) = lines_of(ledger, host)
    assert (line.id, line.aliases, line.is_free, line.listed) == ("GPU-b", ["GPU-a"], False, True)
    assert [
        [holder.worker for holder in line.holders] for line in explain(ledger, waiter, verdict=UNKNOWN).devices
    ] == [["w1"]]


def test_a_device_that_nobody_reports_is_one_line_whatever_its_holders_call_it() -> None:
    host = host_with(gpu=[])
    first = allocation("a", "w1", devices=["old"], shared=["gpu"])
    second = allocation("a", "w2", devices=["new"], shared=["gpu"], aliases={"new": ["old"]})
    (line,) = lines_of(view_of(host, first, second), host)
    assert [holder.worker for holder in line.holders] == ["w1", "w2"]


def test_a_device_of_an_exclusive_resource_that_is_shared_through_another_one_is_not_free() -> None:
    host = host_with(gpu=[["GPU-a"]], mon=[["GPU-a"]])
    shared: ResourceInventory = structs.replace(host.resources["mon"], sharing="shared")
    host = structs.replace(host, resources={**host.resources, "mon": shared})
    holder = having("mon", "GPU-a", shared=["mon"])
    assert {line.resource: line.is_free for line in lines_of(view_of(host, holder), host)} == {
        "gpu": False,
        "mon": True,
    }


def test_of_two_names_in_one_resource_that_another_one_calls_one_device_the_ill_one_counts() -> None:
    host = host_with(gpu=[["g0"], ["g1"]], cuda=[["g1", "g0"]])
    ill: list[InventoryDevice] = [
        structs.replace(device, health="unhealthy") if device.id == "g1" else device
        for device in host.resources["gpu"].devices
    ]
    host = structs.replace(
        host, resources={**host.resources, "gpu": structs.replace(host.resources["gpu"], devices=ill)}
    )
    lines = [line for line in lines_of(view_of(host), host) if line.resource == "gpu"]
    assert [(line.id, line.health) for line in lines] == [("g1", "unhealthy")]


def test_a_line_names_twenty_holders_who_has_it_alone_first_and_says_how_many_there_are() -> None:
    host = host_record("a", gpus=1)
    sharers = [allocation("a", f"w{number:02}", devices=["a-0"], shared=["gpu"]) for number in range(30)]
    (line,) = lines_of(view_of(host, *sharers, allocation("a", "alone", devices=["a-0"])), host)
    assert [holder.worker for holder in line.holders] == ["alone", *(f"w{number:02}" for number in range(19))]
    assert line.holder_count == 31


def test_a_holder_that_changes_keeps_its_place_and_one_that_ends_is_gone() -> None:
    host = host_record("a", gpus=1)
    sharers = [allocation("a", worker, devices=["a-0"], shared=["gpu"]) for worker in ("one", "two", "three")]
    ledger = view_of(host, *sharers)
    ledger.put(change(structs.replace(sharers[0], state="releasing")))
    ledger.put(change(structs.replace(sharers[1], state="ended")))
    ledger.put(change(None, key=sharers[2].key))
    (line,) = lines_of(ledger, host)
    assert [(holder.worker, holder.state) for holder in line.holders] == [("one", "releasing")]
    ledger.put(change(None, key=sharers[0].key))
    assert list(ledger.held("a")) == []


DEVICES = (("d0", "d1", "d2"), ("e0", "e1"), ("f0",))
"""Devices by all their names."""
SHOWN = st.lists(
    st.tuples(st.integers(0, 2), st.permutations(range(3)), st.integers(1, 3)), max_size=3, unique_by=lambda one: one[0]
)
HEALTH = st.sampled_from([m.Health.HEALTHY, m.Health.HEALTHY, m.Health.UNHEALTHY])


class Views(RuleBasedStateMachine):
    """Drivers that name devices now so, now so: views and the manager's own gauges count the same."""

    @initialize(shared=st.sets(st.sampled_from("abc")))
    def begin(self, shared: set[str]) -> None:
        self.specs = [m.ResourceSpec(name=name, shared=name in shared) for name in "abc"]
        self.core = CoreDriver(*self.specs)
        self.core.announce()
        self.count = 0

    @rule(resource=st.sampled_from("abc"), shown=SHOWN, health=HEALTH)
    def report(self, resource: str, shown: list[tuple[int, list[int], int]], health: m.Health) -> None:
        devices = []
        for number, order, most in shown:
            names = [DEVICES[number][n] for n in order if n < len(DEVICES[number])][:most]
            devices.append(m.KnownDevice(id=names[0], properties={}, aliases=tuple(names[1:]), health=health))
        self.core.report(*devices, resource=resource)
        self.look()

    @rule(amounts=st.dictionaries(st.sampled_from("abc"), st.integers(1, 2), min_size=1, max_size=2))
    def register(self, amounts: dict[str, int]) -> None:
        self.count += 1
        self.core.register(f"w{self.count}", resources=asks(**amounts))
        self.look()

    @precondition(lambda self: self.core.ledger.allocations)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(record.worker for record in self.core.ledger.allocations.values())))
        self.core.deregister(worker)
        self.look()

    @rule()
    def restart(self) -> None:
        self.core = restarted(self.core, configured=self.specs)
        self.look()

    def look(self) -> None:
        host, records = record_of(self.core), self.core.ledger.allocations
        ledger = view_of(host, *records.values())
        shown: dict[tuple[str, str], int] = {}
        for line in lines_of(ledger, host):
            if line.listed:
                is_held = lending.not_lent(None, line.use, shares=line.sharing == "shared") is not None
                state = "free" if line.is_free else "held" if is_held else "not free"
                shown[line.resource, state] = shown.get((line.resource, state), 0) + 1
        assert shown == self.counted(), host

    def counted(self) -> dict[tuple[str, str], int]:
        gauges = StateGauges("abc")
        gauges.replay(self.core.ledger.allocations, hosts=[HOST])
        counted: dict[tuple[str, str], int] = {}
        for (resource, state), count in gauges.state_counts(self.core.ledger).devices.items():
            name = state if state in ("held", "free") else "not free"
            counted[resource, name] = counted.get((resource, name), 0) + count
        return counted


Views.TestCase.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_views_and_gauges_count_the_same = Views.TestCase

"""The gauges of state: counted commit by commit, of what is committed and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from functools import cache
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from outfitter_proto.records import Allocation, AllocationState, Health, ReasonCode, ResolvedRequest, Source
from outfitter_service.core.model import KnownDevice
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.ledger import Ledger, SetInventory
from outfitter_service.core.state.resource_state import ResourceState
from outfitter_service.metrics import StateCounts
from outfitter_service.runtime.processor.reporting import gauges
from outfitter_service.runtime.processor.reporting.gauges import MOST_MODELS, OTHER, StateGauges
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import deregister, register, static
from support.wire_samples import AT

HOLDING = {"preparing", "allocated", "releasing"}


@cache
def wants(resource: str, amount: int) -> ResolvedRequest:
    """Workers that want the same share what says so."""
    return ResolvedRequest(amounts={resource: amount})


def record(
    worker: str, state: str, *devices: str, resource: str = "gpu", aliases: list[str] | None = None
) -> Allocation:
    more = {"aliases": {devices[0]: aliases}} if aliases else {}
    return Allocation(
        host="h", worker=worker, incarnation="1", state=state, since=AT, writer="host/h", commit=1, token=1,
        request=wants(resource, max(1, len(devices))), source=Source(partition=0, offset=0),
        reason_code=ReasonCode.BUSY if state == "pending" else None,
        resources={resource: [{"id": device} for device in devices]} if devices else {}, **more,
    )  # fmt: skip


def reported(*devices: KnownDevice, host: str = "h") -> Ledger:
    """A ledger of no records, whose one host has these devices."""
    found = Ledger()
    report(found, "gpu", *devices, host=host)
    return found


def report(ledger: Ledger, resource: str, *devices: KnownDevice, host: str = "h") -> None:
    ledger.restore(SetInventory(host, resource, ResourceState.of(devices)))


def device(name: str, health: Health = Health.HEALTHY, *aliases: str) -> KnownDevice:
    return KnownDevice(id=name, health=health, aliases=aliases, properties={})


def of_model(model: str, known: KnownDevice) -> KnownDevice:
    return structs.replace(known, properties={"model": model})


def any_record(key: str) -> st.SearchStrategy[Allocation]:
    """A record under `key`, which has a device of its own: no two have one, or the self-check would say so."""
    return st.builds(
        lambda state, resource, why: structs.replace(
            record(key, state, *([f"D{KEYS.index(key)}"] if state in HOLDING else []), resource=resource),
            reason_code=why if state == "pending" else None,
        ),
        st.sampled_from([str(state) for state in AllocationState]),
        st.sampled_from(["gpu", "fpga"]),
        st.sampled_from([ReasonCode.BUSY, ReasonCode.NOT_REPORTED]),
    )


KEYS = "abcd"
commits = st.lists(st.fixed_dictionaries({}, optional={key: st.none() | any_record(key) for key in KEYS}), max_size=8)


@given(commits)
def test_counts_are_those_of_the_records_there_are_whatever_came_before(
    history: list[dict[str, Allocation | None]],
) -> None:
    state_gauges = StateGauges(["gpu", "fpga"])
    now: dict[str, Allocation] = {}
    for changed in history:
        state_gauges.update(changed, before={key: now[key] for key in changed if key in now})
        now |= {key: one for key, one in changed.items() if one is not None}
        now = {key: one for key, one in now.items() if changed.get(key, one) is not None}
    told = state_gauges.state_counts(reported(*[device(f"D{n}") for n in range(4)]))
    assert told.allocations == Counter((name, one.state) for one in now.values() for name in one.request.amounts)
    assert told.pending == Counter(
        (name, one.reason_code) for one in now.values() if one.state == "pending" for name in one.request.amounts
    )
    held = {info["id"] for one in now.values() for infos in one.resources.values() for info in infos}
    assert (told.devices["gpu", "held"], told.devices["gpu", "free"]) == (len(held), 4 - len(held))


STEPS = st.one_of(
    st.tuples(st.just("report"), st.sampled_from("xyz"), st.lists(st.sampled_from(list(Health)), max_size=3)),
    st.tuples(st.just("hold"), st.sampled_from("xyz"), st.sampled_from(["D0", "D1", "other"])),
    st.tuples(st.just("end"), st.sampled_from("xyz"), st.sampled_from(["D0", "D1", "other"])),
    st.tuples(st.sampled_from(["forget", "scrape", "catch up", "roll back"]), st.sampled_from("xyz"), st.none()),
)


@given(st.lists(STEPS, max_size=30))
def test_running_totals_are_what_a_walk_over_all_hosts_says(steps: list[tuple[str, str, Any]]) -> None:
    state_gauges, ledger, now = StateGauges(["gpu"]), Ledger(), dict[str, Allocation]()
    for what, host, more in steps:
        key = f"{host}/{more}/1"
        match what:
            case "report":
                known = [device(f"D{n}", health, *(["other"] if n else [])) for n, health in enumerate(more)]
                ledger.change(SetInventory(host, "gpu", ResourceState.of(tuple(known))))
            case "hold" if key not in now:
                now[key] = structs.replace(record(more, "allocated", more), host=host)
                state_gauges.update({key: now[key]}, before={})
            case "end" if key in now:
                state_gauges.update({key: None}, before={key: now.pop(key)})
            case "forget":
                ledger.forget(host)
            case "scrape":
                state_gauges.state_counts(ledger)
            case "catch up":
                state_gauges.catch_up(ledger)
            case "roll back":
                ledger.rollback()
    anew = StateGauges(["gpu"])
    anew.replay(now, hosts=ledger.hosts)
    assert state_gauges.state_counts(ledger) == anew.state_counts(ledger)


@pytest.mark.parametrize("anew", [{}, {"b": record("b", "allocated", "D0")}], ids=["nothing", "another holder"])
def test_a_replay_begins_with_nothing_of_what_was_counted(anew: dict[str, Allocation]) -> None:
    state_gauges = StateGauges(["gpu"])
    state_gauges.update({"a": record("a", "allocated", "D0", "D1")}, before={})
    assert state_gauges.replay(anew) == []
    told = state_gauges.state_counts(reported(device("D0"), device("D1")))
    assert (told.records, told.devices["gpu", "held"]) == (len(anew), len(anew))


def test_a_device_is_held_under_any_of_its_names_and_counts_by_its_health_else() -> None:
    state_gauges = StateGauges(["gpu"])
    other = record("b", "allocated", "G2")
    state_gauges.update({"a": record("a", "allocated", "old", aliases=["0000:01:00.0"]), "b": other}, before={})
    known = [
        device("G0", Health.HEALTHY, "0000:01:00.0"), device("G1"), device("G2", Health.UNHEALTHY),
        device("G3", Health.UNHEALTHY), device("G4", Health.UNKNOWN),
    ]  # fmt: skip
    told = state_gauges.state_counts(reported(*known))
    assert told.devices == {
        ("gpu", "held"): 2, ("gpu", "free"): 1, ("gpu", "unhealthy"): 1, ("gpu", "unknown"): 1,
    }  # fmt: skip


def test_devices_are_counted_by_model_and_the_healthy_ones_held_or_not() -> None:
    state_gauges = StateGauges(["gpu"])
    state_gauges.update({"a": record("a", "allocated", "G0"), "b": record("b", "allocated", "G2")}, before={})
    known = [
        of_model("A100", device("G0")), of_model("A100", device("G1", Health.UNHEALTHY)),
        of_model("H100", device("G2", Health.UNHEALTHY)), of_model("H100", device("G3")), device("G4"),
    ]  # fmt: skip
    found = reported(*known)
    told = state_gauges.state_counts(found)
    assert told.devices == {("gpu", "held"): 2, ("gpu", "free"): 2, ("gpu", "unhealthy"): 1}
    assert told.healthy == {"gpu": 3}
    assert told.blocked == {("gpu", "unhealthy"): 2}
    assert told.models == {
        ("gpu", "A100", "held"): 1, ("gpu", "A100", "unhealthy"): 1,
        ("gpu", "H100", "held"): 1, ("gpu", "H100", "free"): 1,
    }  # fmt: skip
    report(found, "gpu", of_model("A100", device("G0")))
    told = state_gauges.state_counts(found)
    assert (told.healthy, told.blocked, told.models) == ({"gpu": 1}, {}, {("gpu", "A100", "held"): 1})


def test_what_operators_take_out_is_cordoned_unless_somebody_holds_it_and_as_healthy_as_it_is() -> None:
    state_gauges = StateGauges(["gpu"])
    state_gauges.update({"a": record("a", "allocated", "G0")}, before={})
    known = [of_model("A100", device(f"G{number}")) for number in range(3)]
    inventory = ResourceState.of((*known, device("G3", Health.UNHEALTHY)))
    found = Ledger()
    found.restore(SetInventory("h", "gpu", inventory.with_cordoned({"G0": "o-1", "G1": "o-1", "G3": "o-2"})))
    told = state_gauges.state_counts(found)
    assert told.devices == {("gpu", "held"): 1, ("gpu", "cordoned"): 2, ("gpu", "free"): 1}
    assert told.models == {("gpu", "A100", "held"): 1, ("gpu", "A100", "cordoned"): 1, ("gpu", "A100", "free"): 1}
    assert (told.healthy, told.blocked) == ({"gpu": 3}, {("gpu", "cordoned"): 3})
    found.restore(SetInventory("h", "gpu", inventory.with_cordoned({})))
    assert state_gauges.state_counts(found).devices == {
        ("gpu", "held"): 1, ("gpu", "free"): 2, ("gpu", "unhealthy"): 1,
    }  # fmt: skip


def test_models_that_a_driver_makes_up_are_no_labels_without_end() -> None:
    known = [of_model(f"{number} " * 200, device(f"G{number}")) for number in range(2 * MOST_MODELS)]
    models = StateGauges(["gpu"]).state_counts(reported(*known)).models
    assert len({model for _, model, _ in models}) == MOST_MODELS + 1
    assert models["gpu", OTHER, "free"] == MOST_MODELS
    assert max(len(model) for _, model, _ in models) <= 100


def test_a_report_that_changes_names_or_health_is_seen() -> None:
    state_gauges = StateGauges(["gpu"])
    state_gauges.update({"a": record("a", "allocated", "other")}, before={})
    found = reported(device("Z0"))

    def shown() -> dict[str, int]:
        devices = state_gauges.state_counts(found).devices
        return {state: count for (resource, state), count in devices.items() if resource == "gpu" and count}

    assert shown() == {"free": 1}
    report(found, "gpu", device("Z0", Health.UNKNOWN))
    assert shown() == {"unknown": 1}
    # another resource's driver knows that it is the device that somebody has
    report(found, "nic", device("N0", Health.HEALTHY, "Z0", "other"))
    assert shown() == {"held": 1}
    report(found, "nic", device("N0"))
    assert shown() == {"unknown": 1}


def test_resources_that_workers_make_up_share_one_label() -> None:
    state_gauges = StateGauges(["gpu"])
    state_gauges.update({name: record(name, "failed", resource=f"made-up-{name}") for name in "abc"}, before={})
    told = state_gauges.state_counts(Ledger())
    assert told.allocations == {(OTHER, "failed"): 3}
    state_gauges.replay({"a": record("a", "allocated", "D0", resource="no-longer-configured")})
    assert state_gauges.state_counts(Ledger()).allocations == {("no-longer-configured", "allocated"): 1}


class _Looked(Ledger):
    """A ledger that counts how many of its hosts are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

        class Hosts(dict[str, HostState]):
            def get(hosts, *wanted: Any) -> Any:  # noqa: N805 - the ledger is self
                self.looks += 1
                return super().get(*wanted)

        self.hosts = Hosts()


def hosts_with_a_holder(count: int) -> tuple[_Looked, dict[str, Allocation]]:
    found, records = _Looked(), dict[str, Allocation]()
    for number in range(count):
        report(found, "gpu", device("D0"), host=f"h{number}")
        one = structs.replace(record("w", "allocated", "D0"), host=f"h{number}")
        records[one.key] = one
    return found, records


def test_a_scrape_looks_only_at_hosts_of_which_something_is_new() -> None:
    ledger, records = hosts_with_a_holder(50)
    state_gauges = StateGauges(["gpu"])
    state_gauges.update(records, before={})
    assert state_gauges.state_counts(ledger).devices == {("gpu", "held"): 50}
    ledger.looks = 0
    assert state_gauges.state_counts(ledger).devices == {("gpu", "held"): 50}
    assert ledger.looks == 0
    [one] = [each for each in records.values() if each.host == "h7"]
    state_gauges.update({one.key: structs.replace(one, state="ended")}, before={one.key: one})
    assert state_gauges.state_counts(ledger).devices == {("gpu", "held"): 49, ("gpu", "free"): 1}
    assert ledger.looks == 1


def test_many_hosts_are_counted_anew_in_parts_before_a_scrape_comes_upon_them() -> None:
    ledger, records = hosts_with_a_holder(5 * gauges.AT_ONCE + 1)
    state_gauges = StateGauges(["gpu"])
    state_gauges.update(records, before={})
    turns, more = 0, True
    while more:
        ledger.looks = 0
        more = state_gauges.catch_up(ledger)
        turns += 1
        assert ledger.looks <= gauges.AT_ONCE
    assert turns == 5
    ledger.looks = 0
    assert state_gauges.state_counts(ledger).devices == {("gpu", "held"): len(records)}
    assert ledger.looks <= gauges.AT_ONCE


class _Name(str):
    """A host's name that can be asked after."""


def test_nothing_is_kept_of_a_host_that_is_forgotten() -> None:
    """In cluster scope hosts come and go for as long as a manager runs."""
    state_gauges, host = StateGauges(["gpu"]), _Name("gone")
    granted = structs.replace(record("a", "allocated", "D1"), host=host)
    remembered = reported(device("D1"), host=host)
    state_gauges.update({granted.key: granted}, before={})
    assert state_gauges.state_counts(remembered).devices["gpu", "held"] == 1
    ended = structs.replace(granted, state="ended")
    state_gauges.update({granted.key: ended}, before={granted.key: granted})
    state_gauges.update({granted.key: None}, before={granted.key: ended})
    remembered.forget(host)
    assert not state_gauges.state_counts(remembered).devices
    kept = weakref.ref(host)
    del granted, ended, remembered, host
    gc.collect()
    assert kept() is None


async def test_the_gauges_show_a_grant_only_when_it_is_committed(bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(2)) as manager:
        manager.metrics.show(manager.processor.state_counts)
        await manager.say(register("first", gpu=1))
        await manager.state("first", "allocated")
        await manager.reported()
        deciding, go = anyio.Event(), anyio.Event()

        async def hold(point: str) -> None:
            if point == "commit:before":
                deciding.set()
                await go.wait()

        def shown() -> list[float]:
            devices = [manager.metric("outfitter_devices", resource="gpu", state=state) for state in ("held", "free")]
            return [*devices, manager.metric("outfitter_allocations", resource="gpu", state="allocated")]

        bus.script = hold
        await manager.say(register("second", gpu=1), deregister("first"), register("third", gpu=1))
        await deciding.wait()
        await anyio.wait_all_tasks_blocked()  # what follows is decided meanwhile
        assert shown() == [1, 1, 1]
        go.set()
        await manager.state("third", "allocated")
        await manager.reported()
        assert shown() == [2, 0, 2]


def test_what_several_processors_show_together_is_the_sum_and_of_ages_the_highest() -> None:
    parts = [
        StateCounts(
            devices=Counter({("gpu", "free"): n}),
            healthy=Counter({"gpu": n}),
            blocked=Counter({("gpu", "unhealthy"): n}),
            models=Counter({("gpu", "A100", "free"): n}),
            allocations=Counter({("gpu", "allocated"): n}),
            pending=Counter({("gpu", "busy"): n}),
            watched_owners=n,
            leases=n,
            records=n,
            lag=n,
            oldest_unanswered_s=n,
        )
        for n in (1, 2)
    ]
    assert StateCounts.together(parts) == StateCounts(
        devices=Counter({("gpu", "free"): 3}),
        healthy=Counter({"gpu": 3}),
        blocked=Counter({("gpu", "unhealthy"): 3}),
        models=Counter({("gpu", "A100", "free"): 3}),
        allocations=Counter({("gpu", "allocated"): 3}),
        pending=Counter({("gpu", "busy"): 3}),
        watched_owners=3,
        leases=3,
        records=3,
        lag=3,
        oldest_unanswered_s=2,
    )
    assert StateCounts.together([]) == StateCounts(devices=Counter(), allocations=Counter(), pending=Counter())

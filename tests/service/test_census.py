"""The gauges of state: counted commit by commit, of what is committed and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from functools import cache

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from outfitter_proto.records import Allocation, AllocationState, Health, ReasonCode, ResolvedRequest, Source
from outfitter_service.core.book import HostBook, Inventory
from outfitter_service.core.model import KnownDevice
from outfitter_service.metrics import Standing
from outfitter_service.runtime.census import OTHER, Census
from service.conftest import Serve
from support.faulty_bus import FaultyBus
from support.house import deregister, register, static
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


def book(*devices: KnownDevice) -> HostBook:
    found = HostBook("h")
    found.set_inventory("gpu", Inventory.of(devices))
    return found


def device(name: str, health: Health = Health.HEALTHY, *aliases: str) -> KnownDevice:
    return KnownDevice(id=name, health=health, aliases=aliases, properties={})


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
    census = Census(["gpu", "fpga"])
    now: dict[str, Allocation] = {}
    for changed in history:
        census.take(changed, before={key: now[key] for key in changed if key in now})
        now |= {key: one for key, one in changed.items() if one is not None}
        now = {key: one for key, one in now.items() if changed.get(key, one) is not None}
    told = census.standing([book(*[device(f"D{n}") for n in range(4)])])
    assert told.allocations == Counter((name, one.state) for one in now.values() for name in one.request.amounts)
    assert told.pending == Counter(
        (name, one.reason_code) for one in now.values() if one.state == "pending" for name in one.request.amounts
    )
    held = {info["id"] for one in now.values() for infos in one.resources.values() for info in infos}
    assert (told.devices["gpu", "held"], told.devices["gpu", "free"]) == (len(held), 4 - len(held))


@pytest.mark.parametrize("anew", [{}, {"b": record("b", "allocated", "D0")}], ids=["nothing", "another holder"])
def test_a_replay_begins_with_nothing_of_what_was_counted(anew: dict[str, Allocation]) -> None:
    census = Census(["gpu"])
    census.take({"a": record("a", "allocated", "D0", "D1")}, before={})
    assert census.replay(anew) == []
    told = census.standing([book(device("D0"), device("D1"))])
    assert (told.records, told.devices["gpu", "held"]) == (len(anew), len(anew))


def test_a_device_is_held_under_any_of_its_names_and_counts_by_its_health_else() -> None:
    census = Census(["gpu"])
    other = record("b", "allocated", "G2")
    census.take({"a": record("a", "allocated", "old", aliases=["0000:01:00.0"]), "b": other}, before={})
    known = [
        device("G0", Health.HEALTHY, "0000:01:00.0"), device("G1"), device("G2", Health.UNHEALTHY),
        device("G3", Health.UNHEALTHY), device("G4", Health.UNKNOWN),
    ]  # fmt: skip
    told = census.standing([book(*known)])
    assert told.devices == {
        ("gpu", "held"): 2, ("gpu", "free"): 1, ("gpu", "unhealthy"): 1, ("gpu", "unknown"): 1,
    }  # fmt: skip


def test_a_report_that_changes_names_or_health_is_seen() -> None:
    census = Census(["gpu"])
    census.take({"a": record("a", "allocated", "other")}, before={})
    found = book(device("Z0"))

    def shown() -> dict[str, int]:
        devices = census.standing([found]).devices
        return {state: count for (resource, state), count in devices.items() if resource == "gpu" and count}

    assert shown() == {"free": 1}
    found.set_inventory("gpu", Inventory.of((device("Z0", Health.UNKNOWN),)))
    assert shown() == {"unknown": 1}
    # another resource's driver knows that it is the device that somebody has
    found.set_inventory("nic", Inventory.of((device("N0", Health.HEALTHY, "Z0", "other"),)))
    assert shown() == {"held": 1}
    found.set_inventory("nic", Inventory.of((device("N0"),)))
    assert shown() == {"unknown": 1}


def test_resources_that_workers_make_up_share_one_label() -> None:
    census = Census(["gpu"])
    census.take({name: record(name, "failed", resource=f"made-up-{name}") for name in "abc"}, before={})
    told = census.standing([])
    assert told.allocations == {(OTHER, "failed"): 3}
    census.replay({"a": record("a", "allocated", "D0", resource="no-longer-configured")})
    assert census.standing([]).allocations == {("no-longer-configured", "allocated"): 1}


class _Name(str):
    """A host's name that can be asked after."""


def test_nothing_is_kept_of_a_host_that_is_forgotten() -> None:
    """In cluster scope hosts come and go for as long as a manager runs."""
    census, host = Census(["gpu"]), _Name("gone")
    granted = structs.replace(record("a", "allocated", "D1"), host=host)
    remembered = HostBook(host)
    remembered.set_inventory("gpu", Inventory.of((device("D1"),)))
    census.take({granted.key: granted}, before={})
    assert census.standing([remembered]).devices["gpu", "held"] == 1
    ended = structs.replace(granted, state="ended")
    census.take({granted.key: ended}, before={granted.key: granted})
    census.take({granted.key: None}, before={granted.key: ended})
    assert not census.standing([]).devices
    kept = weakref.ref(host)
    del granted, ended, remembered, host
    gc.collect()
    assert kept() is None


async def test_the_gauges_show_a_grant_only_when_it_is_committed(bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(2)) as house:
        house.metrics.show(house.processor.standing)
        await house.say(register("first", gpu=1))
        await house.state("first", "allocated")
        await house.told()
        deciding, go = anyio.Event(), anyio.Event()

        async def hold(point: str) -> None:
            if point == "commit:before":
                deciding.set()
                await go.wait()

        def shown() -> list[float]:
            devices = [house.metric("outfitter_devices", resource="gpu", state=state) for state in ("held", "free")]
            return [*devices, house.metric("outfitter_allocations", resource="gpu", state="allocated")]

        bus.script = hold
        await house.say(register("second", gpu=1), deregister("first"), register("third", gpu=1))
        await deciding.wait()
        await anyio.wait_all_tasks_blocked()  # what follows is decided meanwhile
        assert shown() == [1, 1, 1]
        go.set()
        await house.state("third", "allocated")
        await house.told()
        assert shown() == [2, 0, 2]


def test_what_several_processors_show_together_is_the_sum_and_of_ages_the_highest() -> None:
    parts = [
        Standing(
            devices=Counter({("gpu", "free"): n}),
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
    assert Standing.together(parts) == Standing(
        devices=Counter({("gpu", "free"): 3}),
        allocations=Counter({("gpu", "allocated"): 3}),
        pending=Counter({("gpu", "busy"): 3}),
        watched_owners=3,
        leases=3,
        records=3,
        lag=3,
        oldest_unanswered_s=2,
    )
    assert Standing.together([]) == Standing(devices=Counter(), allocations=Counter(), pending=Counter())

"""Devices whose ids change: while somebody holds one under a name that is reported no longer, those that are new are
held back, since any of them may be it. Those that were known before are lent as always."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET, structs

from outfitter_proto.records import Host, ManagerIdentity
from outfitter_service.core import model as m
from outfitter_service.core.state import held_back_devices
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord
from support.core.core_driver import HOST, START, CoreDriver, asks, device, ill

GPU = m.ResourceSpec(name="gpu", amount=1)
SCRIPT = m.ResourceSpec(name="gpu", amount=1, on_demand=True)
CARD = m.ResourceSpec(name="card", amount=1)
LICENCE = m.ResourceSpec(name="licence", amount=1)
MONITOR = m.ResourceSpec(name="gpu", amount=1, shared=True)


def restarted(core: CoreDriver, *specs: m.ResourceSpec, **rules: Any) -> CoreDriver:
    """The core after a restart with these resources: from the ledger alone, the host announced as a manager does it."""
    ledger = Ledger()
    for record in core.ledger.allocations.values():
        ledger.restore(PutAllocation(record.key, record))
    ledger.restore(PutRecord(core.host_state.record))
    ledger.resume(commit=core.ledger.commits, token=core.ledger.token)
    again = CoreDriver(*specs or core.rules.specs.values(), ledger=ledger, **rules)
    again.now, again.offset = core.now, core.offset
    again.announce()
    again.say(m.Reschedule(host=HOST))
    return again


def lent(*specs: m.ResourceSpec, devices: tuple[str, ...] = ("gpu:0", "gpu:1"), workers: int = 1) -> CoreDriver:
    """Workers w1, w2, … have the first devices of `gpu`."""
    core = CoreDriver(*specs or (GPU,))
    core.report(*devices)
    for number in range(1, workers + 1):
        core.register(f"w{number}", 1)
    if core.rules.specs["gpu"].on_demand:
        core.report(*devices, asked=len(devices))
    assert len(core.host_state.holders.live) == workers
    return core


def healths(core: CoreDriver, resource: str = "gpu") -> dict[str, str]:
    return {one.id: one.health for one in core.host_state.record.resources[resource].devices}


SUSPECT = "h/w1/1 holds gpu:0 of gpu, which is no longer reported"


def test_devices_under_new_ids_are_held_back_while_one_is_held_under_its_old_id() -> None:
    core = restarted(lent())
    core.report("GPU-a", "GPU-b")
    assert healths(core) == {"GPU-a": "unknown", "GPU-b": "unknown"}
    assert core.host_state.record.resources["gpu"].healthy == 0
    assert core.host_state.record.resources["gpu"].devices[0].reason == f"held back: {SUSPECT} and may be this device"
    waiter = core.register("w2", 1)
    assert (waiter.state, waiter.reason_code) == ("pending", "infeasible")
    assert waiter.reason == (
        "1 gpu requested, 0 of 2 healthy; granted when enough are healthy again; "
        f"2 held back: {SUSPECT} and may be one of these devices"
    )


def test_it_ends_at_once_when_the_last_such_holder_has_ended() -> None:
    core = restarted(lent(workers=2))
    core.report("GPU-a", "GPU-b")
    core.register("w3", 1)
    core.deregister("w1")
    assert core.state("w3") == "pending"
    assert "h/w2/1 holds gpu:1" in core["w3"].reason
    core.deregister("w2")
    assert core.has("w3") == ["GPU-a"]
    assert healths(core) == {"GPU-a": "healthy", "GPU-b": "healthy"}
    assert core.host_state.record.resources["gpu"].known is UNSET
    assert not core.host_state.devices.suspects


def test_it_goes_on_while_a_driver_has_not_released_the_device() -> None:
    core = restarted(lent(m.ResourceSpec(name="gpu", confirms=True)))
    core.report("GPU-a")
    core.register("w2", 1)
    core.deregister("w1")
    assert (core.state("w1"), core.state("w2")) == ("releasing", "pending")
    core.say(m.Unprepared(allocation="h/w1/1", token=1, confirmed=True))
    assert core.has("w2") == ["GPU-a"]


@pytest.mark.parametrize("restarts", [1, 2])
def test_what_is_held_back_stays_so_over_further_restarts(restarts: int) -> None:
    core = restarted(lent())
    core.report("GPU-a", "GPU-b")
    for _ in range(restarts):
        core = restarted(core)
    core.report("GPU-a", "GPU-b")
    assert core.register("w2", 1).state == "pending"


def test_a_restart_before_any_report_forgets_nothing() -> None:
    core = restarted(restarted(lent(devices=("gpu:0", "GPU-b"))))
    core.report("GPU-a", "GPU-b")
    assert healths(core) == {"GPU-a": "unknown", "GPU-b": "healthy"}


def test_ids_that_change_without_a_restart_are_no_different() -> None:
    core = lent()
    core.report()
    core.report("GPU-a", "GPU-b")
    assert core.register("w2", 1).state == "pending"


def test_a_device_that_falls_off_the_bus_while_it_is_held_blocks_no_other() -> None:
    core = lent(devices=("a", "b", "c"))
    core.report("b", "c")
    assert core.register("w2", 1).state == "allocated"
    core.report("c")
    core = restarted(core)
    core.report("b", "c")
    assert core.register("w3", 1).state == "allocated"


def test_devices_that_vanish_and_come_back_beside_a_missing_one_are_known() -> None:
    core = lent(devices=("a", "b", "c"))
    core.report("c")
    core.report()
    core = restarted(core)
    core.report("b", "c", "new")
    assert healths(core) == {"b": "healthy", "c": "healthy", "new": "unknown"}
    waiter = core.register("w2", 3)
    assert "1 held back" in waiter.reason


def test_a_worker_that_waits_for_known_devices_is_told_how_many_are_held_back() -> None:
    core = restarted(lent(devices=("gpu:0", "GPU-b")))
    core.report("GPU-a", "GPU-b")
    core.register("w2", 1)
    waiter = core.register("w3", 1)
    assert waiter.reason_code == "busy"
    assert waiter.reason == f"waits for 1 gpu: 0 of 2 free; 1 held back: {SUSPECT} and may be one of these devices"


def test_devices_that_are_new_while_all_that_is_held_is_reported_are_lent() -> None:
    core = restarted(lent())
    core.report("gpu:0", "gpu:1", "gpu:2")
    assert healths(core)["gpu:2"] == "healthy"
    core.report("gpu:1", "gpu:2")
    assert core.register("w2", 2).state == "allocated"


def test_new_ids_that_the_driver_connects_with_the_old_ones_are_not_held_back() -> None:
    core = restarted(lent())
    core.report(device("GPU-a", aliases=("gpu:0",)), "GPU-b")
    assert core.register("w2", 1).state == "allocated"
    assert core.register("w3", 1).state == "pending"


def test_an_old_id_that_another_driver_connects_is_no_less_connected() -> None:
    core = restarted(lent(GPU, CARD), GPU, CARD)
    core.report(device("PCI-0", aliases=("gpu:0", "GPU-a")), resource="card")
    core.report("GPU-a", "GPU-b")
    assert core.register("w2", 1).state == "allocated"


def test_a_report_that_names_the_old_id_again_frees_the_others() -> None:
    core = restarted(lent())
    core.report("GPU-a", "GPU-b")
    core.register("w2", 1)
    core.report(device("GPU-a", aliases=("gpu:0",)), "GPU-b")
    assert core.has("w2") == ["GPU-b"]


def test_an_ill_device_that_is_held_back_says_what_it_has_and_stays_so_when_it_is_well() -> None:
    core = restarted(lent())
    core.report(ill("GPU-a"), "GPU-b")
    assert healths(core) == {"GPU-a": "unhealthy", "GPU-b": "unknown"}
    core.report("GPU-a", "GPU-b")
    assert core.register("w2", 1).state == "pending"


# --- resources that are renamed, or new ----------------------------------------------------------------


def test_a_resource_that_is_renamed_is_held_back_while_a_holder_of_the_old_one_lives() -> None:
    core = restarted(lent(), CARD)
    core.report("card:0", "card:1", resource="card")
    core.register("w2", resources=asks(card=1))
    assert core.state("w2") == "pending"
    core = restarted(restarted(core))
    core.report("card:0", "card:1", resource="card")
    assert core.state("w2") == "pending"
    core.deregister("w1")
    assert core.has("w2", "card") == ["card:0"]


@pytest.mark.parametrize("state", [m.SpecState.DISABLED, m.SpecState.MISCONFIGURED, m.SpecState.NO_DRIVER])
def test_a_resource_that_is_not_in_effect_any_more_counts_as_gone(state: m.SpecState) -> None:
    core = restarted(lent(), m.ResourceSpec(name="gpu", state=state), CARD)
    core.report("card:0", resource="card")
    assert core.register("w2", resources=asks(card=1)).state == "pending"
    core = restarted(core, GPU, CARD)
    core.report("gpu:0", "gpu:1")
    core.report("card:0", resource="card")
    assert healths(core) == {"gpu:0": "healthy", "gpu:1": "healthy"}
    assert core.state("w2") == "allocated"


def test_a_resource_that_is_renamed_and_keeps_its_ids_is_lent_but_for_what_is_held() -> None:
    core = restarted(lent(), CARD)
    core.report("gpu:0", "gpu:1", resource="card")
    assert core.register("w2", resources=asks(card=1)).state == "allocated"
    assert core.register("w3", resources=asks(card=1)).state == "pending"


def test_what_another_resource_knew_before_is_lent_while_a_holder_of_one_that_is_gone_lives() -> None:
    core = lent(GPU, LICENCE)
    core.report("l0", resource="licence")
    core = restarted(core, CARD, LICENCE)
    core.report("l0", "l1", resource="licence")
    assert healths(core, "licence") == {"l0": "healthy", "l1": "unknown"}


def test_new_devices_of_another_resource_are_lent_while_a_device_is_missing_from_its_own() -> None:
    core = lent(GPU, LICENCE)
    core.report("l0", resource="licence")
    core.report("gpu:1")
    core.report("l0", "l1", resource="licence")
    assert healths(core, "licence") == {"l0": "healthy", "l1": "healthy"}


@pytest.mark.parametrize("order", ["gpu first", "card first"])
def test_a_resource_that_is_split_is_held_back_in_both_parts(order: str) -> None:
    core = restarted(lent(devices=("0", "1", "2")), GPU, CARD)
    reports = [("gpu", "GPU-b"), ("card", "GPU-a")]
    for resource, name in reports if order == "gpu first" else reversed(reports):
        core.report(name, resource=resource)
    assert core.register("w2", resources=asks(card=1)).state == "pending"
    assert core.register("w3", resources=asks(gpu=1)).state == "pending"


def test_a_resource_that_is_split_by_ids_that_stay_is_lent() -> None:
    core = restarted(lent(devices=("0", "1", "2")), GPU, CARD)
    core.report("1", resource="card")
    assert core.register("w2", resources=asks(card=1)).state == "pending"  # gpu's driver may yet say that 0 is 1
    core.report("0", "2")
    assert core.state("w2") == "allocated"


# --- drivers that are asked on demand ------------------------------------------------------------------


def test_a_script_that_is_replaced_by_the_built_in_discovery_is_held_back() -> None:
    core = restarted(lent(SCRIPT, devices=("gpu:0",)), GPU)
    core.report("GPU-a", "GPU-b")
    assert core.register("w2", 1).state == "pending"


def test_a_script_in_place_of_an_inventory_is_held_back_over_restarts() -> None:
    core = restarted(lent(devices=("GPU-a", "GPU-b")), SCRIPT)
    core.register("w2", 1)
    core.report("gpu:0", "gpu:1", asked=2)
    assert core.state("w2") == "pending"
    core = restarted(core)
    core.report("gpu:0", "gpu:1", asked=2)
    assert core.state("w2") == "pending"
    core.deregister("w1")
    assert core.has("w2") == ["gpu:0"]


def test_a_script_names_other_devices_each_time_and_none_of_them_is_new() -> None:
    core = restarted(lent(SCRIPT, devices=("gpu:0",)))
    core.report("gpu:1", asked=2)
    assert core.register("w2", 1).state == "pending"  # its driver is asked again for it
    core.report("gpu:1", asked=2)
    assert core.has("w2") == ["gpu:1"]


def test_a_script_of_a_renamed_resource_is_held_back() -> None:
    core = restarted(lent(SCRIPT, devices=("gpu:0",)), m.ResourceSpec(name="card", on_demand=True))
    core.register("w2", resources=asks(card=1))
    core.report("card:0", resource="card", asked=1)
    assert core.state("w2") == "pending"
    assert not [one for said in core.decisions[-1:] for one in said.commands], "it is asked again and again"
    core.deregister("w1")
    assert core.has("w2", "card") == ["card:0"]


def test_a_resource_is_new_beside_a_script_whose_devices_are_held_and_is_lent() -> None:
    core = restarted(lent(SCRIPT, devices=("gpu:0",)), SCRIPT, CARD)
    core.report("card:0", resource="card")
    assert core.register("w2", resources=asks(card=1)).state == "allocated"


# --- devices that are shared ---------------------------------------------------------------------------


def test_what_several_share_holds_back_nothing_that_several_share() -> None:
    core = restarted(lent(MONITOR))
    core.report("GPU-a")
    assert core.register("w2", 1).state == "allocated"


def test_what_somebody_has_alone_holds_back_what_several_would_share() -> None:
    core = restarted(lent(), MONITOR)
    core.report("GPU-a")
    assert core.register("w2", 1).state == "pending"


def test_what_several_share_holds_back_what_one_would_have_alone() -> None:
    core = restarted(lent(MONITOR), GPU)
    core.report("GPU-a")
    assert core.register("w2", 1).state == "pending"


@pytest.mark.parametrize("turns", [[GPU], [GPU, MONITOR, GPU], [MONITOR, GPU], [CARD, GPU]], ids=str)
def test_what_several_share_is_lent_to_nobody_alone_although_its_id_changed_before_the_resource_was_exclusive(
    turns: list[m.ResourceSpec],
) -> None:
    core = lent(MONITOR, devices=("gpu:0",))
    core.report("GPU-a")
    for spec in turns:
        core = restarted(core, spec)
        if spec != CARD:
            core.report("GPU-a")
    waiting = core.register("w2", 1)
    assert waiting.state == "pending"
    assert "1 held back: h/w1/1 holds gpu:0 of gpu, which is no longer reported" in waiting.reason
    core.deregister("w1")
    assert core.has("w2") == ["GPU-a"]


def test_a_new_device_that_somebody_shares_meanwhile_stays_new() -> None:
    core = lent(MONITOR, devices=("gpu:0",))
    core.report("GPU-a")
    core.register("w2", 1)
    assert core.has("w2") == ["GPU-a"]
    core = restarted(core, GPU)
    core.report("GPU-a")
    assert core.register("w3", 1).state == "pending"
    core.deregister("w2")
    assert core.state("w3") == "pending"
    core.deregister("w1")
    assert core.has("w3") == ["GPU-a"]


def test_devices_that_were_known_before_a_sharers_device_went_missing_are_lent_when_they_are_exclusive() -> None:
    core = CoreDriver(MONITOR)
    core.report("gpu:0", ill("gpu:1"))
    core.register("w1", 1)
    core.report("gpu:1")
    core = restarted(core, GPU)
    core.report("gpu:1")
    core.register("w2", 1)
    assert core.has("w2") == ["gpu:1"]


@pytest.mark.parametrize("first", ["gpu", "card"])
def test_what_several_share_is_lent_to_nobody_alone_by_another_resource_that_shows_it(first: str) -> None:
    """Both drivers call it otherwise, one after the other."""
    core = CoreDriver(MONITOR, CARD)
    for resource in ("gpu", "card"):
        core.report("gpu:0", resource=resource)
    core.register("w1", 1)
    for resource in (first, "card" if first == "gpu" else "gpu"):
        core.report("GPU-a", resource=resource)
    assert core.register("w2", resources=asks(card=1)).state == "pending"
    core.deregister("w1")
    assert core.state("w2") == "allocated"


def test_an_earlier_versions_record_of_a_sharers_missing_device_holds_back_what_is_exclusive_now() -> None:
    """It called the new names known, and forgot the old ones."""
    core = lent(MONITOR, devices=("gpu:0",))
    core.report("GPU-a")
    record = core.host_state.record
    gpu = structs.replace(record.resources["gpu"], known=UNSET)
    core.ledger.change(PutRecord(structs.replace(record, resources={"gpu": gpu})))
    core = restarted(core, GPU)
    core.report("GPU-a")
    assert core.register("w2", 1).state == "pending"


# --- what the ledger keeps -----------------------------------------------------------------------------


def test_a_host_whose_devices_are_all_known_keeps_nothing_of_it() -> None:
    core = lent(GPU, CARD)
    assert core.host_state.record.resources["gpu"].known is UNSET
    assert core.host_state.record.resources["card"].known is UNSET
    core = restarted(core)
    assert core.host_state.record.resources["gpu"].known == ["gpu:0", "gpu:1"]
    core.report("gpu:0", "gpu:1")
    assert core.host_state.record.resources["gpu"].known is UNSET


def test_a_device_that_is_held_and_not_listed_is_not_new() -> None:
    core = CoreDriver()
    core.report(*(f"{number:04}" for number in range(300)))
    core.register("w1", 1)
    core.register("w2", 299)
    core.report(*(f"{number:04}" for number in range(1, 300)))
    core = restarted(core)
    core.report(*(f"{number:04}" for number in range(1, 300)))
    assert "unknown" not in {one.health for one in core.host_state.devices.inventories["gpu"].devices}


def test_a_failed_driver_that_reports_at_last_is_compared_with_what_was_known() -> None:
    core = restarted(lent(devices=("gpu:0", "GPU-b")))
    core.fail("no such program")
    core.report("GPU-a", "GPU-b")
    assert healths(core) == {"GPU-a": "unknown", "GPU-b": "healthy"}


def test_a_host_without_a_record_holds_back_what_it_cannot_know() -> None:
    core = restarted(lent())
    manager = ManagerIdentity(instance="two", version="0", since=START)
    core.ledger.change(PutRecord(Host(host=HOST, manager=manager, since=START)))
    core.report("GPU-a")
    assert core.register("w2", 1).state == "pending"


def test_a_report_of_more_devices_asks_for_no_holders_while_nobodys_device_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host may have 10,000 holders, and one who plugs devices in must not stop it."""
    core = lent()
    monkeypatch.setattr(held_back_devices, "_HeldBackCheck", None)
    core.report("gpu:0", "gpu:1", "gpu:2")
    assert healths(core) == {"gpu:0": "healthy", "gpu:1": "healthy", "gpu:2": "healthy"}


def test_a_report_of_more_devices_holds_them_back_while_a_device_of_a_removed_resource_is_missing() -> None:
    core = lent(GPU, CARD)
    core.report("card:0", resource="card")
    core = restarted(core, CARD)
    core.report("card:0", resource="card")
    assert healths(core, "card") == {"card:0": "healthy"}
    core.report("card:0", "card:1", resource="card")
    assert healths(core, "card") == {"card:0": "healthy", "card:1": "unknown"}

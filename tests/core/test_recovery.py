"""A device that was ill is lent only after it has been well for a stated time; see core/state/recovery.py."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

from outfitter_proto.codec import encode
from outfitter_proto.records import MAX_LISTED_DEVICES, Health, ReasonCode
from outfitter_service.core import model as m
from outfitter_service.core.hosts import fitting
from outfitter_service.core.state import recovery
from outfitter_service.core.state.ledger import PutRecord
from support.core.core_driver import CoreDriver, device, ill, restarted

AFTER_S = 30
GPU = m.ResourceSpec(name="gpu", min_healthy_s=AFTER_S)
HEALTHY, UNHEALTHY = Health.HEALTHY, Health.UNHEALTHY


def core_with(*devices: str | m.KnownDevice, spec: m.ResourceSpec = GPU, **rules: object) -> CoreDriver:
    core = CoreDriver(spec, **rules)
    core.report(*devices)
    return core


def shown(core: CoreDriver, resource: str = "gpu") -> dict[str, tuple[str, str | None]]:
    """The health of each device in the host's record, and why."""
    return {each.id: (each.health, each.reason) for each in core.host_state.record.resources[resource].devices}


def heal_after(core: CoreDriver, seconds: float) -> None:
    core.now += timedelta(seconds=seconds)
    core.report("a")


def test_a_device_is_lent_at_once_where_nobody_has_seen_it_ill() -> None:
    core = core_with("a")
    core.register("w", 1)
    assert core.has("w") == ["a"]


def test_who_waits_gets_a_device_that_was_ill_only_after_it_was_well_for_the_stated_time() -> None:
    core = core_with(ill("a"))
    core.register("w", 1)
    heal_after(core, 5)
    assert core.state("w") == "pending"
    core.pass_time(AFTER_S - 1)
    assert core.state("w") == "pending"
    core.pass_time(1)
    assert core.has("w") == ["a"]
    assert shown(core) == {"a": (HEALTHY, None)}
    assert core.host_state.record.resources["gpu"].unwell is UNSET


def test_who_comes_meanwhile_waits_and_is_told_from_when_on() -> None:
    core = core_with(ill("a"))
    heal_after(core, 5)
    waiting = core.register("w", 1)
    assert waiting.reason_code == ReasonCode.INFEASIBLE
    assert waiting.reason == (
        "1 gpu requested, 0 of 1 healthy; granted when enough are healthy again; 1 well again, lent from "
        "2026-01-01 00:00:35 UTC on"
    )
    assert shown(core)["a"] == (
        Health.UNKNOWN,
        "it was not well, and is lent from 2026-01-01 00:00:35 UTC on if it stays well",
    )


def test_time_alone_writes_nothing_before_it_is_over() -> None:
    core = core_with(ill("a"))
    core.register("w", 1)
    heal_after(core, 5)
    for _ in range(AFTER_S - 1):
        assert core.pass_time(1).changes == []
    assert core.pass_time(1).changes != []


def test_a_device_that_is_ill_and_well_in_turns_is_lent_to_nobody() -> None:
    core = core_with(ill("a"))
    core.register("w", 1)
    for _ in range(20):
        heal_after(core, 5)
        core.pass_time(AFTER_S - 1)
        core.report(ill("a"))
        assert core.state("w") == "pending"
    heal_after(core, 5)
    core.pass_time(AFTER_S)
    assert core.has("w") == ["a"]


@pytest.mark.parametrize("health", [Health.UNHEALTHY, Health.UNKNOWN])
def test_one_device_that_was_ill_keeps_back_no_other(health: Health) -> None:
    core = core_with(device("a", health=health, reason="hot"), "b")
    core.report("a", "b")
    core.register("w", 1)
    assert core.has("w") == ["b"]


def test_a_driver_that_could_not_be_asked_for_long_has_been_ill_and_one_that_failed_once_was_not() -> None:
    core = core_with("a")
    core.fail("no answer")
    core.report("a")
    core.register("w", 1)
    assert core.has("w") == ["a"]
    core.deregister("w")
    core.be_silent(device("a", health=Health.UNKNOWN, reason="its driver has not answered"))
    core.report("a")
    core.register("v", 1)
    assert core.state("v") == "pending"
    core.pass_time(AFTER_S)
    assert core.has("v") == ["a"]


def test_whoever_holds_the_device_is_told_at_once_that_it_is_well() -> None:
    core = core_with("a")
    core.register("w", 1)
    core.report(ill("a"))
    assert core["w"].resources["gpu"][0]["health"] == UNHEALTHY
    core.report("a")
    assert "health" not in core["w"].resources["gpu"][0]
    assert core.state("w") == "allocated"
    core.deregister("w")
    core.register("v", 1)
    assert core.state("v") == "pending"


def test_an_ill_device_that_is_away_for_a_while_was_still_ill() -> None:
    core = core_with(ill("a"), "b")
    core.report("b")
    core.report("a", "b")
    core.register("w", 2)
    assert core.state("w") == "pending"
    core.pass_time(AFTER_S)
    assert core.state("w") == "allocated"


def test_a_well_device_that_is_away_for_a_while_is_lent_at_once() -> None:
    core = core_with("a", "b")
    core.report("b")
    core.report("a", "b")
    core.register("w", 2)
    assert core.state("w") == "allocated"


def test_of_ill_devices_that_are_away_only_some_are_remembered() -> None:
    core = core_with(*[ill(str(number)) for number in range(500)])
    core.report("a")
    assert len(core.host_state.record.resources["gpu"].unwell) == recovery.MOST_MISSING


def test_a_device_that_gets_another_id_by_an_alias_was_ill_all_the_same() -> None:
    core = core_with(ill("0"))
    core.report(device("GPU-0", aliases=("0",)))
    core.register("w", 1)
    assert core.state("w") == "pending"


def test_an_on_demand_drivers_devices_are_lent_at_once() -> None:
    core = core_with(ill("a"), spec=structs.replace(GPU, on_demand=True))
    core.report("a", asked=1)
    assert shown(core) == {"a": (HEALTHY, None)}


# --- restarts -----------------------------------------------------------------------------------------------


def test_a_restart_forgets_no_illness() -> None:
    again = restarted(core_with(ill("a")))
    again.report("a")
    again.register("w", 1)
    assert again.state("w") == "pending"
    again.pass_time(AFTER_S)
    assert again.has("w") == ["a"]


def test_restarts_begin_no_time_anew() -> None:
    core = core_with(ill("a"))
    core.register("w", 1)
    heal_after(core, 0)
    for _ in range(AFTER_S // 10):
        assert core.state("w") == "pending"
        core.now += timedelta(seconds=10)
        core = restarted(core)
        core.report("a")
    assert core.has("w") == ["a"]


def test_a_restart_after_the_time_lends_the_device_at_once() -> None:
    core = core_with(ill("a"))
    heal_after(core, 1)
    core.now += timedelta(seconds=AFTER_S)
    again = restarted(core)
    again.report("a")
    again.register("w", 1)
    assert again.has("w") == ["a"]


def test_an_illness_is_kept_through_a_restart_in_which_another_resource_reports_first() -> None:
    """…and after which the manager is killed once more, before the ill one's driver has said anything."""
    other = m.ResourceSpec(name="net")
    core = CoreDriver(GPU, other)
    core.report(ill("a"))
    again = restarted(core)
    again.report("n", resource="net")
    once_more = restarted(again)
    once_more.report("n", resource="net")
    once_more.report("a")
    once_more.register("w", 1)
    assert once_more.state("w") == "pending"


def test_a_device_behind_those_that_the_record_lists_is_remembered_as_well() -> None:
    many = [str(number) for number in range(MAX_LISTED_DEVICES + 5)]
    again = restarted(core_with(*many[:-1], ill(many[-1])))
    again.report(*many)
    again.register("w", len(many))
    assert again.state("w") == "pending"


def test_a_record_of_version_0_2_says_which_devices_were_ill() -> None:
    core = core_with(ill("a"), "b")
    record = core.host_state.record
    old = structs.replace(record.resources["gpu"], unwell=UNSET)
    core.ledger.change(PutRecord(structs.replace(record, resources={"gpu": old})))
    again = restarted(core)
    again.report("a", "b")
    again.register("w", 1)
    assert again.has("w") == ["b"]
    again.register("v", 1)
    assert again.state("v") == "pending"


def test_another_setting_counts_from_the_restart_on() -> None:
    core = core_with(ill("a"))
    heal_after(core, 1)
    shorter = restarted(core, configured=[structs.replace(GPU, min_healthy_s=5)])
    shorter.report("a")
    shorter.register("w", 1)
    assert shorter.state("w") == "pending"
    shorter.pass_time(5)
    assert shorter.has("w") == ["a"]
    none = restarted(core, configured=[structs.replace(GPU, min_healthy_s=0)])
    none.report("a")
    none.register("w", 1)
    assert none.has("w") == ["a"]


@pytest.mark.parametrize("days", [1, 300])
def test_a_clock_that_is_set_back_makes_nobody_wait_longer(days: int) -> None:
    core = core_with(ill("a"))
    core.register("w", 1)
    heal_after(core, 1)
    core.pass_time(-86_400 * days)
    core.pass_time(AFTER_S)
    assert core.has("w") == ["a"]


def test_a_host_record_without_room_forgets_some_of_them() -> None:
    core = core_with(*[ill(str(number) * 50) for number in range(1000)])
    (gpu,) = fitting(core.host_state.record.resources, 3000).values()
    assert 0 < len(gpu.unwell or {}) < 1000
    assert len(encode(gpu)) < 3000


# --- any history ----------------------------------------------------------------------------------------------


class Model:
    """When each device was last seen ill, and since when it has been well: the rule by its words alone."""

    def __init__(self) -> None:
        self.well_since: dict[str, datetime | None] = {}

    def report(self, healths: dict[str, Health], now: datetime) -> None:
        for name in self.well_since.keys() - healths.keys():
            since = self.well_since[name]
            if since is None or since > now - timedelta(seconds=AFTER_S):
                self.well_since[name] = None  # it went away before it was well for long enough
        for name, health in healths.items():
            if health != HEALTHY:
                self.well_since[name] = None
            elif name in self.well_since and self.well_since[name] is None:
                self.well_since[name] = now

    def may_be_lent(self, healths: dict[str, Health], now: datetime) -> set[str]:
        past = datetime.min.replace(tzinfo=UTC)
        soonest = now - timedelta(seconds=AFTER_S)
        return {
            name
            for name, health in healths.items()
            if health == HEALTHY and (since := self.well_since.get(name, past)) is not None and since <= soonest
        }


REPORT = st.dictionaries(st.sampled_from("abc"), st.sampled_from([*Health, HEALTHY, HEALTHY]), min_size=1)
STEP = st.tuples(st.sampled_from([0, 1, 10, AFTER_S - 1, AFTER_S]), st.one_of(REPORT, st.just("restart")))


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEP, max_size=12))
def test_whatever_happened_exactly_what_was_well_for_long_enough_can_be_lent(
    steps: list[tuple[int, dict[str, Health] | str]],
) -> None:
    core, model = CoreDriver(GPU), Model()
    now_named: dict[str, Health] = {}
    for seconds, step in steps:
        core.pass_time(seconds)
        if isinstance(step, dict):
            now_named = step
        else:
            core = restarted(core)
        core.report(*[device(name, health=health, reason=None) for name, health in now_named.items()])
        model.report(now_named, core.now)
        core.pass_time(0)
        lent = {each.id for each in core.host_state.devices.inventory("gpu").devices if each.health == HEALTHY}
        assert lent == model.may_be_lent(now_named, core.now)

"""Preparing, taking back, devices that change under their holders, and restarts with another configuration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from outfitter_proto.records import MAX_LISTED_DEVICES
from outfitter_service.core import model as m
from outfitter_service.core.decide import implied
from outfitter_service.core.state.ledger import Ledger, PutAllocation
from support.core_driver import CoreDriver, asks, device, ill

PREPARES = m.ResourceSpec(name="gpu", amount=1, prepares=True)
CONFIRMS = m.ResourceSpec(name="gpu", amount=1, confirms=True)
GPU = m.ResourceSpec(name="gpu", amount=1)


def prepared(desk: CoreDriver, worker: str, *, token: int = 1, error: str | None = None) -> None:
    desk.say(m.Prepared(allocation=f"h/{worker}/1", token=token, error=error))


def unprepared(desk: CoreDriver, worker: str, *, token: int = 1, confirmed: bool = True) -> None:
    desk.say(m.Unprepared(allocation=f"h/{worker}/1", token=token, confirmed=confirmed))


def test_a_driver_that_prepares_is_asked_to_before_the_worker_is_told_that_it_has_the_device() -> None:
    desk = CoreDriver(PREPARES)
    desk.report("a")
    assert desk.register("w", 1).state == "preparing"
    assert desk.decisions[-1].commands == [m.Prepare(allocation="h/w/1", token=1)]
    assert desk.has("w") == ["a"]
    prepared(desk, "w")
    assert desk.state("w") == "allocated"


def test_a_failed_prepare_is_taken_back_and_fails_the_worker_and_only_then_the_device_is_lent() -> None:
    desk = CoreDriver(PREPARES)
    desk.report("a")
    desk.register("w", 1)
    desk.register("next", 1)
    prepared(desk, "w", error="no such partition")
    assert (desk.state("w"), desk.state("next")) == ("releasing", "pending")
    assert desk.decisions[-1].commands == [m.Unprepare(allocation="h/w/1", token=1)]
    unprepared(desk, "w")
    assert (desk.state("w"), desk["w"].reason, desk["w"].outcome) == ("failed", "no such partition", None)
    assert (desk.state("next"), desk["next"].token) == ("preparing", 2)


@pytest.mark.parametrize("spec", [PREPARES, CONFIRMS])
def test_devices_whose_driver_takes_them_back_are_lent_only_after_it_did(spec: m.ResourceSpec) -> None:
    desk = CoreDriver(spec)
    desk.report("a")
    desk.register("w", 1)
    prepared(desk, "w")
    desk.register("next", 1)
    desk.deregister("w")
    assert (desk.state("w"), desk.state("next")) == ("releasing", "pending")
    unprepared(desk, "w")
    assert (desk.state("w"), desk["w"].reason_code) == ("ended", "deregistered")
    assert desk.has("next") == ["a"]


def test_a_worker_that_ends_while_its_devices_are_prepared_releases_them() -> None:
    desk = CoreDriver(PREPARES)
    desk.report("a")
    desk.register("w", 1)
    desk.die("w")
    assert desk.state("w") == "releasing"
    prepared(desk, "w")
    assert desk.state("w") == "releasing"
    unprepared(desk, "w")
    assert (desk.state("w"), desk["w"].reason_code) == ("ended", "owner-died")


def test_answers_with_another_token_change_nothing() -> None:
    desk = CoreDriver(PREPARES)
    desk.report("a")
    desk.register("w", 1)
    prepared(desk, "w", token=7)
    assert desk.state("w") == "preparing"
    desk.deregister("w")
    unprepared(desk, "w", token=7)
    assert desk.state("w") == "releasing"


def test_answers_about_unknown_allocations_change_nothing() -> None:
    desk = CoreDriver(PREPARES)
    prepared(desk, "w")
    unprepared(desk, "w")
    assert desk.ledger.allocations == {}


def test_a_second_end_while_releasing_changes_nothing() -> None:
    desk = CoreDriver(CONFIRMS)
    desk.report("a")
    desk.register("w", 1)
    desk.deregister("w")
    assert desk.deregister("w").changes == []
    assert desk.expire("w").changes == []


@pytest.mark.parametrize(
    ("confirmed", "told"), [(True, "released"), (False, "released (unconfirmed: no in-use check)")]
)
def test_history_says_whether_an_in_use_check_confirmed_the_release(confirmed: bool, told: str) -> None:
    desk = CoreDriver(CONFIRMS)
    desk.report("a")
    desk.register("w", 1)
    desk.deregister("w")
    unprepared(desk, "w", confirmed=confirmed)
    _, step = desk.decisions[-1].history[0]
    assert (step.explanation, step.confirmed) == (told, confirmed)


def test_a_record_implies_the_command_that_is_issued_again_after_a_restart() -> None:
    desk = CoreDriver(PREPARES)
    desk.report("a")
    assert implied(desk.register("w", 1)) == m.Prepare(allocation="h/w/1", token=1)
    prepared(desk, "w")
    assert implied(desk["w"]) is None
    desk.deregister("w")
    assert implied(desk["w"]) == m.Unprepare(allocation="h/w/1", token=1)


# --- devices that change under their holders -----------------------------------------------------------


def test_a_holder_is_told_that_its_device_fell_ill_and_that_it_healed_and_keeps_it() -> None:
    desk = CoreDriver(GPU)
    desk.report("a")
    granted = desk.register("w", 1)
    desk.report(ill("a", "ECC errors"))
    assert desk["w"].resources["gpu"][0]["health"] == "unhealthy"
    assert desk["w"].resources["gpu"][0]["health.reason"] == "ECC errors"
    assert (desk.state("w"), desk["w"].since) == ("allocated", granted.since)
    desk.report("a")
    assert desk["w"].resources == granted.resources


def test_a_holder_of_a_device_that_is_gone_is_told_that_its_health_is_unknown() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b")
    desk.register("w", 1)
    desk.report("b")
    assert desk["w"].resources["gpu"][0]["health"] == "unknown"
    assert desk.has("w") == ["a"]
    desk.report("a", "b")
    assert desk.register("next", 1).resources["gpu"][0]["id"] == "b"


def test_a_holder_of_shared_devices_is_told_of_changes_too() -> None:
    desk = CoreDriver(m.ResourceSpec(name="gpu", amount=1, shared=True))
    desk.report("a", "b")
    desk.register("w", 1)
    desk.report("a", ill("b"))
    assert [info.get("health") for info in desk["w"].resources["gpu"]] == [None, "unhealthy"]


def test_a_device_with_a_new_id_and_its_old_one_as_alias_keeps_the_id_it_was_granted_by() -> None:
    desk = CoreDriver(GPU)
    desk.report("0")
    desk.register("w", 1, operators={"o": asks(gpu=1)})
    desk.report(device("GPU-1", aliases=("0",)))
    assert desk.has("w") == ["0"]
    assert desk["w"].resources["gpu"][0]["index"] == "GPU-1"
    assert desk.register("next", 1).reason_code == "busy"


def test_many_holders_are_told_in_pieces() -> None:
    desk = CoreDriver(GPU, chunk=2)
    desk.report(*"abcdefg")
    for name in "abcdefg":
        desk.register(name, 1)
    desk.report(*(ill(name) for name in "abcdefg"))
    assert all(desk[name].resources["gpu"][0]["health"] == "unhealthy" for name in "abcdefg")


def test_a_failed_driver_leaves_what_holders_were_told() -> None:
    desk = CoreDriver(GPU)
    desk.report("a")
    before = desk.register("w", 1)
    desk.fail("hangs")
    assert desk["w"] == before


def test_a_report_that_says_nothing_new_changes_nothing() -> None:
    desk = CoreDriver(GPU)
    desk.report("a")
    assert desk.report("a").changes == []
    desk.fail("hangs")
    assert desk.fail("hangs").changes == []


def test_the_hosts_record_says_what_each_driver_said() -> None:
    desk = CoreDriver(GPU, m.ResourceSpec(name="fpga"), m.ResourceSpec(name="off", state=m.SpecState.DISABLED))
    desk.report(ill("a"))
    resources = desk.host_state.record.resources
    assert {name: resource.state for name, resource in resources.items()} == {
        "gpu": "reported",
        "fpga": "not-reported",
        "off": "disabled",
    }
    assert (resources["gpu"].devices[0].id, resources["gpu"].devices[0].health) == ("a", "unhealthy")
    desk.fail("hangs")
    assert desk.host_state.record.resources["gpu"].reason == "hangs"


def test_the_hosts_record_lists_the_first_devices_and_counts_them_all() -> None:
    desk = CoreDriver(GPU)
    desk.report(*(f"{number:04}" for number in range(MAX_LISTED_DEVICES)), "one-more", ill("one-ill"))
    told = desk.host_state.record.resources["gpu"]
    assert (told.total, told.healthy) == (MAX_LISTED_DEVICES + 2, MAX_LISTED_DEVICES + 1)
    assert [device.id for device in told.devices] == [f"{number:04}" for number in range(MAX_LISTED_DEVICES)]


# --- another configuration under live records ----------------------------------------------------------


def restarted(desk: CoreDriver, *specs: m.ResourceSpec) -> CoreDriver:
    """A manager with another configuration that knows the records alone."""
    ledger = Ledger()
    for record in desk.ledger.allocations.values():
        ledger.restore(PutAllocation(record.key, record))
    ledger.resume(commit=desk.ledger.commits, token=desk.ledger.token)
    again = CoreDriver(*specs, ledger=ledger)
    again.offset = desk.offset
    again.say(m.Reschedule(host="h"))
    return again


@pytest.mark.parametrize(
    "specs",
    [
        [m.ResourceSpec(name="gpu", amount=7)],
        [m.ResourceSpec(name="other")],
        [m.ResourceSpec(name="gpu", state=m.SpecState.DISABLED)],
        [m.ResourceSpec(name="gpu", shared=True)],
    ],
)
def test_a_restart_with_another_configuration_never_touches_live_allocations(specs: list[m.ResourceSpec]) -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b")
    granted = desk.register("w")
    desk = restarted(desk, *specs)
    desk.report("a", "b", resource=specs[0].name)
    assert desk["w"] == granted
    assert desk.heartbeat("w").renewed == ["h/w/1"]
    assert desk.register("next", resources=asks(**{specs[0].name: 1})).resources.get(specs[0].name, [{}])[0].get(
        "id"
    ) in (None, "b")
    desk.deregister("w")
    assert desk.state("w") == "ended"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (m.ResourceSpec(name="other"), "unknown-resource"),
        (m.ResourceSpec(name="gpu", state=m.SpecState.DISABLED), "disabled"),
    ],
)
def test_a_restart_without_the_resource_fails_those_who_still_wait_for_it(spec: m.ResourceSpec, code: str) -> None:
    desk = CoreDriver(GPU)
    desk.report("a")
    desk.register("holder", 1)
    desk.register("w", 1)
    desk = restarted(desk, spec)
    assert (desk.state("holder"), desk.state("w"), desk["w"].reason_code) == ("allocated", "failed", code)


def test_a_waiter_keeps_the_amounts_it_was_resolved_with() -> None:
    desk = CoreDriver(GPU)
    desk.register("w")
    desk = restarted(desk, m.ResourceSpec(name="gpu", amount=3))
    desk.report("a", "b", "c")
    assert desk.has("w") == ["a"]


def test_after_a_restart_nobody_is_granted_what_the_records_say_is_held() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b")
    desk.register("w", 1)
    desk.register("waiter", 2)
    desk = restarted(desk, GPU)
    assert desk["waiter"].reason_code == "not-reported"
    desk.report("a", "b")
    assert desk["waiter"].reason_code == "busy"
    desk.deregister("waiter")
    assert desk.register("next", 1).resources["gpu"][0]["id"] == "b"


def test_after_a_restart_a_device_is_held_under_its_aliases_before_its_own_driver_has_reported() -> None:
    fpga = m.ResourceSpec(name="fpga", amount=1)
    desk = CoreDriver(GPU, fpga)
    desk.report(device("GPU-1", aliases=("0000:01:00",)))
    desk.register("w", 1)
    desk = restarted(desk, GPU, fpga)
    desk.report("0000:01:00", resource="fpga")
    assert desk.register("other", resources=asks(fpga=1)).reason_code == "busy"
    desk.deregister("w")
    assert desk.has("other", "fpga") == ["0000:01:00"]


def delayed(desk: CoreDriver, worker: str, words: str, *, token: int = 1) -> None:
    desk.say(m.ReleaseDelayed(allocation=f"h/{worker}/1", token=token, reason=words))


@given(
    goodbye=st.sampled_from([None, "finished", "; ", "used by 1"]),
    words=st.lists(st.sampled_from(["used by 1", "; x", "y; "])),
)
def test_while_it_is_taken_back_the_record_says_what_that_waits_for_and_afterwards_why_it_ended(
    goodbye: str | None, words: list[str]
) -> None:
    desk = CoreDriver(CONFIRMS)
    desk.report("a")
    desk.register("w", 1)
    desk.deregister("w", reason=goodbye)
    why = desk["w"].reason
    for said in words:
        delayed(desk, "w", said)
        assert (desk.state("w"), desk["w"].reason, desk["w"].delayed_by) == ("releasing", f"{why}; {said}", said)
    unprepared(desk, "w")
    assert (desk.state("w"), desk["w"].reason, desk["w"].delayed_by) == ("ended", why, UNSET)


def test_words_that_are_repeated_or_come_late_change_nothing() -> None:
    desk = CoreDriver(CONFIRMS)
    desk.report("a")
    desk.register("w", 1)
    delayed(desk, "w", "too early")
    desk.deregister("w")
    delayed(desk, "w", "of an earlier grant", token=0)
    assert desk["w"].delayed_by is UNSET
    delayed(desk, "w", "used by 1")
    delayed(desk, "w", "used by 1")
    assert desk.decisions[-1].changes == []
    unprepared(desk, "w")
    delayed(desk, "w", "too late")
    delayed(desk, "nobody", "nothing")
    assert desk.decisions[-1].changes == []

"""Preparing, taking back, devices that change under their holders, and restarts with another configuration."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, structs

from outfitter_proto.records import MAX_LISTED_DEVICES, Health, Owner, Survivors
from outfitter_service.core import delays
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, implied
from outfitter_service.core.state.ledger import Ledger, PutAllocation
from outfitter_service.core.state.sizes import shortest
from support.core.core_driver import CoreDriver, asks, device, ill

PREPARES = m.ResourceSpec(name="gpu", amount=1, prepares=True)
CONFIRMS = m.ResourceSpec(name="gpu", amount=1, confirms=True)
GPU = m.ResourceSpec(name="gpu", amount=1)


def prepared(core: CoreDriver, worker: str, *, token: int = 1, error: str | None = None) -> None:
    core.say(m.Prepared(allocation=f"h/{worker}/1", token=token, error=error))


def unprepared(core: CoreDriver, worker: str, *, token: int = 1, confirmed: bool = True) -> None:
    core.say(m.Unprepared(allocation=f"h/{worker}/1", token=token, confirmed=confirmed))


def test_a_driver_that_prepares_is_asked_to_before_the_worker_is_told_that_it_has_the_device() -> None:
    core = CoreDriver(PREPARES)
    core.report("a")
    assert core.register("w", 1).state == "preparing"
    assert core.decisions[-1].commands == [m.Prepare(allocation="h/w/1", token=1)]
    assert core.has("w") == ["a"]
    prepared(core, "w")
    assert core.state("w") == "allocated"


def test_a_failed_prepare_is_taken_back_and_fails_the_worker_and_only_then_the_device_is_lent() -> None:
    core = CoreDriver(PREPARES)
    core.report("a")
    core.register("w", 1)
    core.register("next", 1)
    prepared(core, "w", error="no such partition")
    assert (core.state("w"), core.state("next")) == ("releasing", "pending")
    assert core.decisions[-1].commands == [m.Unprepare(allocation="h/w/1", token=1)]
    unprepared(core, "w")
    assert (core.state("w"), core["w"].reason, core["w"].outcome) == ("failed", "no such partition", None)
    assert (core.state("next"), core["next"].token) == ("preparing", 2)


@pytest.mark.parametrize("spec", [PREPARES, CONFIRMS])
def test_devices_whose_driver_takes_them_back_are_lent_only_after_it_did(spec: m.ResourceSpec) -> None:
    core = CoreDriver(spec)
    core.report("a")
    core.register("w", 1)
    prepared(core, "w")
    core.register("next", 1)
    core.deregister("w")
    assert (core.state("w"), core.state("next")) == ("releasing", "pending")
    unprepared(core, "w")
    assert (core.state("w"), core["w"].reason_code) == ("ended", "deregistered")
    assert core.has("next") == ["a"]


OWNER = Owner(pid=1, start_ticks=1, pid_ns=1, boot_id="b")
LEFT_BEHIND = Survivors(uid=1000)


def test_a_worker_whose_survivors_count_is_released_only_after_none_is_left() -> None:
    core = CoreDriver(GPU)
    core.report("a")
    core.register("w", 1, owner=OWNER, survivors=LEFT_BEHIND)
    core.register("next", 1)
    core.die("w")
    assert (core.state("w"), core.state("next")) == ("releasing", "pending")
    assert core.decisions[-1].commands == [implied(core["w"])] == [m.Unprepare(allocation="h/w/1", token=1)]
    core.say(m.ReleaseDelayed(allocation="h/w/1", token=1, reason="process 7 (sh) of the worker still runs"))
    assert core["w"].reason == "its process is gone; process 7 (sh) of the worker still runs"
    said = "no process of the worker is left"
    core.say(m.Unprepared(allocation="h/w/1", token=1, confirmed=False, survivors=said))
    assert (core.state("w"), core["w"].reason) == ("ended", "its process is gone")
    assert core.has("next") == ["a"]
    _, step = next(entry for decision in core.decisions[::-1] for entry in decision.history if entry[0] == "h/w/1")
    assert step.explanation == f"released (unconfirmed: no in-use check); {said}"


@pytest.mark.parametrize("fields", [{"owner": OWNER}, {"survivors": LEFT_BEHIND}, {"owner": OWNER, "survivors": None}])
def test_without_an_owner_or_survivors_a_release_takes_one_step(fields: dict[str, Any]) -> None:
    core = CoreDriver(GPU)
    core.report("a")
    core.register("w", 1, **fields)
    core.deregister("w")
    assert core.state("w") == "ended"


def test_a_worker_that_waits_is_withdrawn_at_once_whatever_it_would_leave_behind() -> None:
    core = CoreDriver(GPU)
    core.register("w", 1, owner=OWNER, survivors=LEFT_BEHIND)
    core.deregister("w")
    assert core.state("w") == "ended"


@pytest.mark.parametrize(
    ("first", "then", "refused"),
    [(LEFT_BEHIND, Survivors(uid=1), True), (LEFT_BEHIND, UNSET, True), (LEFT_BEHIND, LEFT_BEHIND, False),
     (None, UNSET, False), (UNSET, LEFT_BEHIND, False),
     (LEFT_BEHIND, structs.replace(LEFT_BEHIND, user_ns=7), False),
     (structs.replace(LEFT_BEHIND, user_ns=7), structs.replace(LEFT_BEHIND, user_ns=8), True)],
)  # fmt: skip
def test_a_repeated_registration_changes_no_survivors_and_may_say_what_an_earlier_version_ignored(
    first: Survivors | None, then: Survivors | None, refused: bool
) -> None:
    core = CoreDriver(GPU)
    core.report("a")
    core.register("w", 1, owner=OWNER, survivors=first)
    core.register("w", 1, owner=OWNER, survivors=then)
    assert (core.decisions[-1].refused is not None) == refused


def test_a_worker_that_ends_while_its_devices_are_prepared_releases_them() -> None:
    core = CoreDriver(PREPARES)
    core.report("a")
    core.register("w", 1)
    core.die("w")
    assert core.state("w") == "releasing"
    prepared(core, "w")
    assert core.state("w") == "releasing"
    unprepared(core, "w")
    assert (core.state("w"), core["w"].reason_code) == ("ended", "owner-died")


def test_answers_with_another_token_change_nothing() -> None:
    core = CoreDriver(PREPARES)
    core.report("a")
    core.register("w", 1)
    prepared(core, "w", token=7)
    assert core.state("w") == "preparing"
    core.deregister("w")
    unprepared(core, "w", token=7)
    assert core.state("w") == "releasing"


def test_what_was_shared_is_free_without_a_driver_although_the_resource_has_an_in_use_check() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1, shared=True, confirms=True))
    core.report("a")
    core.register("w", 1)
    core.register("other", 1)
    core.deregister("w")
    assert core.state("w") == "ended"


def test_answers_about_unknown_allocations_change_nothing() -> None:
    core = CoreDriver(PREPARES)
    prepared(core, "w")
    unprepared(core, "w")
    assert core.ledger.allocations == {}


def test_a_second_end_while_releasing_changes_nothing() -> None:
    core = CoreDriver(CONFIRMS)
    core.report("a")
    core.register("w", 1)
    core.deregister("w")
    assert core.deregister("w").changes == []
    assert core.expire("w").changes == []


@pytest.mark.parametrize(
    ("confirmed", "untold", "told"),
    [
        (True, None, "released"),
        (False, None, "released (unconfirmed: no in-use check)"),
        (False, "nvidia-smi knows nothing", "released (unconfirmed: nvidia-smi knows nothing)"),
    ],
)
def test_history_says_whether_an_in_use_check_confirmed_the_release(
    confirmed: bool, untold: str | None, told: str
) -> None:
    core = CoreDriver(CONFIRMS)
    core.report("a")
    core.register("w", 1)
    core.deregister("w")
    core.say(m.Unprepared(allocation="h/w/1", token=1, confirmed=confirmed, untold=untold))
    _, step = core.decisions[-1].history[0]
    assert (step.explanation, step.confirmed) == (told, confirmed)


def test_a_record_implies_the_command_that_is_issued_again_after_a_restart() -> None:
    core = CoreDriver(PREPARES)
    core.report("a")
    assert implied(core.register("w", 1)) == m.Prepare(allocation="h/w/1", token=1)
    prepared(core, "w")
    assert implied(core["w"]) is None
    core.deregister("w")
    assert implied(core["w"]) == m.Unprepare(allocation="h/w/1", token=1)


# --- devices that change under their holders -----------------------------------------------------------


def test_a_holder_is_told_that_its_device_fell_ill_and_that_it_healed_and_keeps_it() -> None:
    core = CoreDriver(GPU)
    core.report("a")
    granted = core.register("w", 1)
    core.report(ill("a", "ECC errors"))
    assert core["w"].resources["gpu"][0]["health"] == "unhealthy"
    assert core["w"].resources["gpu"][0]["health.reason"] == "ECC errors"
    assert (core.state("w"), core["w"].since) == ("allocated", granted.since)
    core.report("a")
    assert core["w"].resources == granted.resources


def test_a_holder_of_a_device_that_is_gone_is_told_that_its_health_is_unknown() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.register("w", 1)
    core.report("b")
    assert core["w"].resources["gpu"][0]["health"] == "unknown"
    assert core.has("w") == ["a"]
    core.report("a", "b")
    assert core.register("next", 1).resources["gpu"][0]["id"] == "b"


@pytest.mark.parametrize("permanent", [False, True])
def test_devices_of_a_silent_driver_are_unknown_until_it_answers_and_who_waits_is_not_failed(permanent: bool) -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1, on_failure=m.OnFailure.WAIT))
    core.report("a", "b")
    core.register("w", 1)
    unknown = [device(name, health=Health.UNKNOWN, reason="no answer since noon") for name in "ab"]
    core.be_silent(*unknown, permanent=permanent)
    core.register("next", 1)
    assert (core.state("w"), core.has("w"), core["w"].resources["gpu"][0]["health"]) == ("allocated", ["a"], "unknown")
    assert (core.state("next"), core["next"].reason) == ("pending", "the driver of gpu failed: no answer")
    assert core.host_state.record is not None
    listed = core.host_state.record.resources["gpu"]
    assert (listed.state, listed.total, listed.healthy) == ("driver-failed", 2, 0)
    core.report("a", "b")
    assert (core.state("next"), core.has("next")) == ("allocated", ["b"])
    assert "health" not in core["w"].resources["gpu"][0]


def test_a_holder_of_shared_devices_is_told_of_changes_too() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1, shared=True))
    core.report("a", "b")
    core.register("w", 1)
    core.report("a", ill("b"))
    assert [info.get("health") for info in core["w"].resources["gpu"]] == [None, "unhealthy"]


def test_a_device_with_a_new_id_and_its_old_one_as_alias_keeps_the_id_it_was_granted_by() -> None:
    core = CoreDriver(GPU)
    core.report("0")
    core.register("w", 1, operators={"o": asks(gpu=1)})
    core.report(device("GPU-1", aliases=("0",)))
    assert core.has("w") == ["0"]
    assert core["w"].resources["gpu"][0]["index"] == "GPU-1"
    assert core.register("next", 1).reason_code == "busy"


def test_many_holders_are_told_in_pieces() -> None:
    core = CoreDriver(GPU, chunk=2)
    core.report(*"abcdefg")
    for name in "abcdefg":
        core.register(name, 1)
    core.report(*(ill(name) for name in "abcdefg"))
    assert all(core[name].resources["gpu"][0]["health"] == "unhealthy" for name in "abcdefg")


def test_a_failed_driver_leaves_what_holders_were_told() -> None:
    core = CoreDriver(GPU)
    core.report("a")
    before = core.register("w", 1)
    core.fail("hangs")
    assert core["w"] == before


def test_a_report_that_says_nothing_new_changes_nothing() -> None:
    core = CoreDriver(GPU)
    core.report("a")
    assert core.report("a").changes == []
    core.fail("hangs")
    assert core.fail("hangs").changes == []


def test_the_hosts_record_says_what_each_driver_said() -> None:
    core = CoreDriver(GPU, m.ResourceSpec(name="fpga"), m.ResourceSpec(name="off", state=m.SpecState.DISABLED))
    core.report(ill("a"))
    resources = core.host_state.record.resources
    assert {name: resource.state for name, resource in resources.items()} == {
        "gpu": "reported",
        "fpga": "not-reported",
        "off": "disabled",
    }
    assert (resources["gpu"].devices[0].id, resources["gpu"].devices[0].health) == ("a", "unhealthy")
    core.fail("hangs")
    assert core.host_state.record.resources["gpu"].reason == "hangs"


def test_the_hosts_record_lists_the_first_devices_and_counts_them_all() -> None:
    core = CoreDriver(GPU)
    core.report(*(f"{number:04}" for number in range(MAX_LISTED_DEVICES)), "one-more", ill("one-ill"))
    told = core.host_state.record.resources["gpu"]
    assert (told.total, told.healthy) == (MAX_LISTED_DEVICES + 2, MAX_LISTED_DEVICES + 1)
    assert [device.id for device in told.devices] == [f"{number:04}" for number in range(MAX_LISTED_DEVICES)]


# --- another configuration under live records ----------------------------------------------------------


def restarted(core: CoreDriver, *specs: m.ResourceSpec) -> CoreDriver:
    """A manager with another configuration that knows the records alone."""
    ledger = Ledger()
    for record in core.ledger.allocations.values():
        ledger.restore(PutAllocation(record.key, record))
    ledger.resume(commit=core.ledger.commits, token=core.ledger.token)
    again = CoreDriver(*specs, ledger=ledger)
    again.offset = core.offset
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
    core = CoreDriver(GPU)
    core.report("a", "b")
    granted = core.register("w")
    core = restarted(core, *specs)
    core.report("a", "b", resource=specs[0].name)
    assert core["w"] == granted
    assert core.heartbeat("w").renewed == ["h/w/1"]
    assert core.register("next", resources=asks(**{specs[0].name: 1})).resources.get(specs[0].name, [{}])[0].get(
        "id"
    ) in (None, "b")
    core.deregister("w")
    assert core.state("w") == "ended"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (m.ResourceSpec(name="other"), "unknown-resource"),
        (m.ResourceSpec(name="gpu", state=m.SpecState.DISABLED), "disabled"),
    ],
)
def test_a_restart_without_the_resource_fails_those_who_still_wait_for_it(spec: m.ResourceSpec, code: str) -> None:
    core = CoreDriver(GPU)
    core.report("a")
    core.register("holder", 1)
    core.register("w", 1)
    core = restarted(core, spec)
    assert (core.state("holder"), core.state("w"), core["w"].reason_code) == ("allocated", "failed", code)


def test_a_waiter_keeps_the_amounts_it_was_resolved_with() -> None:
    core = CoreDriver(GPU)
    core.register("w")
    core = restarted(core, m.ResourceSpec(name="gpu", amount=3))
    core.report("a", "b", "c")
    assert core.has("w") == ["a"]


def test_after_a_restart_nobody_is_granted_what_the_records_say_is_held() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.register("w", 1)
    core.register("waiter", 2)
    core = restarted(core, GPU)
    assert core["waiter"].reason_code == "not-reported"
    core.report("a", "b")
    assert core["waiter"].reason_code == "busy"
    core.deregister("waiter")
    assert core.register("next", 1).resources["gpu"][0]["id"] == "b"


def test_after_a_restart_a_device_is_held_under_its_aliases_before_its_own_driver_has_reported() -> None:
    fpga = m.ResourceSpec(name="fpga", amount=1)
    core = CoreDriver(GPU, fpga)
    core.report(device("GPU-1", aliases=("0000:01:00",)))
    core.register("w", 1)
    core = restarted(core, GPU, fpga)
    core.report("0000:01:00", resource="fpga")
    assert core.register("other", resources=asks(fpga=1)).reason_code == "busy"
    core.deregister("w")
    assert core.has("other", "fpga") == ["0000:01:00"]


def delayed(core: CoreDriver, worker: str, words: str, *, token: int = 1) -> None:
    core.say(m.ReleaseDelayed(allocation=f"h/{worker}/1", token=token, reason=words))


@given(
    given_reason=st.sampled_from([None, "finished", "; ", "used by 1"]),
    words=st.lists(st.sampled_from(["used by 1", "; x", "y; "])),
)
def test_while_it_is_taken_back_the_record_says_what_that_waits_for_and_afterwards_why_it_ended(
    given_reason: str | None, words: list[str]
) -> None:
    core = CoreDriver(CONFIRMS)
    core.report("a")
    core.register("w", 1)
    core.deregister("w", reason=given_reason)
    why = core["w"].reason
    for said in words:
        delayed(core, "w", said)
        assert (core.state("w"), core["w"].reason, core["w"].delayed_by) == ("releasing", f"{why}; {said}", said)
    unprepared(core, "w")
    assert (core.state("w"), core["w"].reason, core["w"].delayed_by) == ("ended", why, UNSET)


SEEN: tuple[str, int] = ("b", 1)
"""The boot and PID namespace of `OWNER`."""
OWNER = Owner(pid=7, start_ticks=7, pid_ns=SEEN[1], boot_id=SEEN[0])
NAMED = "process 8 (sh) of the worker still runs"


def left_behind(words: str, sees: tuple[str | None, int | None]) -> CoreDriver:
    """The owner of the worker `w` has died, and its release is delayed by what `words` say."""
    core = CoreDriver(GPU, sees=sees)
    core.report("a")
    core.register("w", 1, owner=OWNER, survivors=Survivors(uid=0))
    core.die("w")
    delayed(core, "w", words)
    return core


@pytest.mark.parametrize("ending", [CoreDriver.deregister, CoreDriver.die])
@pytest.mark.parametrize("sees", [(None, None), ("b", 2), ("another", 1)])
def test_a_wait_for_processes_that_the_manager_does_not_see_is_ended_by_who_knows_better(
    ending: Callable[[CoreDriver, str], Decision], sees: tuple[str | None, int | None]
) -> None:
    core = left_behind(NAMED, sees)
    why = core["w"].reason
    core.expire("w")
    assert (core["w"].delayed_by, core.decisions[-1].commands) == (NAMED, [])
    ending(core, "w")
    assert core.decisions[-1].commands == [m.Unprepare(allocation="h/w/1", token=1)]
    assert (core.state("w"), core["w"].delayed_by) == ("releasing", "")
    assert why == f"{core['w'].reason}; {NAMED}"
    ending(core, "w")
    assert (core.decisions[-1].commands, core.decisions[-1].kind) == ([], "repeated")
    unprepared(core, "w")
    assert (core.state("w"), core["w"].reason_code, core["w"].delayed_by) == ("ended", "owner-died", UNSET)


@pytest.mark.parametrize("ending", [CoreDriver.deregister, CoreDriver.die])
@pytest.mark.parametrize(("words", "sees"), [(NAMED, SEEN), (delays.of_driver("gpu", "says: no"), (None, None))])
def test_nobody_else_ends_a_wait_for_processes_or_for_a_driver(
    ending: Callable[[CoreDriver, str], Decision], words: str, sees: tuple[str | None, int | None]
) -> None:
    core = left_behind(words, sees)
    ending(core, "w")
    assert (core["w"].delayed_by, core.decisions[-1].commands, core.decisions[-1].kind) == (words, [], "repeated")


def test_the_shortest_record_tells_whose_words_delay_it() -> None:
    for words, is_named in ((NAMED, True), (delays.of_driver("gpu", "says: still in use by process 8"), False)):
        record = shortest(left_behind(words, (None, None))["w"])
        assert delays.is_out_of_sight(record, (None, None)) is is_named


def test_words_that_are_repeated_or_come_late_change_nothing() -> None:
    core = CoreDriver(CONFIRMS)
    core.report("a")
    core.register("w", 1)
    delayed(core, "w", "too early")
    core.deregister("w")
    delayed(core, "w", "of an earlier grant", token=0)
    assert core["w"].delayed_by is UNSET
    delayed(core, "w", "used by 1")
    delayed(core, "w", "used by 1")
    assert core.decisions[-1].changes == []
    unprepared(core, "w")
    delayed(core, "w", "too late")
    delayed(core, "nobody", "nothing")
    assert core.decisions[-1].changes == []

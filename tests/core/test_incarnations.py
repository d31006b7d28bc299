"""A worker's runs: which is current, what a late message of another one does, and repeats."""

import pytest
from msgspec import structs

from outfitter_proto.records import Owner, Unwatched
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import DropAllocation
from support.core.core_driver import CoreDriver, asks
from support.core.decided import touched

GPU = m.ResourceSpec(name="gpu", amount=1)


def core_with(*devices: str) -> CoreDriver:
    core = CoreDriver(GPU)
    core.report(*devices)
    return core


def test_an_older_incarnation_keeps_its_devices_until_it_is_known_to_be_dead() -> None:
    core = core_with("a")
    core.register("w", 1)
    assert core.register("w", 1, incarnation="2").state == "pending"
    assert (core.state("w"), core["w"].reason_code) == ("allocated", "superseded")
    core.die("w")
    assert (core.state("w"), core["w"].reason_code) == ("ended", "owner-died")
    assert core.has("w", incarnation="2") == ["a"]


def test_an_older_incarnation_keeps_its_devices_until_its_lease_has_ended() -> None:
    core = core_with("a")
    core.register("w", 1)
    core.register("w", 1, incarnation="2")
    assert core.decisions[-1].final_leases == ["h/w/1"]
    core.expire("w")
    assert core["w"].reason_code == "lease-expired"
    assert core.state("w", "2") == "allocated"


def test_an_older_incarnation_that_waits_ends_at_once() -> None:
    core = CoreDriver(GPU)
    core.register("w", 1)
    core.register("w", 1, incarnation="2")
    assert (core.state("w"), core["w"].reason_code) == ("ended", "superseded")


def test_a_heartbeat_of_an_older_incarnation_renews_nothing() -> None:
    core = core_with("a", "b")
    core.register("w", 1)
    core.register("w", 1, incarnation="2")
    late = core.heartbeat("w", "1")
    assert late.renewed == []
    assert "older incarnation" in str(late.refused)
    assert core.heartbeat("w", "2").renewed == ["h/w/2"]


def test_a_repeated_registration_of_an_older_incarnation_renews_nothing() -> None:
    core = core_with("a", "b")
    core.register("w", 1)
    core.register("w", 1, incarnation="2")
    core.register("w", 1)
    assert core.decisions[-1].renewed == []
    assert core.ledger.host_state("h").runs.newest("w") == "h/w/2"


def test_a_superseded_incarnation_does_not_come_back_when_the_newer_one_is_forgotten() -> None:
    core = CoreDriver(GPU, retention_s=10)
    core.report("a", "b")
    core.register("w", 1, lease_s=None)
    core.register("w", 1, incarnation="2")
    core.deregister("w", "2")
    core.pass_time(60)
    assert "h/w/2" not in core.ledger.allocations
    assert core.heartbeat("w", "1").renewed == []


def test_the_newest_of_those_that_are_remembered_is_current() -> None:
    core = CoreDriver(GPU, retention_s=100)
    for incarnation in ("1", "2"):
        core.register("w", 1, incarnation=incarnation)
    core.pass_time(90)
    core.register("w", 1, incarnation="3")
    core.register("w", 1, incarnation="4")
    core.say(m.OwnerDied(allocation="h/w/4", detail="gone"))
    assert core.host_state.runs.newest("w") == "h/w/4"
    core.ledger.change(DropAllocation("h/w/4"))
    assert core.host_state.runs.newest("w") == "h/w/3"


def test_a_deregistration_of_an_older_incarnation_ends_only_itself() -> None:
    core = core_with("a", "b")
    core.register("w", 1)
    core.register("w", 1, incarnation="2")
    core.deregister("w", "1")
    assert (core.state("w", "1"), core.state("w", "2")) == ("ended", "allocated")


def test_a_deregistration_without_incarnation_ends_the_current_one() -> None:
    core = core_with("a", "b")
    core.register("w", 1)
    core.register("w", 1, incarnation="2")
    core.deregister("w", None)
    assert (core.state("w", "1"), core.state("w", "2")) == ("allocated", "ended")


def test_a_newer_incarnation_that_fails_supersedes_all_the_same() -> None:
    core = core_with("a")
    core.register("w", 1)
    assert core.register("w", 5, incarnation="2").state == "failed"
    assert core["w"].reason_code == "superseded"


def test_a_rollback_takes_back_the_tokens_of_all_but_the_settled_commits() -> None:
    core = core_with("a", "b", "c")
    core.register("w", 1)
    core.ledger.begin_commit()
    core.register("x", 1)  # decided while the first commit is under way
    core.ledger.end_commit()
    assert core.ledger.token == 2
    core.ledger.begin_commit()
    core.register("y", 1)
    core.ledger.rollback()
    assert (core.ledger.token, list(core.ledger.allocations)) == (1, ["h/w/1"])
    core.ledger.end_commit()  # as of what needed no commit
    core.register("z", 1)
    core.ledger.rollback()
    assert core.ledger.token == 1


# --- late, repeated, reordered -------------------------------------------------------------------------


def test_the_same_registration_twice_gets_its_unchanged_record_published_again() -> None:
    core = core_with("a", "b")
    first = core.register("w", 1)
    core.ledger.begin_commit()
    core.ledger.end_commit()
    assert core.register("w", 1) == first
    assert core.decisions[-1].repeats == ["h/w/1"]
    assert touched(core.ledger) == core.decisions[-1].history == []
    assert core.decisions[-1].renewed == ["h/w/1"]


OWNER = Owner(pid=1, start_ticks=2, pid_ns=3, boot_id="b")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"resources": asks(gpu=2)}, "resources"),
        ({"operators": {"o": asks(gpu=1)}}, "operators"),
        ({"priority": 3}, "priority"),
        ({"wait_s": 3.0}, "wait_s"),
        ({"lease_s": 3.0}, "lease_s"),
        ({"owner": OWNER}, "owner"),
        ({"labels": {"job": "x"}}, "labels"),
    ],
)
def test_the_same_incarnation_with_another_request_is_refused_and_its_grant_untouched(
    changed: dict[str, object], named: str
) -> None:
    core = core_with("a", "b")
    first = core.register("w", resources=asks(gpu=1))
    again = core.register("w", **{"resources": asks(gpu=1), **changed})
    assert again == first
    assert f"other {named};" in str(core.decisions[-1].refused)
    assert core.decisions[-1].renewed == []


def unwatched(worker: str, lease_s: float = 7.0) -> m.OwnerUnwatched:
    return m.OwnerUnwatched(
        allocation=f"h/{worker}/1", code=Unwatched.PID_NAMESPACE, reason="it is elsewhere", lease_s=lease_s
    )


def test_a_worker_without_a_lease_that_nobody_watches_is_given_one_and_registers_again_as_before() -> None:
    core = core_with("a")
    core.register("w", 1, owner=OWNER, lease_s=None)
    waits = core.register("waits", 1, owner=OWNER, lease_s=None)
    for worker in ("w", "waits"):
        told = core.say(unwatched(worker)).history[0][1]
        assert told.event == "owner-unwatched"
        assert "a lease of 7 s" in told.explanation
        assert (core[worker].request.lease_s, core[worker].unwatched) == (7.0, "pid-namespace")
    assert (core.state("w"), core.state("waits"), core["waits"].since) == ("allocated", "pending", waits.since)
    given = core["w"]
    assert core.register("w", 1, owner=OWNER, lease_s=None) == given
    assert core.decisions[-1].refused is None
    core.register("w", 1, owner=OWNER, lease_s=3.0)
    assert "other lease_s;" in str(core.decisions[-1].refused)
    # observed once more, it is no news
    assert core.say(unwatched("w", lease_s=9.0)).changes == []


def test_a_worker_with_a_lease_that_nobody_watches_keeps_it_and_is_told() -> None:
    core = core_with("a")
    core.register("w", 1, owner=OWNER, lease_s=3.0)
    core.say(unwatched("w"))
    assert (core["w"].request.lease_s, core["w"].unwatched) == (3.0, "pid-namespace")


def test_who_is_over_or_superseded_is_told_nothing_about_its_owner() -> None:
    core = core_with("a", "b")
    core.register("over", 1, owner=OWNER, lease_s=None)
    core.deregister("over")
    core.register("old", 1, owner=OWNER, lease_s=None)
    core.register("old", 1, incarnation="2")
    for worker in ("over", "old", "nobody"):
        assert core.say(unwatched(worker)).changes == []


def test_a_registration_with_the_default_lease_is_the_same_after_the_default_has_changed() -> None:
    core = core_with("a")
    first = core.register("w", 1)
    core.rules = CoreDriver(GPU, lease_s=99).rules
    assert core.register("w", 1) == first
    assert core.decisions[-1].refused is None


def test_a_registration_after_its_own_deregistration_grants_nothing() -> None:
    core = core_with("a")
    core.register("w", 1)
    core.deregister("w")
    assert core.register("w", 1).state == "ended"
    assert core.decisions[-1].kind == "late"
    assert core.host_state.holders.live == {}


def test_a_registration_that_comes_after_its_own_deregistration_was_seen_first_grants_nothing() -> None:
    core = core_with("a")
    early = core.deregister("w", reason="finished")
    assert early.refused is None  # its record is the answer, and a dead letter would be another one
    assert (core.state("w"), core["w"].reason) == ("ended", "deregistered: finished before it was registered")
    assert core.register("w", 1).state == "ended"
    assert core.register("w", 1, incarnation="2").state == "allocated"


def test_a_deregistration_of_an_unseen_incarnation_does_not_touch_the_current_one() -> None:
    core = core_with("a")
    core.register("w", 1)
    core.deregister("w", "never-seen")
    assert core.heartbeat("w").renewed == ["h/w/1"]
    core.deregister("w", None)
    assert core.state("w") == "ended"


def test_a_deregistration_of_nobody_is_refused() -> None:
    core = core_with("a")
    decision = core.deregister("nobody", None)
    assert "h/nobody, which is not registered here" in str(decision.refused)
    assert decision.changes == []


def test_a_deregistration_of_a_worker_of_which_only_deregistrations_came_is_refused_as_one_of_nobody() -> None:
    core = core_with("a")
    core.deregister("w", "never-seen")
    decision = core.deregister("w", None)
    assert "h/w, which is not registered here" in str(decision.refused)
    assert decision.changes == []
    assert core.deregister("w", "never-seen").refused is None  # its record is the answer


def test_a_second_deregistration_changes_nothing() -> None:
    core = core_with("a")
    core.register("w", 1)
    core.deregister("w")
    assert core.deregister("w").changes == []
    assert core.decisions[-1].kind == "late"


def test_heartbeats_of_unknown_and_ended_workers_are_refused() -> None:
    core = core_with("a")
    assert "register first" in str(core.heartbeat("w").refused)
    core.register("w", 1)
    core.deregister("w", reason="done")
    assert "is over (ended: deregistered: done)" in str(core.heartbeat("w").refused)


def test_a_heartbeat_that_was_under_way_when_the_wait_ended_is_late_and_no_dead_letter() -> None:
    core = core_with("a")
    core.register("holder", 1)
    core.register("w", 1, wait_s=4.0, lease_s=60.0)
    core.pass_time(5)
    assert core["w", "1"].state == "failed"
    late = core.heartbeat("w")
    assert (late.kind, late.refused, late.changes, late.renewed) == ("late", None, [], [])
    core.pass_time(61)
    assert "is over (failed: " in str(core.heartbeat("w").refused)


def test_a_heartbeat_that_was_under_way_when_the_lease_ended_is_late_and_no_dead_letter() -> None:
    core = core_with("a")
    core.register("w", 1, lease_s=60.0)
    core.expire("w")
    assert core["w", "1"].state == "ended"
    assert (core.heartbeat("w").kind, core.decisions[-1].refused) == ("late", None)


def test_heartbeats_write_nothing() -> None:
    core = core_with("a")
    core.register("w", 1)
    decision = core.heartbeat("w")
    assert (decision.changes, decision.history, decision.renewed) == ([], [], ["h/w/1"])


def test_a_failed_registration_renews_no_lease() -> None:
    core = core_with("a")
    core.register("w", 2)
    assert core.decisions[-1].renewed == []
    core.register("w", 2)
    assert core.decisions[-1].renewed == []


def test_the_end_of_what_has_ended_already_changes_nothing() -> None:
    core = core_with("a")
    core.register("w", 1)
    core.deregister("w")
    assert core.die("w").changes == []
    assert core.expire("w").changes == []
    assert core.die("unknown").changes == []


def test_a_death_or_a_silent_lease_ends_a_waiter_too() -> None:
    core = CoreDriver(GPU)
    core.register("w1", 1)
    core.register("w2", 1)
    core.die("w1")
    core.expire("w2")
    assert [core["w1"].reason_code, core["w2"].reason_code] == ["owner-died", "lease-expired"]


def test_each_grant_has_a_higher_token() -> None:
    core = core_with("a", "b")
    tokens = [core.register(worker, 1).token for worker in ("x", "y")]
    core.deregister("x")
    tokens.append(core.register("x", 1, incarnation="2").token)
    assert tokens == [1, 2, 3]


# --- remembering ---------------------------------------------------------------------------------------


def test_records_that_are_over_are_forgotten_after_the_retention() -> None:
    core = CoreDriver(GPU, retention_s=100)
    core.report("a")
    core.register("ended", 1)
    core.deregister("ended")
    core.register("failed", 2)
    core.register("live", 1)
    core.pass_time(99)
    core.ledger.begin_commit()
    core.ledger.end_commit()
    assert "h/ended/1" in core.ledger.allocations
    core.pass_time(3)
    assert set(core.ledger.allocations) == {"h/live/1"}
    assert dict(touched(core.ledger)) == {"h/ended/1": None, "h/failed/1": None}


def test_many_old_records_are_forgotten_in_pieces() -> None:
    core = CoreDriver(GPU, retention_s=100, chunk=2)
    core.report("a")
    for i in range(9):
        core.register(f"w{i}", 2)
    core.pass_time(200)
    assert core.ledger.allocations == {}


def test_a_forgotten_worker_may_come_back() -> None:
    core = CoreDriver(GPU, retention_s=100)
    core.report("a")
    core.register("w", 1)
    core.deregister("w")
    core.pass_time(200)
    assert core.register("w", 1).state == "allocated"


def test_every_step_is_told_with_its_cause_and_the_record_after_it() -> None:
    core = CoreDriver(GPU)
    core.register("w", 1)
    core.report("a")
    core.deregister("w", reason="finished")
    steps = [step for decision in core.decisions for _, step in decision.history]
    assert [(step.event, step.from_, step.to, step.explanation, step.confirmed) for step in steps] == [
        ("register", None, "pending", "the driver of gpu has not reported yet", None),
        ("driver-report", "pending", "allocated", "granted", None),
        ("deregister", "allocated", "ended", "deregistered: finished", False),
    ]
    assert [step.source.offset if step.source else None for step in steps] == [1, None, 2]
    assert all(step.record.state == step.to for step in steps)  # type: ignore[union-attr]  # never Raw here


def test_without_heartbeats_an_unwatched_owner_gets_no_lease_and_the_record_says_why_once() -> None:
    core = core_with("a")
    core.register("w", 1, owner=OWNER, lease_s=None, heartbeats=False)
    core.say(unwatched("w"))
    assert (core["w"].request.lease_s, core["w"].unwatched) == (None, "pid-namespace")
    assert core.say(unwatched("w")).changes == []


def test_a_repeated_registration_of_an_earlier_version_leaves_it_that_nobody_sends_heartbeats() -> None:
    core = core_with("a")
    first = core.register("w", 1, owner=OWNER, heartbeats=False)
    assert core.register("w", 1, owner=OWNER) == first
    assert core.decisions[-1].refused is None
    assert first.request.heartbeats is False
    core.register("w", 1, owner=OWNER, heartbeats=True)
    assert "other heartbeats;" in str(core.decisions[-1].refused)


def test_a_record_of_an_earlier_version_is_repeated_by_whoever_sends_no_heartbeats() -> None:
    core = core_with("a")
    first = core.register("w", 1, owner=OWNER)
    assert core.register("w", 1, owner=OWNER, heartbeats=False) == first
    assert core.decisions[-1].refused is None


def test_without_news_an_older_incarnation_is_marked_by_a_later_look_at_the_host() -> None:
    core = core_with("a", "b")
    core.register("w", 1)
    core.rules = structs.replace(core.rules, news=False)
    core.register("w", 1, incarnation="2")
    assert core.decisions[-1].final_leases == ["h/w/1"]
    assert core["w"].reason_code is None
    assert core.heartbeat("w", "1").renewed == []
    core.say(m.Reschedule(host="h"))
    assert core["w"].reason_code is None
    core.rules = structs.replace(core.rules, news=True)
    core.say(m.Reschedule(host="h"))
    assert core["w"].reason_code == "superseded"

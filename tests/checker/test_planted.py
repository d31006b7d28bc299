"""Each kind of violation is planted in a stream that was clean, and the checker finds it."""

from __future__ import annotations

import pytest

from outfitter_verify import CHECKS, check
from support.checker.plants import (  # noqa: F401 - imported for what they plant
    PLANTS,
    allocations,
    answers,
    choices,
    cordons,
    order,
    releases,
    replay,
    writers,
)
from support.checker.streams import AT_MS, HOST, PARTITION, lived_in


@pytest.mark.parametrize("name", PLANTS)
def test_the_planted_violation_is_found(name: str) -> None:
    """…by the check that it is meant for, and at a place that exists."""
    by, says, plant = PLANTS[name]
    world = lived_in()
    assert world.violated() == set()
    plant(world)
    report = world.report()
    found = [violation for violation in report.violations if violation.check == by and says in violation.what]
    assert found, f"{report}"
    for violation in found:
        assert violation.place.offset >= 0
        assert violation.what


def test_every_check_has_a_planted_violation() -> None:
    assert {by for by, _, _ in PLANTS.values()} == set(CHECKS)


@pytest.mark.parametrize("markers", [True, False], ids=["kafka", "embedded"])
def test_a_clean_stream_passes_in_full(markers: bool) -> None:
    report = lived_in(markers=markers).report()
    assert report.violations == ()
    assert report.complete
    assert all(each.looked_at for each in report.checks)
    assert report.counts["unread"] == 1


def test_the_same_reading_gives_the_same_report() -> None:
    world = lived_in()
    world.commit()
    assert world.report() == world.report()


def test_a_violation_names_its_place_and_the_records_that_show_it() -> None:
    world = lived_in()
    holder = next(r.offset for r in reversed(world.allocations.records) if r.key == f"{HOST}/b/1".encode())
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"]))
    [violation] = world.report().violations
    assert violation.place == (world.allocations.topic, PARTITION, world.allocations.records[-2].offset)
    assert violation.records == (f"{world.allocations.topic}/{PARTITION}/{holder}",)
    assert "GPU-0" in violation.what
    assert f"{HOST}/b/1" in violation.what


def test_who_waits_alone_for_what_has_become_shared_since_is_in_nobodys_way() -> None:
    """The manager was started again with another configuration: all of them are served, one after the other."""
    world = lived_in()
    world.commit(world.allocation("e", "pending", reason_code="busy"))
    world.inventory({"gpu": {"state": "reported", "sharing": "shared", "devices": [{"id": "GPU-2"}]}})
    world.commit()
    world.register("f")
    waits = world.allocation("e", "pending", reason_code="busy", queue_position=1)
    world.commit(waits, world.allocation("f", "allocated", devices=["GPU-2"], shared=["gpu"]))
    assert world.report().violations == ()


def test_who_takes_certain_devices_only_is_overtaken_at_others_by_nobody() -> None:
    world = lived_in()
    choices.overtaken(world, "A100")
    assert world.report().violations == ()


@pytest.mark.parametrize(("model", "group"), [("A100", "a"), ("H100", "b")])
def test_who_takes_certain_devices_only_may_wait_although_others_are_free(model: str, group: str) -> None:
    world = lived_in()
    choices.waits_for(world, model, group)
    assert world.report().violations == ()


def test_who_waits_for_a_replica_may_wait_until_one_is_free() -> None:
    world = lived_in()
    order.replicas(world, 2)
    assert world.report().violations == ()


def test_a_deregistration_that_names_no_run_ends_the_newest_one() -> None:
    world = lived_in()
    world.register("b", "2")
    world.commit(
        world.allocation("b", "allocated", incarnation="2", devices=["GPU-2"]), world.allocation("e", "failed")
    )
    world.say({"type": "deregister", "host": HOST, "worker": "b"})
    world.commit(world.allocation("b", "ended", incarnation="2", reason_code="deregistered"))
    assert world.report().violations == ()


def test_a_lease_that_ends_after_its_time_and_the_managers_grace_is_no_violation() -> None:
    world = lived_in()
    request = {"amounts": {"gpu": 1}, "owner": None, "lease_s": 700.0}
    world.commit(world.allocation("e", "allocated", devices=["GPU-2"], request=request), lease_grace_s=60.0)
    late = "2026-01-31T12:02:41Z"
    ended = world.allocation("e", "ended", reason_code="lease-expired", since=late)
    world.commit(ended, at=late, lease_grace_s=60.0)
    assert world.report().violations == ()


@pytest.mark.parametrize(("asked", "is_too_early"), [({"priority": 0}, True), ({"priority": 1}, False)])
def test_only_a_registration_that_repeats_the_first_one_renews_the_lease(
    asked: dict[str, int], is_too_early: bool
) -> None:
    """One of the same run that asks for something else is refused: the run that holds the devices has not spoken."""
    world = lived_in()
    world.register("f", priority=0)
    request = {"amounts": {"gpu": 1}, "owner": None, "lease_s": 700.0}
    world.commit(
        world.allocation("f", "allocated", devices=["GPU-2"], request=request), world.allocation("e", "failed")
    )
    again = world.register("f", **asked)
    world.registrations.records[-1] = world.registrations.records[-1]._replace(timestamp_ms=AT_MS)
    if not is_too_early:
        world.refuse(again)
    world.commit()
    late = "2026-01-31T12:02:00Z"
    world.commit(world.allocation("f", "ended", reason_code="lease-expired", since=late), at=late)
    whats = [violation.what for violation in world.report().violations]
    assert whats == ([f"the lease of {HOST}/f/1 is over after 120 s, but it is 700 s long"] if is_too_early else [])


def test_a_silence_in_which_the_clock_was_set_back_is_not_judged() -> None:
    world = lived_in()
    request = {"amounts": {"gpu": 1}, "owner": None, "lease_s": 700.0}
    world.commit(world.allocation("e", "allocated", devices=["GPU-2"], request=request))
    early = "2026-01-31T11:58:00Z"
    world.commit(world.allocation("e", "ended", reason_code="lease-expired", since=early), at=early)
    report = world.report()
    assert report.violations == ()
    [judged] = [each for each in report.checks if each.name == "releases"]
    assert any("clock was set back" in why for why in judged.partial)


def test_what_is_over_begins_anew_when_the_clock_was_set_back() -> None:
    """…its retention is counted from then; it begins no later than it did, and nothing else of it changes."""
    world = lived_in()
    over = dict(next(record for record in world.now.values() if record["state"] in ("ended", "failed")))
    early, late = "2020-01-01T00:00:00Z", "2099-01-01T00:00:00Z"
    world.commit(over | {"since": early, "commit": world.commits + 1}, to=world.position)
    assert world.report().violations == ()
    world.commit(over | {"since": late, "commit": world.commits + 1}, to=world.position)
    assert world.violated() == {"steps"}


def test_what_is_over_may_lose_its_devices_when_the_clock_was_set_back() -> None:
    """…where topics take less than they did; while it holds them it may not."""
    for is_over in (True, False):
        world = lived_in()
        if is_over:
            world.deregister("b")
            ended = world.now[f"{HOST}/b/1"] | {"state": "ended", "reason_code": "deregistered"}
            world.commit(ended | {"commit": world.commits + 1}, world.allocation("e", "pending"))
        bare = world.now[f"{HOST}/b/1"] | {"resources": {}, "since": "2020-01-01T00:00:00Z"}
        world.commit(bare | {"commit": world.commits + 1}, to=world.position)
        assert (not world.violated()) == is_over


def test_what_is_over_may_lose_its_operators_alone_when_the_clock_was_set_back() -> None:
    """…with what its registration said of them, and keeps its devices; no other one's are lost."""
    world = lived_in()
    world.deregister("b")
    operators = {"one": {"resources": {"gpu": ["GPU-2"]}, "env": {}, "cdi": []}}
    ended = world.now[f"{HOST}/b/1"] | {"state": "ended", "reason_code": "deregistered", "operators": operators}
    request = ended["request"] | {"operators": {"one": {"gpu": {"amount": 1}}}}
    world.now[f"{HOST}/b/1"]["operators"] = operators
    world.now[f"{HOST}/b/1"]["request"] = request
    world.commit(ended | {"request": request, "commit": world.commits + 1}, world.allocation("e", "pending"))
    lost = {"operators": {}, "request": request | {"operators": None}, "since": "2020-01-01T00:00:00Z"}
    world.commit(ended | lost | {"commit": world.commits + 1}, to=world.position)
    assert world.violated() == set()
    elsewhere = ended | lost | {"env": {"A": "b"}, "since": "2019-01-01T00:00:00Z"}
    world.commit(elsewhere | {"commit": world.commits + 1}, to=world.position)
    assert world.violated() == {"steps"}


def test_what_ended_in_a_commit_may_begin_earlier_within_it() -> None:
    """The clock is set back between two decisions of one commit: history tells of both, the ledger of the last one."""
    world = lived_in()
    ended = world.allocation("b", "ended")
    anew = ended | {"since": "2020-01-01T00:00:00Z"}
    world.tell(ended, "allocated")
    world.now[f"{HOST}/b/1"] = ended
    world.refresh(anew)
    world.commit(anew, to=world.position, tell=False)
    assert world.report().violations == ()


def test_what_is_over_does_not_change_when_the_clock_was_set_back() -> None:
    world = lived_in()
    over = dict(next(record for record in world.now.values() if record["state"] in ("ended", "failed")))
    world.commit(
        over | {"since": "2020-01-01T00:00:00Z", "reason": "another", "commit": world.commits + 1}, to=world.position
    )
    assert world.violated() == {"steps"}


def test_dead_letters_of_an_input_that_was_made_anew_are_not_held_against_the_new_one() -> None:
    """Their writer has committed nothing since, and the same offset is another message's now."""
    world = lived_in()
    manager, commits = world.writer, world.commits
    world.writer, world.commits = f"sweeper/{PARTITION}", 0
    world.refuse(world.say(b"odd", key="nobody"))
    world.commit(scope="sweeper")
    world.writer, world.commits, end = manager, commits, world.position
    world.registrations.records.clear()
    world.registrations.end = 0
    for number in range(end):
        world.register(f"f{number}")
        world.sources[f"{HOST}/f{number}/1"] = end + number
    answered = [world.allocation(f"f{number}", "pending") for number in range(end)]
    read = {"topic_id": "B" * 22, "partition": PARTITION, "from": 0, "to": end, "base": end}
    world.commit(*answered, input=read)
    assert check(world.reading()._replace(topic_id="B" * 22)).violations == ()


def test_an_input_made_anew_is_no_violation() -> None:
    world = lived_in()
    world.commit(world.allocation("e", "pending"))
    end = world.position
    world.registrations.records.clear()
    world.registrations.end = 0
    world.register("f")
    world.sources[f"{HOST}/f/1"] = end
    world.commit(
        world.allocation("f", "pending"),
        input={"topic_id": "B" * 22, "partition": PARTITION, "from": 0, "to": 1, "base": end},
    )
    assert check(world.reading()._replace(topic_id="B" * 22)).violations == ()

"""Each kind of violation is planted in a stream that was clean, and the checker finds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outfitter_verify import CHECKS, check
from outfitter_verify.wire import partition_of
from support.streams import HOST, PARTITION, PARTITIONS, TOPIC_ID, World, lived_in

Plant = Callable[[World], None]
PLANTS: dict[str, tuple[str, str, Plant]] = {}


def planted(by: str, says: str = "") -> Callable[[Plant], Plant]:
    """This function plants a violation that the check `by` must find, and tell in words that include `says`."""

    def keep(plant: Plant) -> Plant:
        PLANTS[plant.__name__.replace("_", " ")] = (by, says, plant)
        return plant

    return keep


# --- exclusivity ---


@planted("exclusivity")
def a_device_is_granted_while_another_holds_it(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"]))


@planted("exclusivity")
def a_device_is_granted_under_an_alias_of_its_name(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["card0"], aliases={"card0": ["GPU-0"]}))


@planted("exclusivity")
def a_device_is_granted_as_another_resource(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"], resource="accelerator"))


@planted("exclusivity")
def a_device_that_somebody_has_alone_is_shared(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"], shared=["gpu"]))


@planted("exclusivity")
def a_grant_stands_before_the_release_in_one_transaction(world: World) -> None:
    world.commit(world.allocation("b", "ended"), world.allocation("e", "allocated", devices=["GPU-0"]))
    records = world.allocations.records
    last, grant = records[-2], records[-3]
    records[-2], records[-3] = grant._replace(offset=last.offset), last._replace(offset=grant.offset)


@planted("exclusivity")
def a_device_of_a_releasing_allocation_is_granted(world: World) -> None:
    world.commit(world.allocation("b", "releasing", outcome="ended"))
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"]))


# --- steps ---


@planted("steps")
def what_failed_is_granted_after_all(world: World) -> None:
    world.commit(world.allocation("c", "allocated", devices=["GPU-9"]))


@planted("steps")
def what_failed_ends_once_more(world: World) -> None:
    world.commit(world.allocation("c", "ended"))


@planted("steps")
def what_is_over_is_over_for_another_reason(world: World) -> None:
    world.commit(world.allocation("c", "failed", reason="because"))


@planted("steps")
def what_is_allocated_waits_again(world: World) -> None:
    world.commit(world.allocation("b", "pending"))


@planted("steps")
def a_releasing_allocation_ends_otherwise_than_it_said(world: World) -> None:
    world.commit(world.allocation("b", "releasing", outcome="ended"))
    world.commit(world.allocation("b", "failed"))


@planted("steps")
def a_live_record_is_deleted(world: World) -> None:
    world.commit(f"{HOST}/b/1")


@planted("steps")
def a_deleted_record_comes_back_for_the_same_registration(world: World) -> None:
    world.commit(world.allocation("a", "allocated", devices=["GPU-9"]))


@planted("steps")
def a_record_answers_another_registration_than_before(world: World) -> None:
    world.register("b")
    source = {"partition": PARTITION, "offset": world.registrations.end - 1}
    world.commit(world.allocation("b", "allocated", source=source), world.allocation("e", "pending"))


@planted("steps")
def what_ended_before_it_registered_changes(world: World) -> None:
    world.deregister("f")
    world.commit(world.allocation("f", "ended"), world.allocation("e", "pending"))
    world.commit(world.allocation("f", "ended", reason="another"))


# --- tokens ---


@planted("tokens")
def a_token_is_given_twice(world: World) -> None:
    world.token -= 1
    world.commit(world.allocation("e", "allocated", devices=["GPU-5"]))


@planted("tokens", says="was given before")
def a_token_is_lower_than_the_last_one(world: World) -> None:
    world.token += 5
    world.commit()
    record = world.allocation("e", "allocated", devices=["GPU-5"])
    world.commit(record | {"token": record["token"] - 3})


@planted("tokens")
def two_grants_of_one_commit_have_one_token(world: World) -> None:
    world.register("f")
    grants = [
        world.allocation("e", "allocated", devices=["GPU-5"]),
        world.allocation("f", "allocated", devices=["GPU-6"]),
    ]
    grants[1]["token"] = grants[0]["token"]
    world.commit(*grants)


@planted("tokens")
def a_grant_has_no_token(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-5"], token=None))


@planted("tokens")
def a_grants_token_changes(world: World) -> None:
    world.token += 1
    world.commit(world.allocation("b", "allocated", token=world.token))


@planted("tokens")
def a_token_is_ahead_of_its_checkpoint(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-5"]), token=world.token)
    world.allocations.change(-1, token=world.token - 1)


@planted("tokens")
def the_token_counter_goes_back(world: World) -> None:
    world.commit(token=world.token - 1)


# --- commits ---


@planted("commits")
def a_commit_has_the_number_of_another(world: World) -> None:
    world.commits -= 1
    world.commit()


@planted("commits")
def a_commits_number_is_left_out(world: World) -> None:
    world.commits += 1
    world.commit()


@planted("commits")
def the_first_commit_is_not_number_one(world: World) -> None:
    for stream in (world.allocations, world.history, world.letters, world.registrations):
        stream.records.clear()
        stream.end = 0
    world.now.clear()
    world.position = 0
    world.commit()


@planted("commits")
def a_record_has_no_checkpoint_behind_it(world: World) -> None:
    world.commit(world.allocation("e", "pending"))
    world.allocations.records.pop()


@planted("commits")
def a_record_says_a_commit_that_is_over(world: World) -> None:
    world.commit(world.allocation("e", "pending", commit=2))


@planted("commits")
def a_record_says_a_commit_that_is_yet_to_come(world: World) -> None:
    world.commit(world.allocation("e", "pending", commit=world.commits + 2))


# --- positions ---


@planted("positions")
def a_commit_reads_again_what_was_read(world: World) -> None:
    world.position -= 2
    world.commit(world.allocation("e", "pending"))


@planted("positions")
def a_commit_reads_past_the_end(world: World) -> None:
    world.commit(world.allocation("e", "pending"), to=world.registrations.end + 1)


@planted("positions")
def a_commit_ends_before_it_began(world: World) -> None:
    world.commit(to=world.position - 1)


@planted("positions")
def a_new_manager_begins_behind_where_the_last_one_stopped(world: World) -> None:
    world.say({"type": "heartbeat", "host": HOST, "worker": "b", "incarnation": "1"})
    world.commit(world.allocation("e", "pending"), to=world.registrations.end - 1)
    world.instance, world.position = "third", world.registrations.end
    world.commit()


@planted("positions", says="counts from below it")
def another_input_counts_from_below_the_last_one(world: World) -> None:
    world.commit(input={"topic_id": "B" * 22, "partition": PARTITION, "from": 0, "to": 0})


# --- instances, writers, partitions ---


@planted("instances")
def a_manager_commits_after_its_successor(world: World) -> None:
    world.instance = "first"
    world.commit()


@planted("writers")
def somebody_writes_who_is_not_the_hosts_manager(world: World) -> None:
    world.writer = "host/gpu-4"
    record = world.allocation("e", "pending")
    world.writer = f"host/{HOST}"
    world.commit(record)


@planted("writers")
def a_record_stands_under_anothers_key(world: World) -> None:
    world.commit(world.allocation("e", "pending"))
    record = world.allocations.records[-2]
    world.allocations.records[-2] = record._replace(key=f"{HOST}/f/1".encode())


@planted("writers")
def a_record_is_damaged(world: World) -> None:
    world.commit(world.allocation("e", "pending"))
    world.allocations.records[-2] = world.allocations.records[-2]._replace(value=b'{"type":"alloca')


@planted("writers")
def a_record_lacks_a_field(world: World) -> None:
    world.commit(world.allocation("e", "pending", source=None))


@planted("writers")
def a_record_has_no_key(world: World) -> None:
    world.allocations.append(None, {"type": "allocation"})
    world.allocations.marker()


@planted("writers")
def two_writers_take_turns_with_one_host(world: World) -> None:
    mine = (world.commits, world.token)
    world.writer, world.instance, world.commits = f"partition/{PARTITION}", "replica", 0
    world.commit(world.allocation("e", "pending"))
    world.writer, world.instance, (world.commits, world.token) = f"host/{HOST}", "second", mine
    world.commit(world.allocation("b", "ended"))


@planted("writers")
def a_checkpoint_is_of_another_cluster(world: World) -> None:
    world.commit(world.allocation("e", "pending"), cluster="another")


@planted("partitions")
def a_hosts_record_is_in_another_partition(world: World) -> None:
    other = next(name for number in range(99) if partition_of(name := f"gpu-{number}", PARTITIONS) != PARTITION)
    world.allocations.append(f"@host/{other}", {"type": "host", "host": other})
    world.commit(world.allocation("e", "pending"))


@planted("partitions", says="input partition")
def a_commit_tells_of_another_partitions_input(world: World) -> None:
    world.commit(input={"topic_id": TOPIC_ID, "partition": PARTITION + 1, "from": world.position, "to": world.position})


@planted("partitions")
def a_writer_is_in_another_partition(world: World) -> None:
    world.writer = f"partition/{(PARTITION + 1) % PARTITIONS}"
    world.commits = 0
    world.commit()


@planted("partitions", says="it answers registration partition")
def a_record_answers_a_registration_of_another_partition(world: World) -> None:
    source = {"partition": PARTITION + 1, "offset": world.registrations.end - 1}
    world.commit(world.allocation("e", "pending", source=source))


# --- answers ---


@planted("answers")
def a_registration_is_passed_over(world: World) -> None:
    world.commit()


@planted("answers")
def a_registration_is_passed_over_between_two_commits(world: World) -> None:
    world.position = world.registrations.end
    world.commit()


@planted("answers")
def a_registration_is_answered_in_a_later_commit_only(world: World) -> None:
    world.commit()
    world.commit(world.allocation("e", "pending"))


@planted("answers")
def something_is_granted_that_nobody_asked_for(world: World) -> None:
    world.commit(world.allocation("e", "pending"), world.allocation("ghost", "allocated", devices=["GPU-7"]))


@planted("answers")
def an_answer_names_anothers_registration(world: World) -> None:
    offset = world.register("f")
    world.sources[f"{HOST}/f/1"], world.sources[f"{HOST}/e/1"] = world.sources[f"{HOST}/e/1"], offset
    world.commit(world.allocation("e", "pending"), world.allocation("f", "pending"))


@planted("answers")
def an_answer_comes_before_its_registration_was_read(world: World) -> None:
    world.commit(world.allocation("e", "pending"), to=world.registrations.end - 1)


@planted("answers")
def a_deregistration_is_passed_over(world: World) -> None:
    world.deregister("b")
    world.commit(world.allocation("e", "pending"))


# --- dead letters ---


@planted("dead-letters")
def a_message_that_is_no_registration_is_dropped(world: World) -> None:
    world.say(b"{}")
    world.commit(world.allocation("e", "pending"))


@planted("dead-letters")
def a_message_whose_key_is_another_host_is_dropped(world: World) -> None:
    world.say({"type": "heartbeat", "host": "gpu-4", "worker": "b", "incarnation": "1"})
    world.commit(world.allocation("e", "pending"))


@planted("dead-letters")
def a_message_without_a_key_is_dropped(world: World) -> None:
    offset = world.say({"type": "heartbeat", "host": HOST, "worker": "b", "incarnation": "1"}, key=None)
    world.commit(world.allocation("e", "pending"))
    swept(world, offset + 1)


@planted("dead-letters")
def a_dead_letter_is_written_twice(world: World) -> None:
    offset = world.say(b"[")
    world.refuse(offset)
    world.refuse(offset)
    world.commit(world.allocation("e", "pending"))


@planted("dead-letters", says="not those of its message")
def a_dead_letter_has_other_bytes_than_its_message(world: World) -> None:
    world.refuse(world.say(b"["), sha256="0" * 64)
    world.commit(world.allocation("e", "pending"))


@planted("dead-letters", says="it is no dead letter")
def something_else_stands_among_the_dead_letters(world: World) -> None:
    world.letters.append("x", {"type": "dead-letter"})
    world.commit(world.allocation("e", "pending"))


@planted("dead-letters", says="under the key")
def a_dead_letter_stands_under_anothers_key(world: World) -> None:
    world.refuse(world.say(b"["), source={"topic": world.registrations.topic, "partition": PARTITION, "offset": 0})
    world.commit(world.allocation("e", "pending"))


def swept(world: World, to: int) -> None:
    """The partition's sweeper commits: everything before `to` is either somebody's or a dead letter."""
    mine = (world.writer, world.instance, world.commits, world.token, world.position)
    world.writer, world.instance, world.commits, world.token, world.position = f"sweeper/{PARTITION}", "s", 0, 0, 0
    world.commit(to=to)
    world.writer, world.instance, world.commits, world.token, world.position = mine


@planted("dead-letters")
def a_message_of_a_host_without_a_manager_is_swept_under_the_carpet(world: World) -> None:
    world.commit(world.allocation("e", "pending"))
    stranger = next(f"x{n}" for n in range(99) if partition_of(f"x{n}", PARTITIONS) == PARTITION)
    offset = world.say({"type": "register", "host": stranger, "worker": "w", "incarnation": "1"}, stranger)
    swept(world, offset + 1)


@planted("dead-letters")
def a_message_is_reported_that_a_manager_answers(world: World) -> None:
    world.commit(world.allocation("e", "pending"))
    world.refuse(0, writer=f"sweeper/{PARTITION}")
    swept(world, 1)


# --- history ---


@planted("history")
def a_step_is_not_told(world: World) -> None:
    world.commit(world.allocation("e", "pending"), tell=False)


@planted("history")
def a_step_is_told_that_was_not_taken(world: World) -> None:
    world.tell(world.allocation("b", "ended"), "allocated")
    world.commit(world.allocation("e", "pending"))


@planted("history")
def history_and_ledger_differ_in_a_record(world: World) -> None:
    record = world.allocation("e", "allocated", devices=["GPU-5"])
    world.tell(record | {"token": 99}, None)
    world.commit(record, tell=False)


@planted("history")
def history_tells_of_other_devices_than_the_ledger(world: World) -> None:
    record = world.allocation("e", "allocated", devices=["GPU-5"])
    world.tell(record | {"resources": {"gpu": [{"id": "GPU-6"}]}}, None)
    world.commit(record, tell=False)


@planted("history", says="and its last step led to")
def history_leaves_out_a_step_in_between(world: World) -> None:
    record = world.allocation("b", "ended")
    world.tell(record, "releasing")
    world.commit(record, world.allocation("e", "pending"), tell=False)


@planted("history", says="the ledger has it allocated")
def history_begins_elsewhere_than_the_ledger(world: World) -> None:
    history_leaves_out_a_step_in_between(world)


@planted("history")
def history_takes_a_step_that_there_is_not(world: World) -> None:
    record = world.allocation("e", "failed")
    world.tell(world.allocation("e", "pending"), None)
    world.tell(world.allocation("e", "releasing"), "pending")
    world.tell(record, "releasing")
    world.commit(record, tell=False)


@planted("history")
def a_transitions_record_is_anothers(world: World) -> None:
    record = world.allocation("e", "pending")
    world.tell(record, None, worker="f")
    world.commit(record)


@planted("history", says="rebuilds another record")
def a_refresh_tells_something_else_than_the_ledger_has(world: World) -> None:
    world.refresh(world.allocation("b", "allocated", reason="one"))
    world.commit(world.allocation("b", "allocated", reason="another"), world.allocation("e", "pending"), tell=False)


@planted("history", says="does not tell of a change")
def a_refresh_is_not_told(world: World) -> None:
    world.commit(world.allocation("b", "allocated", reason="another"), tell=False, to=world.position)


@planted("history", says="begins with a step from")
def an_allocation_begins_in_the_middle(world: World) -> None:
    record = world.allocation("e", "allocated", devices=["GPU-5"])
    world.tell(record, "pending")
    world.commit(record, tell=False)


@planted("partitions", says="in another partition")
def a_transition_is_in_another_partition(world: World) -> None:
    other = next(name for number in range(99) if partition_of(name := f"gpu-{number}", PARTITIONS) != PARTITION)
    world.tell(world.allocation("e", "pending") | {"host": other}, None)
    world.commit(world.allocation("e", "pending"))


@planted("history")
def history_holds_something_else(world: World) -> None:
    world.history.append(HOST, b"{")
    world.commit(world.allocation("e", "pending"))


# --- the tests ---


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

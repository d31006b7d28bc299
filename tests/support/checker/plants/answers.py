"""Plants in what workers and people are told: answers, dead letters, history."""

from __future__ import annotations

from outfitter_verify.wire import partition_of
from support.checker.plants import planted
from support.checker.streams import HOST, PARTITION, PARTITIONS, World, compact

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


@planted("dead-letters", says="somebody wrote a tombstone there")
def somebody_deletes_a_dead_letter(world: World) -> None:
    world.letters.append("x", None)
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


@planted("history", says="but its last step led to")
def history_leaves_out_a_step_in_between(world: World) -> None:
    record = world.allocation("b", "ended")
    world.tell(record, "releasing")
    world.commit(record, world.allocation("e", "pending"), tell=False)


@planted("history", says="was allocated in the ledger")
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


@planted("history", says="does not have a change")
def a_refresh_is_not_told(world: World) -> None:
    world.commit(world.allocation("b", "allocated", reason="another"), tell=False, to=world.position)


@planted("history", says="begins with a step from")
def an_allocation_begins_in_the_middle(world: World) -> None:
    record = world.allocation("e", "allocated", devices=["GPU-5"])
    world.tell(record, "pending")
    world.commit(record, tell=False)


def switched_off_and_on(world: World) -> None:
    """History is not written for a while: e waits then, and is told of first when it is granted."""
    world.restart("third", tells=False)
    world.commit(world.allocation("e", "pending"))
    world.restart("fourth", tells=True)
    world.commit(world.allocation("e", "preparing", devices=["GPU-5"]))


@planted("history", says="but its last step led to")
def history_leaves_out_a_step_after_it_was_switched_on(world: World) -> None:
    switched_off_and_on(world)
    world.commit(world.allocation("e", "allocated"), tell=False)
    world.commit(world.allocation("e", "releasing", outcome="ended"))


@planted("history", says="history does not have the step of")
def history_leaves_out_a_whole_commit_after_it_was_switched_on(world: World) -> None:
    switched_off_and_on(world)
    world.tells = False
    world.commit(world.allocation("e", "allocated"))
    world.tells = True
    world.commit()


@planted("history", says="but its last step led to")
def history_leaves_out_a_commit_that_the_ledger_has_no_more(world: World) -> None:
    switched_off_and_on(world)
    world.tells = False
    world.commit(world.allocation("e", "allocated"))
    world.tells = True
    world.commit(world.allocation("e", "releasing", outcome="ended"))
    compact(world.allocations, world.allocations.end)


@planted("history", says="history does not have the step of")
def a_manager_tells_its_commits_but_not_its_only_step(world: World) -> None:
    world.restart("third", tells=True)
    world.commit(world.allocation("e", "pending"), tell=False)


@planted("history", says="but its last step led to")
def history_leaves_out_a_step_before_it_was_switched_off(world: World) -> None:
    world.commit(world.allocation("e", "preparing", devices=["GPU-5"]))
    world.commit(world.allocation("e", "allocated"), tell=False)
    world.commit(world.allocation("e", "releasing", outcome="ended"))
    world.restart("third", tells=False)
    world.commit()
    world.restart("fourth", tells=True)
    world.commit()


@planted("history", says="does not have a change")
def history_leaves_out_a_refresh_after_it_was_switched_on(world: World) -> None:
    switched_off_and_on(world)
    world.commit(world.allocation("e", "preparing", reason="another"), tell=False)


@planted("partitions", says="in another partition")
def a_transition_is_in_another_partition(world: World) -> None:
    other = next(name for number in range(99) if partition_of(name := f"gpu-{number}", PARTITIONS) != PARTITION)
    world.tell(world.allocation("e", "pending") | {"host": other}, None)
    world.commit(world.allocation("e", "pending"))


@planted("history")
def history_holds_something_else(world: World) -> None:
    world.history.append(HOST, b"{")
    world.commit(world.allocation("e", "pending"))

"""Plants in who writes, how often and where: commits, positions, instances, partitions."""

from __future__ import annotations

from outfitter_verify.wire import partition_of
from support.checker.plants import planted
from support.checker.streams import HOST, PARTITION, PARTITIONS, TOPIC_ID, World

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


@planted("positions", says="its numbers start below")
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

"""What is clean passes, whatever compaction, retention or the moment of reading have left of it: no false alarm."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_verify import Control, check
from support.checker.streams import HOST, PARTITION, TOPIC_ID, Player, World, compact, expire, lived_in


def play(seed: int, markers: bool, turns: int) -> World:
    return Player(World(markers=markers), random.Random(seed).randrange).play(turns)


worlds = st.builds(play, st.integers(0, 2**32), st.booleans(), st.integers(1, 25))
parts = st.floats(0, 1)
quick = settings(max_examples=40, deadline=None)


def commit_end(world: World, part: float) -> int:
    """Where about this part of the ledger's commits ends: an offset. A record batch is a whole commit."""
    ends = [record.offset for record in world.allocations.records if (record.key or b"").startswith(b"@checkpoint/")]
    return ends[int(part * (len(ends) - 1))] + 1


@quick
@given(worlds)
def test_a_manager_that_keeps_its_promises_is_found_to_keep_them(world: World) -> None:
    report = world.report()
    assert report.violations == ()
    assert report.complete


@quick
@given(worlds, parts, parts, st.booleans())
def test_a_compacted_ledger_raises_no_alarm(world: World, first: float, second: float, dropped: bool) -> None:
    for upto in sorted(commit_end(world, part) for part in (first, second)):
        compact(world.allocations, upto, drop_tombstones=dropped)
    assert world.report().violations == ()


@quick
@given(worlds, parts, parts, st.booleans())
def test_a_compacted_topic_of_orders_raises_no_alarm(world: World, ledger: float, orders: float, dropped: bool) -> None:
    compact(world.allocations, commit_end(world, ledger), drop_tombstones=dropped)
    last = {record.key: json.loads(record.value or b"") for record in world.control.records}
    for order in (order for order in last.values() if order.get("ended_at")):
        world.control.append(order["id"], None)
    compact(world.control, int(orders * world.control.end), drop_tombstones=dropped)
    assert world.report().violations == ()


@quick
@given(st.integers(0, 2**32), st.integers(1, 25), parts)
def test_a_compaction_that_is_under_way_raises_no_alarm(seed: int, turns: int, upto: float) -> None:
    """The embedded bus removes what was overtaken one by one, and somebody may read in between."""
    world = play(seed, False, turns)
    dice = random.Random(seed)
    before = list(world.allocations.records)
    # tombstones go when what they delete has been gone for long
    compact(world.allocations, int(upto * world.allocations.end), drop_tombstones=False)
    left = set(world.allocations.records)
    world.allocations.records = [record for record in before if record in left or dice.random() < 0.5]
    assert world.report().violations == ()


@quick
@given(worlds, parts, parts, parts)
def test_retention_of_the_other_topics_raises_no_alarm(
    world: World, registrations: float, history: float, letters: float
) -> None:
    # what is not read yet is not deleted here: that would be input that was lost
    expire(world.registrations, int(registrations * world.position))
    expire(world.history, int(history * world.history.end))
    expire(world.letters, int(letters * world.letters.end))
    assert world.report().violations == ()


@quick
@given(worlds, parts)
def test_topics_that_went_on_after_the_ledger_was_read_raise_no_alarm(world: World, part: float) -> None:
    end = commit_end(world, part)
    world.allocations.records = [record for record in world.allocations.records if record.offset < end]
    world.allocations.end = end
    assert world.report().violations == ()


def test_history_that_is_switched_off_raises_no_alarm_and_is_said() -> None:
    world = lived_in()
    world.history.records.clear()
    report = world.report()
    assert report.violations == ()
    assert not report.complete
    assert [check.name for check in report.checks if check.partial] == ["history", "replay"]


@pytest.mark.parametrize("markers", [True, False], ids=["kafka", "embedded"])
@pytest.mark.parametrize("first", [True, False], ids=["on, off, on", "off, on"])
def test_history_that_is_switched_on_again_raises_no_alarm_and_is_said(first: bool, markers: bool) -> None:
    world = World(markers=markers)
    world.tells = first
    world.commit()
    world.register("a")
    world.commit(world.allocation("a", "allocated", devices=["GPU-0"]))
    world.register("b")
    world.commit(world.allocation("b", "pending", queue_position=1))
    world.restart("second", tells=False)
    world.register("c")
    world.register("d")
    world.commit(world.allocation("c", "pending", queue_position=2), world.allocation("d", "pending"))
    world.commit(world.allocation("b", "allocated", devices=["GPU-1"]))
    world.restart("third", tells=True)
    world.commit(world.allocation("b", "allocated", reason="new names"))
    world.commit(world.allocation("c", "pending", queue_position=1), world.allocation("d", "failed"))
    world.deregister("a")
    ended = world.allocation("a", "ended", reason_code="deregistered")
    world.commit(ended, world.allocation("c", "allocated", devices=["GPU-0"]))
    for part in (0.0, 0.5, 0.8, 1.0):
        compact(world.allocations, commit_end(world, part))
        report = world.report()
        assert report.violations == ()
        assert "history" in {check.name for check in report.checks if check.partial}


@pytest.mark.parametrize("again", [True, False], ids=["started again", "same manager"])
def test_a_history_topic_that_was_made_anew_raises_no_alarm(again: bool) -> None:
    world = World()
    world.commit()
    world.register("a")
    world.commit(world.allocation("a", "allocated", devices=["GPU-0"]))
    world.register("b")
    world.commit(world.allocation("b", "pending", queue_position=1))
    world.history.records.clear()
    world.history.end = 0
    world.restart("second" if again else world.instance, tells=True)
    world.commit(world.allocation("a", "allocated", reason="new names"))
    world.commit(world.allocation("b", "allocated", devices=["GPU-1"]))
    report = world.report()
    assert report.violations == ()
    assert [check.name for check in report.checks if check.partial] == ["history"]


def test_orders_that_cannot_be_read_raise_no_alarm_and_are_said() -> None:
    world = lived_in()
    world.commit(f"@cordon/{HOST}/o2", world.allocation("e", "pending"))
    assert world.violated() == {"orders"}
    reading = world.reading()
    [logs] = reading.logs
    report = check(reading._replace(logs=[logs._replace(control=Control(why="nobody may read them"))]))
    assert report.violations == ()
    [orders] = [each for each in report.checks if each.partial]
    assert orders.name == "orders"
    assert "orders are not looked at: nobody may read them" in orders.partial[0]


def test_a_topic_of_orders_that_was_made_anew_raises_no_alarm_and_is_said() -> None:
    """The end of an order may stand in the topic that is gone."""
    world = lived_in()
    world.control.records.clear()
    world.control.end = 0
    world.control_id = "P" * 22
    world.commit(f"@cordon/{HOST}/o2", world.allocation("e", "pending"))
    report = world.report()
    assert report.violations == ()
    assert [each.name for each in report.checks if each.partial] == ["orders"]


def test_a_ledger_that_knows_no_orders_is_looked_at_in_full_without_their_topic() -> None:
    world = World()
    for _ in range(3):
        world.commit(orders=None)
    reading = world.reading()
    [logs] = reading.logs
    report = check(reading._replace(logs=[logs._replace(control=Control())]))
    assert report.violations == ()
    assert report.complete


def test_who_has_a_device_keeps_it_when_an_order_takes_it_out() -> None:
    """…through its preparation, and whatever else is said of it."""
    world = lived_in()
    world.commit(world.allocation("e", "preparing", devices=["GPU-2"]))
    world.order("k")
    world.cordon("k")
    world.commit()
    world.commit(world.allocation("e", "allocated"))
    world.commit(world.allocation("b", "allocated", reason="new names"))
    assert world.report().violations == ()


def test_a_grant_in_the_commit_in_which_an_order_begins_or_ends_raises_no_alarm() -> None:
    """It may have been decided before the order was taken, or after it was ended."""
    world = lived_in()
    world.order("k")
    key = world.cordon("k")
    world.commit(world.allocation("e", "allocated", devices=["GPU-2"]))
    world.register("f")
    world.end_order("k")
    world.commit(key, world.allocation("f", "allocated", devices=["GPU-1"]))
    assert world.report().violations == ()


def test_an_order_whose_time_is_over_ends_by_itself() -> None:
    world = lived_in()
    late = "2099-01-01T00:00:00Z"
    world.order("k", until="2020-01-01T00:00:00Z")
    world.commit(f"@cordon/{HOST}/o2", world.allocation("e", "pending"), at=late)
    for _ in range(5):
        world.commit()
    assert world.report().violations == ()


def test_orders_to_a_host_that_has_no_record_wait_for_it() -> None:
    world = World()
    world.order("k", host="nobody")
    for _ in range(9):
        world.commit()
    assert world.report().violations == ()


def test_who_waits_for_what_an_order_takes_out_waits_rightly() -> None:
    world = lived_in()
    world.order("k")
    world.cordon("k")
    world.commit(world.allocation("e", "pending", reason_code="busy"))
    for _ in range(5):
        world.commit()
    assert world.report().violations == ()


@pytest.mark.parametrize("markers", [True, False], ids=["kafka", "embedded"])
def test_an_order_that_was_read_and_not_taken_is_found_in_compacted_topics(markers: bool) -> None:
    world = lived_in(markers=markers)
    world.order("k", device="GPU-2")
    for _ in range(6):
        world.commit()
    compact(world.allocations, world.allocations.end)
    compact(world.control, world.control.end)
    assert world.violated() == {"orders"}


def test_what_a_later_version_writes_raises_no_alarm_and_is_said() -> None:
    world = lived_in()
    world.history.append(f"{HOST}/b/1", {"type": "novelty"})
    world.allocations.append("@novelty/1", {"type": "novelty"})
    world.allocations.marker()
    world.commit(world.allocation("e", "paused"))
    report = world.report()
    assert report.violations == ()
    assert {check.name for check in report.checks if check.partial} == {"writers", "steps"}


@pytest.mark.parametrize("markers", [True, False], ids=["kafka", "embedded"])
def test_two_live_allocations_of_one_device_are_found_in_a_compacted_ledger(markers: bool) -> None:
    world = lived_in(markers=markers)
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"]))
    world.commit()
    compact(world.allocations, world.allocations.end)
    assert world.violated() == {"exclusivity"}


def test_a_sweeper_beside_a_manager_that_began_later_is_no_violation() -> None:
    """What is nobody's, and what came before the host had a manager, is the sweeper's; the rest is the manager's."""
    world = World()
    world.writer = f"sweeper/{PARTITION}"
    for instance in ("first", "second", "first"):
        world.instance = instance
        world.refuse(world.register("early", instance))
        world.refuse(world.say(b"odd", key=None))
        world.commit(scope="sweeper")
    begin, end = world.position, world.commits
    world.writer, world.commits = f"host/{HOST}", 0
    world.register("late")
    read = {"topic_id": TOPIC_ID, "partition": PARTITION, "from": begin, "to": begin + 1, "begin": begin}
    world.commit(world.allocation("late", "pending"), input=read)
    world.writer, world.commits = f"sweeper/{PARTITION}", end
    world.commit(to=begin + 1, scope="sweeper")
    report = world.report()
    assert report.violations == ()
    assert report.complete


def test_a_dead_letter_from_before_the_ledger_may_come_again() -> None:
    """A lost ledger begins anew, or where its backup was made, and the registrations are still there."""
    world = World()
    offset = world.say(b"odd")
    for _ in range(2):
        world.refuse(offset)
    world.commit()
    assert world.violated() == {"dead-letters"}
    first = world.letters.records[0]
    world.letters.records[0] = first._replace(timestamp_ms=world.allocations.records[0].timestamp_ms - 1)
    assert world.violated() == set()


def test_a_replica_that_gets_a_partition_back_is_no_violation() -> None:
    world = World()
    world.writer = f"partition/{PARTITION}"
    for instance in ("first", "second", "first"):
        world.instance = instance
        world.commit()
    assert world.report().violations == ()


def test_a_queue_that_is_served_in_order_raises_no_alarm() -> None:
    """Whoever is in other trouble, has a record older than the inventory, or wants what is held, waits rightly."""
    world = lived_in()
    world.register("f")
    world.register("g")
    world.commit(
        world.allocation("e", "pending", reason_code="infeasible"),
        world.allocation("f", "pending", reason_code="busy"),
        world.allocation("g", "pending", reason_code="busy"),
    )
    world.host(gpu=None)
    world.commit()
    world.commit(world.allocation("g", "allocated", devices=["GPU-1"], reason_code=None))
    both = {"amounts": {"gpu": 2}, "owner": {"pid": 1}, "lease_s": 30.0}
    world.commit(world.allocation("f", "pending", reason_code="busy", request=both))
    for _ in range(9):
        world.commit()
    assert world.report().violations == ()


@pytest.mark.parametrize("markers", [True, False], ids=["kafka", "embedded"])
def test_a_grant_in_the_commit_that_tells_of_its_device_is_looked_at(markers: bool) -> None:
    """A commit's host records stand behind its allocations."""
    world = lived_in(markers=markers)
    granted = world.allocation("e", "allocated", devices=["GPU-2"])
    world.commit(granted)
    last = world.allocations.records.pop()
    world.allocations.end = last.offset
    world.host(gpu=None)
    world.allocations.append(last.key.decode() if last.key else None, last.value)
    world.allocations.marker()
    report = world.report()
    assert report.violations == ()
    assert not [check.partial for check in report.checks if check.name == "inventory" and check.partial]


def test_devices_that_changed_in_the_commit_of_a_grant_raise_no_alarm_and_are_said() -> None:
    world = lived_in()
    world.inventory({"gpu": {"state": "driver-failed", "devices": []}})
    world.commit(world.allocation("e", "allocated", devices=["GPU-9"]))
    report = world.report()
    assert report.violations == ()
    assert {check.name for check in report.checks if check.partial} == {"inventory"}


def test_a_silence_is_measured_with_a_clock_that_is_behind() -> None:
    """A manager whose clock is behind by an hour ends leases in time."""
    world = World()
    world.commit()
    alone = {"amounts": {"gpu": 1}, "lease_s": 30.0}
    world.register("a")
    world.commit(world.allocation("a", "allocated", devices=["GPU-0"], request=alone), at="2026-01-31T10:50:00Z")
    over = "2026-01-31T10:50:31Z"
    world.commit(world.allocation("a", "ended", reason_code="lease-expired", since=over), at=over)
    assert world.report().violations == ()


def test_deregistrations_on_a_host_whose_ledger_is_damaged_are_refused_and_raise_no_alarm_of_their_own() -> None:
    world = lived_in()
    world.allocations.append(f"{HOST}/odd/1", b"{")
    world.refuse(world.deregister("b"))
    world.commit(world.allocation("e", "pending"))
    assert {violation.check for violation in world.report().violations} == {"writers"}


@pytest.mark.parametrize("in_the_same_commit", [True, False])
def test_a_run_that_registers_again_is_answered_by_its_record_although_that_is_deleted_with_it(
    in_the_same_commit: bool,
) -> None:
    """One that is deleted before that is no answer."""
    world = World()
    world.register("a")
    world.commit(world.allocation("a", "failed", reason_code="timed-out"))
    if not in_the_same_commit:
        world.commit(f"{HOST}/a/1")
    world.register("a")
    world.commit(*([f"{HOST}/a/1"] if in_the_same_commit else []))
    found = [violation.check for violation in world.report().violations]
    assert found == ([] if in_the_same_commit else ["answers"])


@pytest.mark.parametrize("left_out", [0, 3])
def test_a_worker_may_wait_for_free_devices_while_the_host_lacks_names_of_some(left_out: int) -> None:
    world = World()
    world.commit()
    world.inventory({"gpu": {"state": "reported", "devices": [{"id": "GPU-9"}], "names_left_out": left_out}})
    world.register("w")
    world.commit(world.allocation("w", "pending", reason_code="busy"))
    for _ in range(5):
        world.commit()
    assert world.violated() == (set() if left_out else {"queue"})


def test_two_holders_of_parts_are_not_blamed_for_who_has_the_whole() -> None:
    """Nobody knew what is part of what when these were granted."""
    world = lived_in()
    mig = [world.allocation(name, "allocated", devices=[f"MIG-{name}"], resource="mig") for name in "ef"]
    world.commit(*mig, world.allocation("g", "allocated", devices=["GPU-9"]))
    parts = {
        "state": "reported",
        "devices": [{"id": f"MIG-{name}"} for name in "ef"],
        "parts": {"GPU-9": ["MIG-e", "MIG-f"]},
    }
    world.inventory({"gpu": {"state": "reported", "devices": [{"id": "GPU-9"}]}, "mig": parts})
    uses = {"GPU-9": [1, 720720, "parts"]}
    world.commit(*[world.allocation(name, "allocated", uses=uses) for name in "ef"])
    found = [each.what for each in world.report().violations if each.check == "exclusivity"]
    assert sorted(found) == [
        f"gpu-3/{name}/1 holds GPU-9 of host gpu-3, which gpu-3/g/1 holds as well" for name in "ef"
    ]


def test_two_operators_of_a_worker_may_have_a_replica_each_of_one_device() -> None:
    world = lived_in()
    record = world.allocation(
        "e", "allocated", devices=["GPU-2"] * 2, uses={"GPU-2": [720720, 720720, "replicas"]},
        operators={"one": {"resources": {"gpu": ["GPU-2"]}}, "two": {"resources": {"gpu": ["GPU-2"]}}},
    )  # fmt: skip
    wanted = {"gpu": {"amount": 1}}
    record["request"] |= {"amounts": {"gpu": 2}, "operators": {"one": wanted, "two": wanted}}
    world.commit(record)
    assert [each for each in world.report().violations if each.check == "operators"] == []


def test_parts_of_one_device_replicas_and_a_worker_that_shares_what_it_has_a_part_of_raise_no_alarm() -> None:
    world = lived_in()
    part = {"GPU-9": [1, 720720, "parts"]}
    both = {"GPU-8": [1, 720720, "parts+shared"]}
    half = {"GPU-7": [360360, 720720, "replicas"]}
    world.inventory(
        {
            "gpu": {"state": "reported", "devices": [{"id": f"GPU-{n}"} for n in (0, 7, 8, 9)]},
            "mig": {
                "state": "reported",
                "devices": [{"id": f"MIG-{n}"} for n in (81, 91, 92)],
                "parts": {"GPU-8": ["MIG-81"], "GPU-9": ["MIG-91", "MIG-92"]},
            },
        }
    )
    world.commit(
        world.allocation("e", "allocated", devices=["MIG-91"], resource="mig", uses=part),
        world.allocation("f", "allocated", devices=["MIG-92"], resource="mig", uses=part),
        world.allocation("g", "allocated", devices=["GPU-7"], uses=half),
        world.allocation("i", "allocated", devices=["GPU-7"], uses=half),
    )
    record = world.allocation("j", "allocated", devices=["MIG-81"], resource="mig", uses=both)
    record["resources"]["mon"], record["shared"] = [{"id": "GPU-8"}], ["mon"]
    world.commit(record)
    assert [each for each in world.report().violations if each.check == "exclusivity"] == []

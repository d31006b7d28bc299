"""Leases: silence ends them, but only for a manager that hears; times are virtual where they matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from outfitter_proto.bus import BusUnavailableError
from outfitter_proto.records import Allocation, Owner, ResolvedRequest, Source
from outfitter_proto.support.processes import boot_id, pid_namespace
from outfitter_service.core.state.ledger import Ledger, PutAllocation
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.liveness import silence
from outfitter_service.runtime.liveness.deaths import LAST_WORDS_S
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.processor import Limits
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus, no_faults
from support.checker.verdict import verdict
from support.managers.assignments import assignment_of
from support.managers.in_process import CLUSTER, HOST, TOPICS, another, deregister, heartbeat, register, static
from support.wire_samples import AT

SHORT = 0.4


def record(
    worker: str, incarnation: str = "1", *, lease_s: float | None = 10.0, offset: int = 0, **fields: Any
) -> Allocation:
    return Allocation(
        host=HOST, worker=worker, incarnation=incarnation, state="allocated", since=AT, writer="host/h", commit=1,
        request=ResolvedRequest(amounts={"gpu": 1}, lease_s=lease_s), source=Source(partition=0, offset=offset),
        **fields,
    )  # fmt: skip


class StoppedClock(Clock):
    """Monotonic seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def is_requested(tracker: LivenessTracker) -> bool:
    """Whether the tracker wants a sample of the input's end that is not begun."""
    return tracker.input_end._requested.is_set()


class TrackerDriver:
    """A tracker with a clock of its own and an input whose end is what the test says."""

    def __init__(self, bus: FaultyBus) -> None:
        self.bus = bus
        self.clock = StoppedClock()
        self.liveness = LivenessTracker(
            assignment_of(bus), grace_s=2.0, default_lease_s=30.0, wake=lambda: None, clock=self.clock
        )

    async def sample(self) -> None:
        """Let the end of the input be sampled, as it is when a lease is suspected."""
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(10):
            while is_requested(self.liveness):  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.001)
            await self.bus._inner.offsets(TOPICS.registrations, 0)  # answered in turn: after the one that was asked for
        await anyio.wait_all_tasks_blocked()

    def expired(self, position: int) -> list[str]:
        return [event.allocation for event in self.liveness.expired(lambda _: position)]


@pytest.fixture
async def tracker(bus: FaultyBus) -> Any:
    from outfitter_proto import topics as all_topics

    await all_topics.create(bus, CLUSTER, partitions=1)
    driver = TrackerDriver(bus)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.liveness.listen)
        yield driver
        tasks.cancel_scope.cancel()
    driver.liveness.close()


def ledger_of(*records: Allocation) -> Ledger:
    ledger = Ledger()
    for each in records:
        ledger.restore(PutAllocation(each.key, each))
    return ledger


async def test_a_lease_ends_after_lease_and_grace_once_everything_sent_before_was_heard(
    bus: FaultyBus, tracker: TrackerDriver
) -> None:
    await tracker.liveness.restart(ledger_of(record("w")), None)
    for _ in range(3):
        await bus.publish(TOPICS.registrations, 0, checker_entry())
    tracker.clock.now += 11.9
    assert tracker.expired(3) == []
    tracker.clock.now += 0.2  # lease and grace are over: suspected, not judged
    assert tracker.expired(3) == []
    await tracker.sample()
    assert tracker.expired(2) == []  # one message is not decided yet: it may be a heartbeat
    assert tracker.expired(3) == ["h/w/1"]
    assert tracker.expired(3) == []


async def test_the_end_of_a_topic_that_was_made_anew_ends_no_lease(bus: FaultyBus, tracker: TrackerDriver) -> None:
    """Its messages count from 0: they seem decided, and nobody has read them."""
    await tracker.liveness.restart(ledger_of(record("w")), None)
    tracker.liveness.input_end.reset(3)  # of the former topic
    await bus.publish(TOPICS.registrations, 0, checker_entry())
    tracker.clock.now += 12.1
    assert tracker.expired(3) == []
    await tracker.sample()
    assert tracker.expired(3) == []
    tracker.liveness.input_end.reset(0)  # the manager reads the new one
    tracker.clock.now += 12.1
    assert tracker.expired(0) == []
    await tracker.sample()
    assert tracker.expired(0) == []
    assert tracker.expired(1) == [record("w").key]


async def test_a_death_waits_for_what_was_said_before_it_but_not_for_ever(
    bus: FaultyBus, tracker: TrackerDriver
) -> None:
    """Where registrations pile up or the bus is away, the device is worth more than the right word for the end."""
    gone = Owner(pid=2**22 + 1, start_ticks=1, pid_ns=pid_namespace() or 0, boot_id=boot_id() or "")
    await bus.publish(TOPICS.registrations, 0, checker_entry())
    await bus.publish(TOPICS.registrations, 0, checker_entry())
    request = ResolvedRequest(amounts={"gpu": 1}, owner=gone)
    await tracker.liveness.restart(ledger_of(structs.replace(record("w"), request=request)), None)
    assert tracker.liveness.deaths(2) == []  # the end has not been sampled since it was seen
    await tracker.sample()
    assert tracker.liveness.deaths(1) == []
    tracker.clock.now += LAST_WORDS_S
    assert [event.allocation for event in tracker.liveness.deaths(1)] == ["h/w/1"]
    assert tracker.liveness.deaths(1) == []
    # the input begins anew, at an offset that is lower than the one that was sampled
    await tracker.liveness.restart(ledger_of(structs.replace(record("w"), request=request)), None)
    await tracker.sample()
    tracker.liveness.renew_all()
    assert tracker.liveness.deaths(2) == []
    await tracker.sample()
    assert len(tracker.liveness.deaths(2)) == 1


def checker_entry() -> Any:
    from outfitter_proto.bus import Entry

    return Entry(b"other", b"{}")


async def test_a_heartbeat_that_was_queued_before_the_judgement_keeps_the_lease(
    bus: FaultyBus, tracker: TrackerDriver
) -> None:
    """As after a manager was stopped for longer than the lease: what waits in the queue is heard first."""
    await tracker.liveness.restart(ledger_of(record("w")), None)
    await bus.publish(TOPICS.registrations, 0, checker_entry())
    tracker.clock.now += 3600
    assert tracker.expired(0) == []
    await tracker.sample()
    assert tracker.expired(0) == []
    tracker.liveness.renew(["h/w/1"])  # the queue was decided, and a heartbeat was in it
    assert tracker.expired(1) == []
    tracker.clock.now += 12.1
    assert tracker.expired(1) == []
    await tracker.sample()
    assert tracker.expired(1) == ["h/w/1"]


async def test_an_end_sampled_before_the_deadline_judges_nobody(bus: FaultyBus, tracker: TrackerDriver) -> None:
    await tracker.liveness.restart(ledger_of(record("a", lease_s=1.0), record("b", lease_s=5.0)), None)
    tracker.clock.now += 3.1
    tracker.expired(0)
    await tracker.sample()
    assert tracker.expired(0) == ["h/a/1"]
    tracker.clock.now += 4
    assert tracker.expired(0) == []
    await tracker.sample()
    assert tracker.expired(0) == ["h/b/1"]


async def test_where_the_input_is_never_read_to_its_end_each_lease_ends_after_its_own_sample(
    bus: FaultyBus, tracker: TrackerDriver
) -> None:
    names = [f"w{number}" for number in range(12)]
    await tracker.liveness.restart(ledger_of(*(record(name, lease_s=1.0 + n) for n, name in enumerate(names))), None)
    tracker.clock.now += 2.1
    ended: list[str] = []
    for position in range(0, 20, 2):
        tracker.clock.now += 1
        await bus.publish(TOPICS.registrations, 0, checker_entry())
        await bus.publish(TOPICS.registrations, 0, checker_entry())
        ended += tracker.expired(position - 2)  # four more messages are in the input, and it stays like that
        await tracker.sample()
    assert ended == [f"h/{name}/1" for name in names[:8]]


async def test_however_long_the_input_is_behind_the_samples_of_its_end_are_bounded(
    bus: FaultyBus, tracker: TrackerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "MOST_SAMPLES", 4)
    names = [f"w{number}" for number in range(20)]
    await tracker.liveness.restart(ledger_of(*(record(name, lease_s=1.0 + n) for n, name in enumerate(names))), None)
    tracker.clock.now += 2.1
    for position in range(20):
        tracker.clock.now += 1
        await bus.publish(TOPICS.registrations, 0, checker_entry())
        assert tracker.expired(0) == []
        await tracker.sample()
        assert len(tracker.liveness._silence._samples) <= 4, position
    assert tracker.expired(2) == ["h/w0/1"]
    assert len(tracker.expired(20)) == 19


async def test_of_many_silent_ones_some_are_judged_in_a_turn_and_each_when_its_host_was_heard(
    tracker: TrackerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases that cannot be judged yet are before the others, and more than are looked at in one turn."""
    monkeypatch.setattr(silence, "SUSPECTS_AT_ONCE", 4)
    records = [structs.replace(record("w", lease_s=1.0 + n / 100), host=f"h{n:02}") for n in range(30)]
    await tracker.liveness.restart(ledger_of(*records), None)
    tracker.clock.now += 100
    ended: list[str] = []
    asked: list[str] = []

    def heard(host: str) -> int:
        asked.append(host)
        return 0 if host >= "h20" else -1

    def a_round() -> None:
        more = True
        while more:
            asked.clear()
            judged = tracker.liveness.expired(heard)
            assert len(asked) <= 4
            ended.extend(event.allocation for event in judged)
            more = tracker.liveness.more_suspects

    a_round()
    await tracker.sample()
    a_round()
    assert sorted(ended) == [f"h{n}/w/1" for n in range(20, 30)]
    assert len(tracker.liveness.leases) == 20


async def test_while_the_bus_is_away_nobody_is_silent_and_then_everybody_has_a_whole_lease(
    bus: FaultyBus, tracker: TrackerDriver
) -> None:
    """Lease and grace of the first are over when the bus comes back, and those of the second soon after. The samples
    of the end that succeed then must judge neither before a whole lease and the grace."""
    await tracker.liveness.restart(ledger_of(record("w"), record("x", lease_s=100.0)), None)

    async def away(point: str) -> None:
        raise BusUnavailableError("away")

    async def sampled() -> list[str]:
        tracker.expired(0)
        tracker.liveness.input_end.request_sample()
        await tracker.sample()
        return tracker.expired(0)

    bus.script = away
    tracker.clock.now += 99
    assert await sampled() == []
    bus.script = no_faults
    assert await sampled() == []
    tracker.clock.now += 11.9
    assert await sampled() == []
    tracker.clock.now += 0.2
    assert await sampled() == ["h/w/1"]
    tracker.liveness.forget("h/w/1")
    tracker.clock.now += 89.8
    assert await sampled() == []
    tracker.clock.now += 0.2
    assert await sampled() == ["h/x/1"]


async def test_a_restart_gives_everybody_a_whole_lease_anew(tracker: TrackerDriver) -> None:
    await tracker.liveness.restart(ledger_of(record("w")), None)
    tracker.clock.now += 11
    await tracker.liveness.restart(ledger_of(record("w")), None)
    tracker.clock.now += 11
    assert tracker.expired(0) == []
    assert not is_requested(tracker.liveness)


async def test_whose_record_is_gone_after_a_restart_has_a_whole_lease_when_it_comes_again(
    tracker: TrackerDriver,
) -> None:
    await tracker.liveness.restart(ledger_of(record("w"), record("x")), None)
    await tracker.liveness.restart(ledger_of(record("x")), None)
    assert tracker.liveness.leases.keys() == {"h/x/1"}
    tracker.clock.now += 11
    tracker.liveness.apply_committed({"h/w/1": record("w", offset=1)})
    assert tracker.liveness.leases.deadline("h/w/1") == tracker.clock.now + 12


async def test_an_older_incarnation_without_a_lease_gets_one_when_a_newer_one_is_there(tracker: TrackerDriver) -> None:
    old = record("w", "old", lease_s=None, offset=1)
    await tracker.liveness.restart(ledger_of(old, record("w", "new", lease_s=None, offset=2)), None)
    tracker.clock.now += 32.1
    tracker.expired(0)
    await tracker.sample()
    assert tracker.expired(0) == ["h/w/old"]


async def test_a_suspended_machine_gives_everybody_a_whole_lease_anew(
    tracker: TrackerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tracker.liveness.restart(ledger_of(record("w")), None)
    monkeypatch.setattr(tracker.liveness._silence._suspend, "_ahead", tracker.liveness._silence._suspend._ahead - 3600)
    tracker.clock.now += 100
    assert tracker.expired(0) == []
    assert not is_requested(tracker.liveness)


# --- through the whole manager -----------------------------------------------------------------------------


async def test_silence_ends_an_allocation_and_the_next_worker_has_its_device(serve: Serve) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1, lease_s=SHORT), register("next", gpu=1, lease_s=None))
        await manager.state("w", "allocated")
        ended = await manager.state("w", "ended")
        assert ended["reason_code"] == "lease-expired"
        await manager.state("next", "allocated")
        await manager.reported()
        assert manager.metric("outfitter_lease_expiries_total") == 1
        assert manager.metric("outfitter_releases_total", reason="lease-expired") == 1


async def test_heartbeats_keep_a_lease_and_write_nothing(serve: Serve) -> None:
    async with serve(static(2)) as manager:
        lease_s = 5 * SHORT  # longer than a machine that is busy elsewhere keeps a heartbeat back
        await manager.say(register("w", gpu=1, lease_s=lease_s), register("silent", gpu=1, lease_s=lease_s))
        await manager.state("w", "allocated")
        while (await manager.records()).get("h/silent/1", {}).get("state") != "ended":
            await manager.say(heartbeat("w"))
            await anyio.sleep(0.05)
        _, before = await manager.bus.offsets(TOPICS.allocations, 0)
        for _ in range(20):
            await manager.say(heartbeat("w"))
            await anyio.sleep(0.05)
        assert (await manager.records())["h/w/1"]["state"] == "allocated"
        assert (await manager.bus.offsets(TOPICS.allocations, 0))[1] == before
        await manager.state("w", "ended")


async def test_an_outage_that_nothing_but_the_input_notices_gives_a_whole_lease_anew(
    bus: FaultyBus, serve: Serve
) -> None:
    """Nothing was to be committed and no lease was suspected meanwhile, but heartbeats could not arrive."""
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1, lease_s=3600.0))
        await manager.state("w", "allocated")
        await manager.reported()
        deadline = manager.processor.liveness.leases.deadline("h/w/1")

        async def deaf(point: str) -> None:
            if point.startswith(("fetch", "open_reader")):
                raise BusUnavailableError("away")

        bus.script = deaf
        with anyio.fail_after(10):
            while manager.processor.ready:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        bus.script = no_faults
        await manager.ready()
        assert manager.processor.liveness.leases.deadline("h/w/1") > deadline


async def test_while_an_answer_of_the_bus_is_late_nobody_is_silent_and_afterwards_that_time_does_not_count(
    bus: FaultyBus, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage that is over before a request has failed: the first sample of the end may come before a heartbeat. No
    lease begins anew: a bus that is slow for hours would keep the devices of the dead for as long."""
    async with serve(static(1)) as manager:
        reader, leases, anew = manager.processor.inputs.reader, manager.processor.liveness.leases, list[float]()
        monkeypatch.setattr(leases, "renew_all", anew.append)

        async def reader_is(*, late: bool) -> None:
            bus.late_s = 1.0 if late else 0.0
            with anyio.fail_after(10):
                while reader.is_late != late:  # noqa: ASYNC110 - it tells nobody
                    await anyio.sleep(0.01)

        await reader_is(late=True)
        await manager.say(register("w", gpu=1, lease_s=SHORT), register("x", gpu=1, lease_s=None, wait_s=SHORT + 1.0))
        await manager.state("w", "allocated")
        await manager.state("x", "failed")  # so deadlines were checked, long after the lease
        assert (await manager.records())["h/w/1"]["state"] == "allocated"
        over = leases.deadline("h/w/1")
        await reader_is(late=False)
        assert leases.deadline("h/w/1") > over
        assert anew == []
        await manager.state("w", "ended")


async def test_an_answer_that_never_comes_is_an_outage_whose_length_is_added_to_no_lease(
    bus: FaultyBus, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody has a whole lease after it, however long it lasted."""
    async with serve(static(1)) as manager:
        reader, added = manager.processor.inputs.reader, list[float]()
        monkeypatch.setattr(reader, "_on_late", added.append)

        async def deaf(point: str) -> None:
            if point.startswith(("fetch", "open_reader")):
                raise BusUnavailableError("away")

        bus.late_s = 1.0
        with anyio.fail_after(10):
            while not reader.is_late:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        bus.script, bus.late_s = deaf, 0.0
        with anyio.fail_after(10):
            while manager.processor.ready:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        bus.script = no_faults
        await manager.ready()
        with anyio.fail_after(10):
            while reader.is_late:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        assert added == []


async def test_a_newer_incarnation_waits_until_the_older_ones_lease_is_over(serve: Serve) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("w", "old", gpu=1, lease_s=SHORT))
        await manager.state("w", "allocated", "old")
        await manager.say(register("w", "new", gpu=1, lease_s=None))
        await manager.state("w", "pending", "new")
        with anyio.move_on_after(20):
            while (await manager.records())["h/w/old"]["state"] == "allocated":
                await manager.say(heartbeat("w", "old"))  # renews nothing
                await anyio.sleep(0.05)
        assert (await manager.state("w", "ended", "old"))["reason_code"] == "lease-expired"
        await manager.state("w", "allocated", "new")


async def test_an_older_incarnation_without_a_lease_ends_one_default_lease_after_the_newer_one_came(
    serve: Serve,
) -> None:
    async with serve(static(1), lease_s=SHORT) as manager:
        await manager.say(register("w", "old", gpu=1, lease_s=None))
        await manager.state("w", "allocated", "old")
        await manager.say(register("w", "new", gpu=1, lease_s=None))
        assert (await manager.state("w", "ended", "old"))["reason_code"] == "lease-expired"
        await manager.state("w", "allocated", "new")


async def test_an_older_incarnation_can_neither_renew_nor_release_the_newer_one(serve: Serve) -> None:
    async with serve(static(2)) as manager:
        await manager.say(register("w", "old", gpu=1), register("w", "new", gpu=1), deregister("w", "old"))
        await manager.state("w", "ended", "old")
        await manager.say(heartbeat("w", "old"), register("w", "old", gpu=1), register("next", gpu=1))
        await manager.state("next", "allocated")
        records = await manager.records()
        assert records["h/w/new"]["state"] == "allocated"
        assert records["h/w/old"]["state"] == "ended"


async def test_the_default_lease_and_wait_apply_where_a_registration_does_not_say(serve: Serve) -> None:
    async with serve(static(1), lease_s=SHORT, wait_s=0.2, limits=Limits(lease_grace_s=60.0)) as manager:
        await manager.say(register("w", gpu=1), register("late", gpu=1), register("patient", gpu=1, wait_s=3600))
        assert (await manager.state("w", "allocated"))["request"]["lease_s"] == SHORT
        assert (await manager.state("late", "failed"))["reason_code"] == "waited-too-long"
        await manager.state("patient", "pending")


async def test_a_wait_deadline_is_wall_time_and_goes_on_over_a_restart(serve: Serve, tmp_path: Path) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1), register("late", gpu=1, wait_s=2.0))
        await manager.until(lambda records: "h/late/1" in records)
    await anyio.sleep(2.0)
    async with serve(static(1), identity=another()) as manager:
        assert (await manager.state("late", "failed"))["reason_code"] == "waited-too-long"
    assert (await verdict(manager.bus.url)).violations == ()

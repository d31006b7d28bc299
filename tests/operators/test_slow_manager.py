"""A worker waits for a manager that lives and is slow, and not for one that is dead or stopped."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from msgspec import UNSET, structs

from outfitter import NoManagerError, WaitedTooLongError
from outfitter.session import worker_session
from outfitter.session.worker_session import WorkerSession
from outfitter_proto import codec, keys, names, topics
from outfitter_proto.bus import Bus, BusUnavailableError, Entry, connect
from outfitter_proto.bus.patience import Patience
from outfitter_proto.records import (
    Allocation,
    Beat,
    Checkpoint,
    CommitNumber,
    Host,
    InputPosition,
    ManagerIdentity,
    Register,
    ResolvedRequest,
    Source,
    Token,
)
from outfitter_proto.signs_of_life import SignsOfLife
from outfitter_proto.support import manager_lock
from outfitter_proto.support.processes import boot_id, process_owner
from support.bus.faulty_bus import FaultyBus

WITHIN_S = 30.0
HOST = "slow"


@pytest.fixture
async def bus(url: str) -> AsyncIterator[Bus]:
    async with connect(url) as bus:
        await topics.create(bus, "outfitter", partitions=1)
        yield bus


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_session, "LOOK_AGAIN", 0.3)


def ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


async def put(bus: Bus, record: Host | Checkpoint | Allocation) -> None:
    await bus.publish(names.topics().allocations, 0, Entry(record.key.encode(), codec.encode(record)))


async def has_manager(
    bus: Bus, *, wrote: float, beat_s: Any = UNSET, stopped: bool = False, boot: str | None = "elsewhere"
) -> None:
    """A manager of the host wrote so many seconds ago."""
    at = ago(wrote)
    manager = ManagerIdentity(instance="i", version="1", since=at, boot_id=boot, stopped_at=at if stopped else None)
    await put(bus, Host(host=HOST, manager=manager, since=at))
    await put(
        bus,
        Checkpoint(
            writer=keys.host_writer(HOST), instance="i", cluster="outfitter", scope="host", commit=CommitNumber(1),
            token=Token(0), at=at, input=InputPosition(topic_id="t", partition=0, from_=0, to=0), beat_s=beat_s,
            boot_id=boot,
        ),
    )  # fmt: skip


async def beats(bus: Bus, **more: Any) -> None:
    beat = Beat(writer=keys.host_writer(HOST), instance="i", version="1", **more)
    await bus.publish(names.managers_topic(), 0, Entry(beat.key.encode(), codec.encode(beat)))


async def answer(bus: Bus, asked: Register) -> None:
    """The manager fails the worker, which is an answer."""
    record = Allocation(
        host=asked.host, worker=asked.worker, incarnation=asked.incarnation, state="failed", since=ago(0),
        request=ResolvedRequest(amounts={}), writer=keys.host_writer(HOST), commit=CommitNumber(2),
        source=Source(partition=0, offset=0), reason="no such gpu", reason_code="unknown-resource",
    )  # fmt: skip
    await put(bus, record)


def session(
    bus: Bus, *, wait_s: float | None = None, manager_patience: float | None = 0.2, **more: Any
) -> WorkerSession:
    asked = Register(host=HOST, worker="w", incarnation="1", resources={}, wait_s=wait_s)
    return WorkerSession(bus, asked, manager_patience=manager_patience, **more)


async def waits_for_an_answer(bus: Bus, caplog: pytest.LogCaptureFixture, sign: str) -> None:
    """The worker goes on and says so once, until the answer comes."""
    asked = session(bus)
    with caplog.at_level(logging.WARNING, "outfitter"), anyio.fail_after(WITHIN_S):
        async with anyio.create_task_group() as tasks, asked:

            async def be_slow() -> None:
                while not any("waits on" in line for line in caplog.messages):  # noqa: ASYNC110
                    await anyio.sleep(0.02)
                for _ in range(3):  # it looks again, and says nothing more
                    looked.clear()
                    while not looked:  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                await answer(bus, asked.registration)

            looked: list[None] = []
            lookup = asked._lookup

            def look() -> Any:
                looked.append(None)
                return lookup()

            asked._lookup = look  # type: ignore[method-assign]
            tasks.start_soon(be_slow)
            with pytest.raises(Exception, match="no such gpu"):
                await asked.wait()
    assert [line for line in caplog.messages if "waits on" in line] == [
        f"{HOST}/w/1: no answer for 0.2 s, and waits on: {sign}"
    ]


async def gives_up(bus: Bus, match: str) -> None:
    with pytest.raises(NoManagerError, match=match), anyio.fail_after(WITHIN_S):
        async with session(bus) as asked:
            await asked.wait()


async def test_a_manager_that_wrote_within_the_last_minute_is_waited_for(
    bus: Bus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outfitter.session.manager_lookup._ago", lambda _: "4 s ago")
    await has_manager(bus, wrote=4)
    await waits_for_an_answer(bus, caplog, "its manager last wrote 4 s ago")


class HoldingBack(FaultyBus):
    """A bus whose quota holds the worker back."""

    clock: Patience

    @property
    def patience(self) -> Patience:
        return self.clock


async def test_time_for_which_the_bus_holds_a_worker_back_is_no_sign_that_there_is_no_manager(bus: Bus) -> None:
    async with HoldingBack(bus.url) as slow:
        slow.clock = Patience()
        slow.clock.throttle(3600)
        asked = session(slow)
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks, asked:

                async def answer_late() -> None:
                    await anyio.sleep(1)  # longer than it would wait otherwise
                    await answer(bus, asked.registration)

                tasks.start_soon(answer_late)
                with pytest.raises(Exception, match="no such gpu"):
                    await asked.wait()


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_an_outage_after_the_registration_is_no_sign_that_there_is_no_manager(
    url: str, bus: Bus, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    del bus  # it made the topics
    works_again = anyio.Event()

    async def be_away(point: str) -> None:
        if point not in {"fetch:before", "stable_end:before", "open_reader:before"} or works_again.is_set():
            return
        if how == "hangs":
            await works_again.wait()
        else:
            raise BusUnavailableError("the broker refuses connections")

    async with FaultyBus(url) as faulty:
        asked = session(faulty)
        with caplog.at_level(logging.WARNING, "outfitter"), anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks, asked:
                faulty.script = be_away

                async def come_back() -> None:
                    while not any("waits on" in line for line in caplog.messages):  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                    await answer(faulty, asked.registration)
                    works_again.set()

                tasks.start_soon(come_back)
                with pytest.raises(Exception, match="no such gpu"):
                    await asked.wait()
    assert f"{HOST}/w/1: no answer for 0.2 s, and waits on: the ledger cannot be read now" in caplog.messages


async def test_a_manager_that_wrote_longer_ago_and_says_nothing_is_not(bus: Bus) -> None:
    await has_manager(bus, wrote=61)
    await gives_up(bus, "its manager last wrote 1 min ago .* and has not reported that it stopped")


async def test_the_evidence_of_a_record_ends_after_a_minute(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outfitter.session.manager_lookup.RECENT_S", 2.0)
    await has_manager(bus, wrote=0)
    await gives_up(bus, "its manager last wrote .* s ago")


async def test_a_manager_that_says_that_it_lives_is_waited_for_however_long_ago_it_wrote(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    await has_manager(bus, wrote=4000, beat_s=60.0)
    await beats(bus)
    await waits_for_an_answer(bus, caplog, "its manager says on the bus that it lives")


async def test_a_manager_on_the_workers_own_machine_is_waited_for_by_its_process(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    own = process_owner()
    assert own is not None
    await has_manager(bus, wrote=4000, beat_s=60.0)
    await beats(bus, process=own)
    await waits_for_an_answer(bus, caplog, "its manager runs on this machine")


async def test_a_manager_on_the_workers_own_machine_is_waited_for_by_its_lock(
    bus: Bus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_lock, "is_held", lambda host: host == HOST)
    await has_manager(bus, wrote=4000, boot=boot_id())
    await waits_for_an_answer(bus, caplog, "its manager holds this machine's lock")


async def test_a_lock_for_a_host_whose_manager_ran_elsewhere_is_somebody_elses(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_lock, "is_held", lambda _: True)
    await has_manager(bus, wrote=4000)
    await gives_up(bus, "its manager last wrote 1 h ago")


async def test_a_manager_that_is_certainly_dead_is_not_waited_for_although_it_wrote_just_now(bus: Bus) -> None:
    await has_manager(bus, wrote=4, beat_s=20.0)
    await gives_up(bus, "its manager was killed, or hangs: last heard more than 3 min ago; other hosts served: none")


async def test_a_manager_whose_process_is_gone_is_dead_at_once(bus: Bus) -> None:
    own = process_owner()
    assert own is not None
    await has_manager(bus, wrote=1, beat_s=20.0)
    await beats(bus, process=structs.replace(own, start_ticks=own.start_ticks + 1))
    await gives_up(bus, r"its manager was killed, or hangs: last heard \d+ s ago")


async def test_a_manager_that_stopped_is_not_waited_for(bus: Bus) -> None:
    await has_manager(bus, wrote=4, stopped=True)
    await gives_up(bus, r"its manager i was stopped \d+ s ago")


async def test_a_manager_of_a_partition_that_said_that_it_stopped_is_not_waited_for(bus: Bus) -> None:
    await has_manager(bus, wrote=4, beat_s=20.0)
    await beats(bus, stopped_at=ago(3))
    await gives_up(bus, r"its manager i was stopped \d+ s ago")


async def test_whoever_said_how_long_to_wait_waits_no_longer(bus: Bus) -> None:
    await has_manager(bus, wrote=4)
    with pytest.raises(NoManagerError, match="its manager last wrote"), anyio.fail_after(WITHIN_S):
        async with session(bus, waits_on=False) as asked:
            await asked.wait()


@pytest.mark.parametrize("waits_for_manager", [False, True])
async def test_a_manager_that_hangs_is_waited_for_no_longer_than_the_worker_may_wait(
    bus: Bus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, waits_for_manager: bool
) -> None:
    """Its process is there, as after SIGSTOP, and its last sign is older than three intervals."""
    monkeypatch.setattr(worker_session, "VERDICT_GRACE", 1.5)
    monkeypatch.setattr(manager_lock, "is_held", lambda host: host == HOST)
    monkeypatch.setattr(SignsOfLife, "runs_here", lambda *_: True)
    await has_manager(bus, wrote=4000, beat_s=20.0, boot=boot_id())
    lives = (
        "lives (a process on this machine), but was last heard more than 3 min ago: see its log, and whether it is "
        "stopped or on another bus"
    )
    hangs = f"the manager of host '{HOST}' {lives}"
    asked = session(bus, wait_s=0.5, manager_patience=None if waits_for_manager else 0.2)
    with (
        caplog.at_level(logging.WARNING, "outfitter"),
        pytest.raises(WaitedTooLongError, match=re.escape(f"no verdict on {HOST}/w/1 within 0.5 s: {hangs}")) as caught,
        anyio.fail_after(WITHIN_S),
    ):
        async with asked:
            await asked.wait()
    assert caught.value.code == "waited-too-long"
    assert caplog.messages == (
        []
        if waits_for_manager
        else [
            f"{HOST}/w/1: no answer for 0.2 s, and waits on: its manager runs on this machine",
            f"{HOST}/w/1: still no answer: {hangs}",
        ]
    )


async def test_who_waits_for_a_manager_of_no_cluster_waits_no_longer_than_it_may(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "VERDICT_GRACE", 0.2)
    async with connect(url) as bus:
        asked = session(bus, wait_s=0.1, manager_patience=None)
        with (
            pytest.raises(WaitedTooLongError, match=r"within 0.1 s: there is no cluster 'outfitter' on "),
            anyio.fail_after(WITHIN_S),
        ):
            async with asked:
                await asked.wait()


def test_the_lock_of_a_manager_is_seen_while_it_is_held() -> None:
    from outfitter_service.runtime.machine_lock import alone_on_machine

    host = f"lock-{id(object())}-{datetime.now(UTC).timestamp()}"
    assert not manager_lock.is_held(host)
    with alone_on_machine(host, {}):
        assert manager_lock.is_held(host)
    assert not manager_lock.is_held(host)

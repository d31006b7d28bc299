"""Taking the partition anew: nothing piles up by it, and nobody newer is fenced back."""

from __future__ import annotations

import os
import random
import re
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing

import anyio
import pytest

from outfitter_proto.bus import BusUnavailableError, Entry, Writer
from outfitter_service.core import model as m
from outfitter_service.runtime.changelog.topic_layout import TopicsChangedError
from outfitter_service.runtime.processor import processor
from outfitter_service.runtime.processor.takeover import ForeignManagerError
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus, WrappedWriter, no_faults
from support.managers.in_process import TOPICS, another, register, static
from support.processes.owners import body, owner_of


class ReopeningBus(FaultyBus):
    """An embedded bus whose writers must be opened again after their first commit as long as `reopens`."""

    reopens = False
    opened = 0

    async def open_writer(self, identity: str, partition: int, *, topics: Collection[str] = ()) -> Writer:
        self.opened += 1
        return _ReopenedWriter(self, await super().open_writer(identity, partition, topics=topics))


class _ReopenedWriter(WrappedWriter):
    def __init__(self, bus: ReopeningBus, inner: Writer) -> None:
        super().__init__(inner)
        self._bus = bus
        self._must_reopen = False

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        await super().commit(parts)
        self._must_reopen = self._bus.reopens

    @property
    def must_reopen(self) -> bool:
        return self._must_reopen


async def test_what_is_observed_anew_does_not_pile_up_while_commits_fail(
    bus: FaultyBus, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "LONGEST_DELAY_S", 0.001)
    monkeypatch.setattr(processor, "FIRST_DELAY_S", 0.001)
    async with serve(static(3), identity=another(machine_id="m")) as manager:
        for worker in "abc":
            await manager.say(register(worker, gpu=1, owner=body(owner_of(os.getpid())), lease_s=None))
            await manager.state(worker, "allocated")
    taken = 0
    enough = anyio.Event()
    queued: list[m.Event] = []

    async def fail(point: str) -> None:
        nonlocal taken
        if point == "commit:before":
            taken += 1
            raise BusUnavailableError("full")
        if point == "open_writer:before" and taken >= 20 and not enough.is_set():  # nothing is decided just now
            queued.extend(manager.processor.event_queue.queue)
            enough.set()

    # as after a restart of the machine: the owners have died with it
    async with serve(static(3), identity=another(machine_id="m", boot_id="the next"), ready=False) as manager:
        bus.script = fail
        for worker in "abc":
            manager.processor.event_queue.add(m.OwnerDied(allocation=f"h/{worker}/1", detail="seen"))
        with anyio.fail_after(20):
            await enough.wait()
        assert len([event for event in queued if isinstance(event, m.OwnerDied)]) == 3
        assert len([event for event in queued if isinstance(event, m.DriverReport)]) <= 1
        assert len([event for event in queued if isinstance(event, m.Reschedule)]) <= 1
        bus.script = no_faults
        for worker in "abc":
            assert (await manager.state(worker, "ended"))["reason_code"] == "owner-died"


async def test_after_an_outage_that_only_the_input_noticed_the_writer_is_replaced(bus: FaultyBus, serve: Serve) -> None:
    """Brokers that were away may have lost the end of the last commit: an idle host's is seen to its end now."""
    bus.local = False
    opened = 0
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1, lease_s=None))
        await manager.state("w", "allocated")

        async def deaf(point: str) -> None:
            if point.startswith(("fetch", "open_reader")):
                raise BusUnavailableError("away")

        async def count(point: str) -> None:
            nonlocal opened
            opened += point == "open_writer:after"

        bus.script = deaf
        with anyio.fail_after(20):
            while manager.processor.ready:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        bus.script = count
        with anyio.fail_after(20):
            while not opened or not manager.processor.ready:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        await manager.say(register("next", gpu=1))
        await manager.state("next", "pending")
        assert opened == 1


async def test_who_stops_after_an_outage_says_stopped_instead_of_taking_the_partition_anew(
    bus: FaultyBus, serve: Serve
) -> None:
    bus.local = False
    deaf, opened = True, 0
    reached, go = anyio.Event(), anyio.Event()

    async def act(point: str) -> None:
        nonlocal opened
        opened += point == "open_writer:after"
        if point == "commit:before":
            reached.set()
            await go.wait()
        elif deaf and reached.is_set() and point.startswith(("fetch", "open_reader")):
            raise BusUnavailableError("away")

    async with serve(static(1)) as manager:
        bus.script = act
        await manager.say(register("w", gpu=1, lease_s=None))
        input_reader = manager.processor.inputs.reader
        with anyio.fail_after(20):
            while input_reader.is_readable:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
            deaf = False
            while not input_reader.outages:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        manager.processor.stop()
        go.set()
        await manager.stop()
    bus.script = no_faults
    assert opened == 0
    assert (await manager.records())["@host/h"]["manager"].get("stopped_at") is not None


async def test_a_writer_that_must_be_reopened_is_replaced_after_a_pause_and_no_outage_is_spoken_of(
    url: str, serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    def pause(least: float, _: float) -> float:
        pauses.append(least)
        return least

    monkeypatch.setattr(random, "uniform", pause)
    silent = processor.Limits(
        beat_s=None
    )  # else a sign of life may have the commit that the worker is to be granted in
    async with ReopeningBus(url) as bus, serve(static(2), on=bus, limits=silent) as manager:
        bus.reopens = True
        await manager.say(register("a", gpu=1))
        await manager.state("a", "allocated")
        # each taking commits, and so must be opened again itself
        with anyio.fail_after(20):
            while bus.opened < 5:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        assert len(pauses) >= bus.opened - 1
        bus.reopens = False
        await manager.say(register("b", gpu=1))
        await manager.state("b", "allocated")
        await manager.ready()
        await manager.reported()
    assert manager.metric("outfitter_grants_total", resource="gpu") == 2
    printed = capsys.readouterr().out
    assert "the writer is replaced" in printed
    assert "the bus failed" not in printed


async def test_a_manager_that_must_reopen_its_writer_looks_before_it_fences_a_newer_one(url: str, serve: Serve) -> None:
    async with ReopeningBus(url) as bus, serve(static(2), on=bus, identity=another(instance="first")) as first:
        await first.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"])
        go = anyio.Event()

        async def hold(point: str) -> None:
            if point == "stable_end:before":  # its look before it takes the partition anew
                await go.wait()

        bus.script = hold
        bus.reopens = True
        await first.say(register("a", gpu=1))
        await first.state("a", "allocated")
        async with FaultyBus(url) as other, serve(static(2), on=other, identity=another(instance="second")) as second:
            go.set()  # the second one has committed
            await first.ended_by(ForeignManagerError)
            await second.say(register("b", gpu=1))
            await second.state("b", "allocated")


async def test_a_manager_ends_whose_ledger_has_lost_commits_that_it_has_seen(bus: FaultyBus, serve: Serve) -> None:
    """As after an outage in which somebody restored the disk from an older copy."""
    async with serve(static(4)) as manager:
        await manager.say(register("w1", gpu=1))
        await manager.state("w1", "allocated")
        _, end = await bus.offsets(TOPICS.allocations, 0)
        for worker in ("w2", "w3"):
            await manager.say(register(worker, gpu=1))
            await manager.state(worker, "allocated")
        await manager.reported()

        async def restore_the_disk(point: str) -> None:
            if point == "commit:before":
                raise BusUnavailableError("away")
            if point == "open_writer:before":
                cut_off(bus.url, end)

        bus.script = restore_the_disk
        await manager.say(register("w4", gpu=1))
        assert re.search(r"has gone back from commit \d+ to \d+", await manager.ended_by(TopicsChangedError))


def cut_off(url: str, end: int) -> None:
    """Delete what the ledger has from this offset on."""
    path = url.removeprefix("sqlite://").partition("?")[0]
    with closing(sqlite3.connect(path)) as connection, connection:
        [(topic,)] = connection.execute("SELECT id FROM topic WHERE name = ?", (TOPICS.allocations,)).fetchall()
        connection.execute("DELETE FROM record WHERE topic = ? AND off >= ?", (topic, end))
        connection.execute("UPDATE part SET next = ? WHERE topic = ?", (end, topic))

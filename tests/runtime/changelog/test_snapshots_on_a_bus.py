"""A manager's snapshots on a bus: complete without anybody's doing, never in the way of a commit."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_service.runtime.changelog.snapshots import Pace
from outfitter_service.runtime.processor.limits import Limits
from support.bus.faulty_bus import FaultyBus, no_faults
from support.checker.verdict import replay_result
from support.managers.in_process import (
    CLUSTER,
    HOST,
    TOPICS,
    WITHIN_S,
    InProcessManager,
    another,
    deregister,
    register,
    serving,
    static,
)

WORKERS = 30
SMALL = Pace(piece_bytes=1)
"""A record in each piece."""


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[FaultyBus]:
    async with FaultyBus(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus:
        yield bus


def manager_at(bus: FaultyBus, folder: Path, pace: Pace | None) -> AbstractAsyncContextManager[InProcessManager]:
    """Another run of the host's manager."""
    limits = Limits(lease_grace_s=0.1, history=pace)
    return serving(bus, static(WORKERS), folder, limits=limits, identity=another(instance=str(pace)))


async def fill(manager: InProcessManager) -> None:
    for number in range(WORKERS + 5):
        await manager.say(register(f"w{number}", gpu=1, lease_s=None))
    await manager.state(f"w{WORKERS + 4}", "pending")


async def marked(manager: InProcessManager) -> None:
    """Wait until the checkpoint names a whole snapshot."""
    with anyio.fail_after(WITHIN_S):
        while "snapshot" not in (await manager.records())[f"@checkpoint/host/{HOST}"]:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.005)


def pieces(history: list[dict[str, Any]]) -> list[int]:
    return [len(line["records"]) for line in history if line["type"] == "snapshot"]


async def test_a_snapshot_of_a_large_state_is_completed_although_nothing_else_happens(
    bus: FaultyBus, tmp_path: Path
) -> None:
    async with manager_at(bus, tmp_path, None) as manager:
        await fill(manager)
    assert pieces(await manager.history()) == []
    async with manager_at(bus, tmp_path, SMALL) as manager:
        await marked(manager)
        told = pieces(await manager.history())
        assert len(told) > WORKERS
        assert max(told) == 1
        assert (await replay_result(bus.url, CLUSTER))[:2] == ([], ())


async def test_a_snapshot_cut_off_by_a_crash_is_made_anew_by_the_next_manager(bus: FaultyBus, tmp_path: Path) -> None:
    async with manager_at(bus, tmp_path, None) as manager:
        await fill(manager)

    async def crash(point: str) -> None:
        if point == "commit:after" and len(pieces(await manager.history())) > WORKERS // 2:
            over.set()
            await anyio.sleep_forever()

    over = anyio.Event()
    async with manager_at(bus, tmp_path, SMALL) as manager:
        bus.script = crash
        with anyio.fail_after(WITHIN_S):
            await over.wait()
    bus.script = no_faults
    async with manager_at(bus, tmp_path, Pace(piece_bytes=1000)) as manager:
        await manager.say(deregister("w0"), register("new", gpu=1, lease_s=None))
        await manager.state("new", "pending")
        await marked(manager)
        told = await replay_result(bus.url, CLUSTER)
        assert told[:2] == ([], ())
        assert told.records > WORKERS


async def test_history_that_was_recreated_while_nobody_served_begins_with_a_snapshot(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    async with FaultyBus(url) as bus:
        async with serving(bus, static(), tmp_path) as manager:
            await manager.say(register("w1", gpu=1, lease_s=None))
            await manager.state("w1", "allocated")
            await manager.stop()
        with closing(sqlite3.connect(tmp_path / "bus.db")) as connection, connection:
            [(topic,)] = connection.execute("SELECT id FROM topic WHERE name = ?", (TOPICS.history,)).fetchall()
            connection.execute("DELETE FROM record WHERE topic = ?", (topic,))
            connection.execute("UPDATE part SET start = 0, next = 0 WHERE topic = ?", (topic,))
        async with serving(bus, static(), tmp_path) as manager:
            await manager.say(register("w2", gpu=1))
            await manager.state("w2", "allocated")
            [first, *_] = [entry for entry in await manager.history() if entry["type"] == "snapshot"]
            assert f"{HOST}/w1/1" in first["records"]

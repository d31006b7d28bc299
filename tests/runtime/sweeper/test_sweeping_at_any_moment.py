"""What is nobody's is answered once, at whatever point sweepers and managers start, crash or fail meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, CommitUnknownError
from runtime.sweeper.conftest import GRACE_S, letters, say, sweeping, swept
from support.bus.faulty_bus import FaultyBus
from support.checker import verdict as checker
from support.managers.in_process import (
    CLUSTER,
    HOST,
    InProcessManager,
    heartbeat,
    register,
    serving,
    static,
)

pytestmark = pytest.mark.slow


class At:
    """A script that does something once, at the `n`th point after it was armed."""

    def __init__(self, n: int, act: Callable[[], Awaitable[None]]) -> None:
        self.armed = True
        self.done = False
        self._left = n
        self._act = act

    async def __call__(self, point: str) -> None:
        if not self.armed or self.done or point.startswith(("fetch", "publish")):
            return
        self._left -= 1
        if self._left < 0:
            self.done = True
            await self._act()


async def answered_once(bus: Bus, manager: InProcessManager, offset: int) -> str:
    """Wait until the registration at `offset` is answered by one, and everything after it; say by whom."""
    after = await say(bus, b"", None)
    await manager.say(register("after", gpu=1))
    await manager.state("after", "allocated")
    await swept(bus, after)
    mine = f"{HOST}/w/1" in await manager.records()
    by_sweeper = [letter for letter in await letters(bus, 1) if letter.source.offset == offset]
    assert (len(by_sweeper), mine) in {(1, False), (0, True)}
    report = await checker.verdict(manager.bus.url)
    assert report.violations == ()
    return "the manager" if mine else "the sweeper"


Race = Callable[[str, Path, int], Awaitable[str | None]]


async def at_each_point(race: Race, folder: Path, points: int) -> list[str]:
    """Run `race` for each of its points, some side by side; return who has answered, for those that were met."""
    limiter = anyio.CapacityLimiter(8)
    found: list[str] = []

    async def run(n: int) -> None:
        async with limiter:
            (folder / str(n)).mkdir()
            who = await race(f"sqlite://{folder}/{n}/bus.db?synchronous=NORMAL", folder / str(n), n)
            if who is not None:
                found.append(who)

    async with anyio.create_task_group() as tasks:
        for n in range(points):
            tasks.start_soon(run, n)
    return found


@asynccontextmanager
async def buses(url: str) -> AsyncIterator[tuple[FaultyBus, FaultyBus]]:
    """Two buses on the same file, with topics of one partition."""
    async with FaultyBus(url) as one, FaultyBus(url) as other:
        await all_topics.create(one, CLUSTER, partitions=1)
        yield one, other


async def a_manager_starts_at(url: str, folder: Path, n: int) -> str | None:
    """The sweeper stands still at its `n`th point while the host's first manager starts. None: no such point."""
    async with buses(url) as (said, bus):
        offset = await say(said, register("w", gpu=1), HOST)
        met, go = anyio.Event(), anyio.Event()

        async def stand() -> None:
            met.set()
            await go.wait()

        bus.script = At(n, stand)
        async with sweeping(bus):
            with anyio.move_on_after(GRACE_S + 2.0):
                await met.wait()
            async with serving(said, static(4), folder) as manager:
                go.set()
                who = await answered_once(said, manager, offset)
                return who if met.is_set() else None


async def test_whenever_a_hosts_first_manager_starts_a_message_is_answered_by_one(tmp_path: Path) -> None:
    answers = await at_each_point(a_manager_starts_at, tmp_path, 26)
    assert set(answers) == {"the manager", "the sweeper"}


async def the_sweeper_works_at(url: str, folder: Path, n: int) -> str | None:
    """The host's first manager stands still at its `n`th point while the sweeper does what it can."""
    async with buses(url) as (said, bus):
        offset = await say(said, register("w", gpu=1), HOST)
        script = bus.script = At(n, lambda: anyio.sleep(GRACE_S + 1.0))
        async with sweeping(said), serving(bus, static(4), folder) as manager:
            manager.bus = said
            who = await answered_once(said, manager, offset)
            return who if script.done else None


async def test_whatever_the_sweeper_does_while_a_hosts_first_manager_starts_a_message_is_answered_by_one(
    tmp_path: Path,
) -> None:
    answers = await at_each_point(the_sweeper_works_at, tmp_path, 54)
    assert set(answers) == {"the manager", "the sweeper"}


async def a_manager_starts_after_a_crash_at(url: str, folder: Path, n: int) -> str | None:
    """The sweeper crashes at its `n`th point, then the host's first manager starts, then another sweeper."""
    async with buses(url) as (said, bus):
        offset = await say(said, register("w", gpu=1), HOST)
        met = anyio.Event()

        async def crash() -> None:
            met.set()
            await anyio.sleep_forever()

        bus.script = At(n, crash)
        async with sweeping(bus):
            with anyio.move_on_after(GRACE_S + 2.0):
                await met.wait()
        async with serving(said, static(4), folder) as manager:
            await manager.say(register("first", gpu=1))
            await manager.state("first", "allocated")
            async with sweeping(said):
                who = await answered_once(said, manager, offset)
                return who if met.is_set() else None


async def test_what_a_sweeper_had_claimed_when_it_crashed_is_answered_by_its_successor_alone(tmp_path: Path) -> None:
    answers = await at_each_point(a_manager_starts_after_a_crash_at, tmp_path, 26)
    assert set(answers) == {"the manager", "the sweeper"}


async def it_goes_wrong_at(url: str, folder: Path, n: int, *, error: Exception | None) -> str | None:
    async with buses(url) as (said, bus):
        offsets = [await say(said, register("w", host=host), host) for host in ("a", "b")]
        offsets += [await say(said, heartbeat("w"), None), await say(said, register("w", host="a"), "a")]
        crashed = anyio.Event()

        async def act() -> None:
            crashed.set()
            if error is not None:
                raise error
            await anyio.sleep_forever()

        bus.script = At(n, act)
        async with sweeping(bus):
            with anyio.move_on_after(GRACE_S + 2.0):
                await crashed.wait()
            if error is not None:
                await letters(said, 4)
        async with sweeping(said, grace=0.0):
            last = await say(said, b"", None)
            await swept(said, last)
        assert [letter.source.offset for letter in await letters(said, 5)] == [*offsets, last], f"at point {n}"
        assert (await checker.verdict(said.url)).violations == ()
        return "the sweeper" if crashed.is_set() else None


@pytest.mark.parametrize("error", [None, CommitUnknownError("who knows")])
async def test_a_sweeper_that_crashes_or_fails_at_any_point_repeats_and_forgets_nothing(
    tmp_path: Path, error: Exception | None
) -> None:
    answers = await at_each_point(partial(it_goes_wrong_at, error=error), tmp_path, 26)
    assert len(answers) >= 12

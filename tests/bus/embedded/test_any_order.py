"""The embedded bus under anything in any order, against a list: writers that come and go, commits that are given up,
housekeeping, and kill -9, after which only the files are there."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.lowlevel
from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_proto.bus import Bus, BusUnavailableError, CommitUnknownError, Entry, FencedError, TopicSpec, Writer
from outfitter_proto.bus.embedded import EmbeddedBus, log
from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.location import parse
from outfitter_proto.bus.embedded.housekeeping import Housekeeping

TOPICS = {"history": {}, "ledger": {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}}
Records = list[tuple[int, bytes | None, bytes | None]]
"""Offset, key and value of each record that is there, in order."""


class Take(NamedTuple):
    """A writer takes one of two identities."""

    identity: str


class Commit(NamedTuple):
    """The writer that was opened so many writers ago, fenced or not, commits records to both topics; given up after so
    many turns of the event loop, if that is said."""

    ago: int
    keys: Sequence[int]
    turns: int | None


class RunHousekeeping(NamedTuple):
    """The housekeeping runs."""


class Kill(NamedTuple):
    """All processes are killed: what goes on has the files as they are."""


STEP = (
    st.builds(Take, st.sampled_from("ab"))
    | st.builds(Commit, st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.none())
    | st.builds(Commit, st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 300))
    | st.builds(RunHousekeeping)
    | st.builds(Kill)
)


class Machine:
    """A bus and what should be on it: all that was ever committed, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lives = 0
        self.count = 0
        self.written: dict[str, Records] = {name: [] for name in TOPICS}
        self.holder: dict[str, int] = {}
        self.writers: list[tuple[str, int, Writer]] = []
        self.bus: Bus = EmbeddedBus(self.url)

    @property
    def url(self) -> str:
        return f"sqlite://{self.folder}/{self.lives}/bus.db?synchronous=NORMAL"

    async def begin(self) -> None:
        (self.folder / str(self.lives)).mkdir(exist_ok=True)
        self.bus = EmbeddedBus(self.url)
        await self.bus.start()
        await self.bus.create_topics([TopicSpec(name, 1, config) for name, config in TOPICS.items()])

    async def kill(self) -> None:
        """Go on with a copy of the files, which is what a kill leaves; nobody closed anything."""
        old = self.folder / str(self.lives)
        self.lives += 1
        shutil.copytree(old, self.folder / str(self.lives), ignore=shutil.ignore_patterns("*.sock", "*.lock"))
        await self.bus.aclose()
        self.writers.clear()
        await self.begin()

    async def take(self, step: Take) -> None:
        writer = await self.bus.open_writer(step.identity, 0)
        self.holder[step.identity] = self.holder.get(step.identity, 0) + 1
        self.writers.append((step.identity, self.holder[step.identity], writer))

    async def commit(self, step: Commit) -> None:
        if len(self.writers) <= step.ago:
            return
        identity, number, writer = self.writers[-1 - step.ago]
        self.count += 1
        value = b"%d" % self.count
        entries = [Entry(b"%d" % key, None if key == 3 else value) for key in step.keys]
        fenced, unknown = False, True
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                if step.turns is not None:
                    tasks.start_soon(_give_up, scope, step.turns)
                try:
                    await writer.commit([(name, entries) for name in TOPICS])
                    unknown = False
                except FencedError:
                    fenced, unknown = True, False
                except BusUnavailableError:
                    unknown = False  # it must be opened again, and has written nothing
                    fenced = True
                except CommitUnknownError:
                    pass
                tasks.cancel_scope.cancel()
        if not unknown and not fenced:
            assert number == self.holder[identity], "a fenced writer has committed"
        if unknown:
            await self.take(Take(identity))  # then it is decided
            ends = {name: (await self.bus.offsets(name, 0))[1] for name in TOPICS}
            more = {ends[name] - self._end(name) for name in TOPICS}
            assert more in ({0}, {len(entries)}), "half a commit"
            fenced = more == {0}
        if not fenced:
            for name in TOPICS:
                first = self._end(name)
                self.written[name] += [(first + n, each.key, each.value) for n, each in enumerate(entries)]

    async def run_housekeeping(self) -> None:
        reading, writing = Database(parse(self.url)), Database(parse(self.url))
        await reading.open(log.recognise, log.set_up)
        await writing.open(log.recognise, log.set_up)
        try:
            await Housekeeping(reading, writing, now_ms=time.time_ns() // 1_000_000).run()
        finally:
            await reading.close()
            await writing.close()

    async def check(self) -> None:
        """What is read is what was written, at the same offsets; of the ledger at least the last of each key."""
        for name in TOPICS:
            found = await self._read(name)
            assert [record for record in self.written[name] if record in found] == found
            last = {key: record for record in self.written[name] for key in [record[1]]}
            needed = sorted(last.values()) if name == "ledger" else self.written[name]
            assert [record for record in needed if record not in found] == []

    async def _read(self, name: str) -> Records:
        end = await self.bus.stable_end(name, 0)
        found: Records = []
        async with await self.bus.open_reader(name, 0, start=None, committed=True) as reader:
            with anyio.fail_after(20):
                while reader.position < end:
                    found += [(each.offset, each.key, each.value) for each in await reader.fetch(timeout=0)]
        return found

    def _end(self, name: str) -> int:
        return self.written[name][-1][0] + 1 if self.written[name] else 0


async def _give_up(scope: anyio.CancelScope, turns: int) -> None:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    scope.cancel()


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, min_size=3, max_size=14))
def test_whatever_happens_in_whatever_order_commits_are_whole_and_fenced_writers_write_nothing(
    steps: Sequence[Take | Commit | RunHousekeeping | Kill],
) -> None:
    async def run(folder: Path) -> None:
        machine = Machine(folder)
        await machine.begin()
        await machine.take(Take("a"))
        for step in steps:
            if isinstance(step, Take):
                await machine.take(step)
            elif isinstance(step, Commit):
                await machine.commit(step)
            elif isinstance(step, RunHousekeeping):
                await machine.run_housekeeping()
            else:
                await machine.kill()
            await machine.check()
        await machine.bus.aclose()

    with tempfile.TemporaryDirectory() as name:
        anyio.run(run, Path(name))

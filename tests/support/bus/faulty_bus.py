"""A bus that fails where it is told to: the embedded one underneath, a question before and after everything it does.

`FaultyBus(url, script)`: `script(point)` is awaited at each point, `"commit:before"`, `"commit:after"`,
`"open_writer:before"` and so on (`"beat:before"` for a manager's signs of life). It may raise what a bus raises, hang,
or have its caller cancelled. What it raises at `:after` hides what has happened: a commit whose outcome is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from outfitter_proto.bus import (
    Bus,
    Entry,
    Membership,
    Message,
    Reader,
    TopicInfo,
    TopicLayout,
    TopicSpec,
    Writer,
    connect,
)

Script = Callable[[str], Awaitable[None]]


async def no_faults(point: str) -> None:
    """Nothing goes wrong."""


class Killed(BaseException):
    """Whoever uses the bus ends here."""


CHANGES = {"commit:after", "publish:after"}


class FaultyBus(Bus):
    """See the module. `script` may be replaced at any time, and so may `late_s`, which its readers say. `named` and
    `written` are the topics, by identity, that writers were opened for and have written to; `looked_for` the identities
    that somebody was about to take."""

    def __init__(self, url: str, script: Script = no_faults) -> None:
        self.url = url
        self.script = script
        self.late_s = 0.0
        self.named: dict[str, set[str]] = defaultdict(set)
        self.written: dict[str, set[str]] = defaultdict(set)
        self.looked_for: set[str] = set()
        self._inner = connect(url)
        self.local = self._inner.local

    async def killed(self, work: Callable[[], Awaitable[object]], point: int) -> int:
        """Do `work`, ended as soon as its `point`-th change of the bus has been made; how many it has made."""
        changes = 0

        async def kill(name: str) -> None:
            nonlocal changes
            changes += name in CHANGES
            if name in CHANGES and changes == point:
                raise Killed

        self.script = kill
        try:
            await work()
        except Killed:
            pass
        finally:
            self.script = no_faults
        return changes

    @asynccontextmanager
    async def _around(self, name: str) -> AsyncIterator[None]:
        await self.script(f"{name}:before")
        yield
        await self.script(f"{name}:after")

    async def start(self) -> None:
        async with self._around("start"):
            await self._inner.start()

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def topic(self, name: str) -> TopicInfo:
        async with self._around("topic"):
            return await self._inner.topic(name)

    async def layouts(self, names: Collection[str]) -> dict[str, TopicLayout]:
        async with self._around("layouts"):
            return await self._inner.layouts(names)

    async def has_committed(self, identity: str) -> bool:
        async with self._around("has_committed"):
            return await self._inner.has_committed(identity)

    async def brokers(self) -> int:
        return await self._inner.brokers()

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        async with self._around("create_topics"):
            return await self._inner.create_topics(specs)

    async def publish(self, topic: str, partition: int, entry: Entry) -> int:
        async with self._around("beat" if topic.endswith(".managers") else "publish"):
            return await self._inner.publish(topic, partition, entry)

    async def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        async with self._around("offsets"):
            return await self._inner.offsets(topic, partition)

    async def offset_at(self, topic: str, partition: int, moment_ms: int) -> int:
        async with self._around("offset_at"):
            return await self._inner.offset_at(topic, partition, moment_ms)

    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:
        if taking is not None:
            self.looked_for.add(taking)
        async with self._around("stable_end" if taking is None else "look"):
            return await self._inner.stable_end(topic, partition, taking=taking)

    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        await self.script("open_reader:before")
        inner = await self._inner.open_reader(topic, partition, start=start, committed=committed, lenient=lenient)
        try:
            await self.script("open_reader:after")
        except BaseException:
            await inner.aclose()
            raise
        return _FaultyReader(self, inner)

    async def open_writer(self, identity: str, partition: int, *, topics: Collection[str] = ()) -> Writer:
        await self.script("open_writer:before")
        self.named[identity].update(topics)
        inner = await self._inner.open_writer(identity, partition, topics=topics)
        try:
            await self.script("open_writer:after")
        except BaseException:
            await inner.aclose()
            raise
        return _FaultyWriter(self, inner, self.written[identity])

    async def tenure(self, identity: str) -> str | None:
        async with self._around("tenure"):
            return await self._inner.tenure(identity)

    async def join(
        self, group: str, topic: str, *, replica: str | None, session_timeout: float, heartbeat_interval: float
    ) -> Membership:
        await self.script("join:before")
        inner = await self._inner.join(
            group, topic, replica=replica, session_timeout=session_timeout, heartbeat_interval=heartbeat_interval
        )
        try:
            await self.script("join:after")
        except BaseException:
            await inner.aclose()
            raise
        return inner

    async def maintain(self) -> None:
        async with self._around("maintain"):
            await self._inner.maintain()


class _FaultyReader(Reader):
    def __init__(self, bus: FaultyBus, inner: Reader) -> None:
        self._bus = bus
        self._inner = inner
        self.position = inner.position

    @property
    def late_s(self) -> float:  # type: ignore[override]
        return self._bus.late_s

    async def fetch(self, *, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
        await self._bus.script("fetch:before")
        self._inner.position = self.position
        found = await self._inner.fetch(max_records=max_records, timeout=timeout)
        await self._bus.script("fetch:after")
        self.position = self._inner.position
        return found

    async def seek(self, offset: int) -> None:
        await self._inner.seek(offset)
        self.position = offset

    async def aclose(self) -> None:
        await self._inner.aclose()


class WrappedWriter(Writer):
    """A writer that does what `inner` does, for tests that change one thing of it."""

    def __init__(self, inner: Writer) -> None:
        self._inner = inner
        self.partition = inner.partition

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        await self._inner.commit(parts)

    @property
    def must_reopen(self) -> bool:
        return self._inner.must_reopen

    @property
    def max_part_bytes(self) -> int:
        return self._inner.max_part_bytes

    @property
    def tenure(self) -> str:
        return self._inner.tenure

    async def aclose(self) -> None:
        await self._inner.aclose()


class _FaultyWriter(WrappedWriter):
    def __init__(self, bus: FaultyBus, inner: Writer, written: set[str]) -> None:
        super().__init__(inner)
        self._bus = bus
        self._written = written

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        await self._bus.script("commit:before")
        self._written.update(topic for topic, entries in parts if entries)
        await super().commit(parts)
        await self._bus.script("commit:after")

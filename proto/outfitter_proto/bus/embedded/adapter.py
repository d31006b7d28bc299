"""`EmbeddedBus`: the port on the embedded bus. All readers share a second connection, so that they never wait for
writers."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

from outfitter_proto.bus.embedded import log
from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.location import parse
from outfitter_proto.bus.embedded.connecting.notify import Notifier
from outfitter_proto.bus.embedded.housekeeping import Housekeeping
from outfitter_proto.bus.embedded.membership import EmbeddedMembership
from outfitter_proto.bus.embedded.reader import EmbeddedReader
from outfitter_proto.bus.embedded.writer import EmbeddedWriter
from outfitter_proto.bus.port import (
    Bus,
    BusUnavailableError,
    CommitUnknownError,
    Create,
    Entry,
    Membership,
    Reader,
    TopicInfo,
    TopicSpec,
    UnknownTopicError,
    Writer,
)

_log = logging.getLogger(__name__)


class _Parts(NamedTuple):
    """The parts of a started bus: a connection for commits, one for reading, and the wake-ups."""

    writing: Database
    reading: Database
    notifier: Notifier


class EmbeddedBus(Bus):
    """The bus in the file of `url` (see `location.parse`). Starting creates a missing file with its tables, but no
    topics. `create`: what it may create."""

    local = True

    def __init__(self, url: str, *, create: Create = Create.DIRECTORY) -> None:
        self.url = url
        self._location = parse(url)
        self._create = create
        self._parts: _Parts | None = None
        self._closing = AsyncExitStack()
        self._topics: dict[str, log.StoredTopic] = {}
        self._readers: WeakSet[EmbeddedReader] = WeakSet()
        self._memberships: WeakSet[EmbeddedMembership] = WeakSet()

    async def start(self) -> None:
        if self._parts is not None:
            return
        writing, reading = (Database(self._location, create=self._create) for _ in range(2))
        check, setup = (
            (log.recognise, log.set_up)
            if self._create is not Create.NOTHING
            else (self._require_bus, self._require_bus)
        )
        async with AsyncExitStack() as closing:
            for database in (writing, reading):
                await database.open(check, setup)
                closing.push_async_callback(database.close)
            notifier = Notifier(self._location)
            closing.callback(notifier.close)
            closing.push_async_callback(self._close_users)
            self._closing = closing.pop_all()
        self._parts = _Parts(writing, reading, notifier)
        _log.info("embedded bus %s, SQLite %s", self._location.path, sqlite3.sqlite_version)

    async def aclose(self) -> None:
        self._parts = None
        await self._closing.aclose()

    async def topic(self, name: str) -> TopicInfo:
        self._topics.pop(name, None)  # another process may have changed it
        topic = await self._find(name)
        return TopicInfo(topic.name, topic.uuid, topic.partitions, 1, dict(topic.config))

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        for spec in specs:
            log.check_spec(spec)
        return await self._open.writing.commit(
            lambda connection: [spec.name for spec in specs if log.create_topic(connection, spec)]
        )

    async def publish(self, topic: str, partition: int, entry: Entry) -> int:
        parts = self._open
        stored = await self._find(topic, partition)
        log.check_entries(stored, [entry])
        try:
            return await parts.writing.commit(
                partial(log.append, topic=stored, partition=partition, entries=[entry]),
                after=lambda _: parts.notifier.notify([(stored.id, partition)]),
            )
        except CommitUnknownError as error:
            raise BusUnavailableError(str(error)) from error

    async def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        stored = await self._find(topic, partition)
        return await self._open.reading.read(partial(log.bounds, topic=stored, partition=partition))

    async def offset_at(self, topic: str, partition: int, moment_ms: int) -> int:
        stored = await self._find(topic, partition)
        return await self._open.reading.read(partial(log.first_since, topic=stored, partition=partition, ms=moment_ms))

    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        # All records in the file are committed and none are packed, so these make no difference.
        del committed, lenient
        parts = self._open
        stored = await self._find(topic, partition)
        if start is None:
            start, _ = await self.offsets(topic, partition)
        reader = EmbeddedReader(parts.reading, stored, partition, start, parts.notifier.listen(stored.id, partition))
        self._readers.add(reader)
        return reader

    async def open_writer(self, identity: str, partition: int, *, topics: Collection[str] = ()) -> Writer:
        del topics  # a commit reaches all topics at once
        parts = self._open
        epoch = await parts.writing.commit(partial(log.take_identity, identity=identity))
        return EmbeddedWriter(
            parts.writing, parts.notifier, self._find, identity=identity, epoch=epoch, partition=partition
        )

    async def tenure(self, identity: str) -> str | None:
        epoch = await self._open.reading.read(partial(log.epoch, identity=identity))
        return None if epoch is None else str(epoch)

    async def join(
        self, group: str, topic: str, *, replica: str | None, session_timeout: float, heartbeat_interval: float
    ) -> Membership:
        del replica, session_timeout, heartbeat_interval  # a group has one member, as long as its process lives
        membership = EmbeddedMembership(self._open.reading, self._location, await self._find(topic), group)
        await membership.start()
        self._memberships.add(membership)
        return membership

    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:  # noqa: ARG002
        """See `Bus.stable_end`. Every record in the file is committed, so the call does not wait."""
        _, end = await self.offsets(topic, partition)
        return end

    async def maintain(self) -> None:
        parts = self._open
        await Housekeeping(parts.reading, parts.writing, now_ms=time.time_ns() // 1_000_000).run()

    def _require_bus(self, connection: sqlite3.Connection) -> None:
        if not log.recognise(connection):
            raise self._location.missing()

    @property
    def _open(self) -> _Parts:
        if self._parts is None:
            raise BusUnavailableError(f"the bus {self.url} is not open: `await bus.start()` first, or `async with`")
        return self._parts

    async def _find(self, name: str, partition: int = 0) -> log.StoredTopic:
        topic = self._topics.get(name)
        if topic is None or partition >= topic.partitions:
            topic = await self._open.reading.read(partial(log.find_topic, name=name))
        if topic is None:
            raise UnknownTopicError(
                f"topic {name!r} is not on the bus {self.url}: a manager makes its cluster's topics when it starts "
                "(`outfitter serve`), as does `outfitter topics create`"
            )
        self._topics[name] = topic
        topic.check_partition(partition)
        return topic

    async def _close_users(self) -> None:
        for membership in list(self._memberships):
            await membership.aclose()
        for reader in list(self._readers):
            await reader.aclose()

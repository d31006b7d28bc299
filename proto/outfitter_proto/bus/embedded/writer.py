"""The embedded bus's fenced writer: a commit is one transaction that first checks that the epoch is still ours."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from outfitter_proto.bus.embedded import log
from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.notify import Notifier
from outfitter_proto.bus.port import BusUnavailableError, Entry, TooLargeError, Writer

MAX_BATCH_BYTES: Final = 1_000_000
"""Limit of the last part of a commit in bytes: about Kafka's default, so that a part that fits here fits there."""


class EmbeddedWriter(Writer):
    """Holds a writer identity until another writer raises its epoch."""

    def __init__(
        self,
        database: Database,
        notifier: Notifier,
        find: Callable[[str, int], Awaitable[log.StoredTopic]],
        *,
        identity: str,
        epoch: int,
        partition: int,
    ) -> None:
        """`find` looks up a topic that has a partition; `epoch` is what `identity` had when this writer took it."""
        self.partition = partition
        self._database = database
        self._notifier = notifier
        self._find = find
        self._identity = identity
        self._epoch = epoch
        self._unusable = False

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        if self._unusable:
            raise BusUnavailableError(f"this writer {self._identity!r} can write no more: open a new one")
        stored = [(await self._find(name, self.partition), entries) for name, entries in parts]
        for topic, entries in stored:
            log.check_entries(topic, entries)
        if stored:
            self._check_last(*stored[-1])

        def write(connection: sqlite3.Connection) -> None:
            log.check_epoch(connection, self._identity, self._epoch)
            for topic, entries in stored:
                if entries:
                    log.append(connection, topic, self.partition, entries)

        self._unusable = True  # it stays True after a cancellation or failure
        await self._database.commit(write, after=lambda _: self._notify(stored))
        self._unusable = False

    @property
    def must_reopen(self) -> bool:
        return False  # a returned commit leaves no open request

    @property
    def max_part_bytes(self) -> int:
        return MAX_BATCH_BYTES

    @property
    def tenure(self) -> str:
        return str(self._epoch)

    async def aclose(self) -> None:
        self._unusable = True

    def _notify(self, written: Sequence[tuple[log.StoredTopic, Sequence[Entry]]]) -> None:
        self._notifier.notify([(topic.id, self.partition) for topic, entries in written if entries])

    @staticmethod
    def _check_last(topic: log.StoredTopic, entries: Sequence[Entry]) -> None:
        size = sum(len(entry.key or b"") + len(entry.value or b"") for entry in entries)
        if size > MAX_BATCH_BYTES:
            raise TooLargeError(
                f"the last part, for {topic.name!r}, has {size} bytes, and {MAX_BATCH_BYTES} is the most: split it"
            )

"""The one member that a group on an embedded bus has. It has all partitions.

A second one is refused: the member holds a lock that ends with its process. Version 0.2 had members in a table of the
file. While one of those lives, no partition is confirmed here, so it keeps what it has fenced.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from functools import partial

from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.location import Location
from outfitter_proto.bus.embedded.connecting.lock import Lock
from outfitter_proto.bus.embedded.log import StoredTopic
from outfitter_proto.bus.ownership import OwnedMembership
from outfitter_proto.bus.port import BusConfigurationError, BusError
from outfitter_proto.support.processes import boot_id


class EmbeddedMembership(OwnedMembership):
    """See `Membership`."""

    def __init__(self, reading: Database, location: Location, topic: StoredTopic, group: str) -> None:
        super().__init__()
        self._reading = reading
        self._location = location
        self._topic = topic
        self._group = group
        self._path = location.member_lock(f"{zlib.crc32(group.encode()):08x}-{topic.id}")
        self._lock = Lock(location, self._path)

    async def start(self) -> None:
        """Become the member.

        Raises:
            BusConfigurationError: the group has a member.
            BusError: the lock or the file cannot be used; the message says why.
        """
        if not self._lock.hold():
            raise BusConfigurationError(
                f"another process is the member of group {self._group!r}: {self._location.path} has one, and more "
                f"replicas need Kafka; `fuser {self._path}` names it"
            )
        try:
            if await self._has_former_member():
                raise BusConfigurationError(
                    f"a process of an earlier version is a member of group {self._group!r} on {self._location.path}: "
                    "stop it; after its end it counts for its session-timeout"
                )
        except BaseException:
            self._lock.close()
            raise
        self._ownership.assign(frozenset(range(self._topic.partitions)))

    async def _ask_group(self, partition: int) -> bool:  # noqa: ARG002 - it has all of them or none
        try:
            return self._lock.held and not await self._has_former_member()
        except BusError:
            return False

    async def leave(self) -> None:
        self._lock.close()
        self._ownership.assign(frozenset())

    async def aclose(self) -> None:
        await self.leave()

    async def _has_former_member(self) -> bool:
        return await self._reading.read(partial(has_former_member, topic=self._topic.id, group=self._group))


def has_former_member(connection: sqlite3.Connection, *, topic: int, group: str) -> bool:
    """Whether a process of version 0.2 is a member: it has said so within its session, by this machine's clock since
    its boot."""
    tables = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'member'").fetchall()
    if not tables:
        return False
    living = connection.execute(
        "SELECT 1 FROM member WHERE topic = ? AND grp = ? AND boot = ? AND typeof(until) = 'real' AND until >= ?",
        (topic, group, boot_id() or "", time.monotonic()),
    ).fetchall()
    return bool(living)

"""Who manages which hosts, as far as the ledger tells: what a worker that got no answer is told.

A survey reads the ledger's records about hosts and writers and nothing else of it. It may be cut short at any
moment; what was found by then stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import anyio

from outfitter_proto import codec, names
from outfitter_proto.bus.port import Bus, BusError, Message
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint, Host

_SHOWN = 10


class ManagerLookup:
    """The hosts of a cluster, by what the ledger says of their managers."""

    def __init__(self, bus: Bus, cluster: str, host: str) -> None:
        self.host = host
        self.hosts: dict[str, Host] = {}
        self.complete = False
        self._read_in: dict[str, int] = {}
        self._bus = bus
        self._topic = names.topics(cluster).allocations
        self._cluster = cluster
        self._last_seen: datetime | None = None
        self._own_keys = {names.host_key(host).encode(), names.checkpoint_key(names.host_writer(host)).encode()}

    async def run(self, partitions: int) -> None:
        """Read all partitions, the asking host's own first. Whatever the bus refuses is left out."""
        own = partition_of(self.host, partitions)
        self._own_keys.add(names.checkpoint_key(names.partition_writer(own)).encode())
        read = [await self._try_read(own)]
        async with anyio.create_task_group() as group:
            for partition in range(partitions):
                if partition != own:
                    group.start_soon(self._note_read, partition, read)
        self.complete = all(read)

    async def _note_read(self, partition: int, read: list[bool]) -> None:
        read.append(await self._try_read(partition))

    async def _try_read(self, partition: int) -> bool:
        try:
            await self._read(partition)
        except BusError:
            return False
        return True

    async def _read(self, partition: int) -> None:
        end = await self._bus.stable_end(self._topic, partition)
        async with await self._bus.open_reader(self._topic, partition, start=None, committed=True) as reader:
            while reader.position < end:
                for message in await reader.fetch():
                    self._take(message)

    def _take(self, message: Message) -> None:
        key = message.key or b""
        if not key.startswith(b"@host/") and key not in self._own_keys:
            return
        if message.value is None:
            host = key.removeprefix(b"@host/").decode("utf-8", "replace")
            if self._read_in.get(host) == message.partition:  # else it was moved, and is somewhere else
                self.hosts.pop(host, None)
            return
        try:
            record = codec.decode_ledger(message.value, key=key)
        except codec.WireError:
            return  # of a later version, or damaged: it says nothing that we could tell
        if isinstance(record, Host):
            self.hosts[record.host] = record
            self._read_in[record.host] = message.partition
            if record.host == self.host:
                self._saw(record.since, record.manager.since, record.manager.stopped_at)
        elif isinstance(record, Checkpoint):
            self._saw(record.at)

    def _saw(self, *times: datetime | None) -> None:
        self._last_seen = max((at for at in (self._last_seen, *times) if at is not None), default=None)

    def describe(self) -> str:
        """What to tell a worker of `host`, in one line."""
        return "; ".join(self._clauses())

    def _clauses(self) -> Iterator[str]:
        mine = self.hosts.get(self.host)
        if mine is not None and mine.manager.stopped_at is not None:
            yield f"its manager {mine.manager.instance} was stopped {_ago(mine.manager.stopped_at)}"
        elif self._last_seen is not None:
            yield f"its manager last wrote {_ago(self._last_seen)} and has not said that it stopped"
        else:
            yield "it never had one here"
        served = sorted(name for name, host in self.hosts.items() if host.manager.stopped_at is None)
        others = [name for name in served if name != self.host]
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        listed = ", ".join(others[:_SHOWN]) + more if others else "none"
        yield f"other hosts served: {listed}" + ("" if self.complete else " (not all were looked at)")
        yield (
            f"start one with `outfitter serve --host {self.host}`, or check host, bus {self._bus.url} "
            f"and cluster {self._cluster!r}"
        )


def _ago(at: datetime) -> str:
    seconds = max(0, int((datetime.now(UTC) - at).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago ({at:%Y-%m-%dT%H:%M:%SZ})"
    return f"{seconds} s ago ({at:%Y-%m-%dT%H:%M:%SZ})"

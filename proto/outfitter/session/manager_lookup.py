"""The managers of all hosts, from the ledger, for the error of a worker that got no answer.

A lookup reads only the records of hosts and writers. It may be cancelled at any time and keeps its result so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import anyio

from outfitter.errors import NoManagerError
from outfitter_proto import codec, keys, names
from outfitter_proto.bus.port import Bus, BusError, BusUnavailableError, Message
from outfitter_proto.bus.reading import read_to
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint, Host
from outfitter_proto.signs_of_life import UNSERVED, Life, SignsOfLife, Verdict, in_words, judge, read_signs, responsible
from outfitter_proto.support import manager_lock
from outfitter_proto.support.processes import boot_id

RECENT_S = 60.0
"""Seconds for which a record of a manager shows that it lives."""
_SHOWN = 10
_OPEN_FOR = 0.6
"""Seconds for which a transaction must stay open until it counts as the reason for silence."""
HOST_SCOPE = "host"


class ManagerLookup:
    """The hosts of a cluster and their managers, as recorded in the ledger."""

    def __init__(self, bus: Bus, cluster: str, host: str) -> None:
        self.host = host
        """The worker's."""
        self.hosts: dict[str, Host] = {}
        """The records read so far, by name."""
        self.complete = False
        """All partitions were read."""
        self.own_was_read = False
        """The worker's own partition was read."""
        self._own = 0
        self._hidden: str | None = None
        self._bus = bus
        self._topic = names.topics(cluster).allocations
        self._cluster = cluster
        self._last_seen: datetime | None = None
        self._scope = HOST_SCOPE
        self._checkpoints: dict[str, Checkpoint] = {}
        self._signs = SignsOfLife()
        self._partitions = 1
        self._own_keys = {keys.host_key(host).encode(), keys.checkpoint_key(keys.host_writer(host)).encode()}

    async def run(self, partitions: int) -> None:
        """Read all partitions, the worker's own first, without those that the bus refuses."""
        await self.run_own(partitions)
        own, read = self._own, [self.own_was_read]
        async with anyio.create_task_group() as group:
            for partition in range(partitions):
                if partition != own:
                    group.start_soon(self._note_read, partition, read)
        self.complete = all(read)

    async def run_own(self, partitions: int) -> None:
        """Read the worker's own partition, and its managers' signs of life."""
        self._partitions = partitions
        own = self._own = partition_of(self.host, partitions)
        self._own_keys.add(keys.checkpoint_key(keys.partition_writer(own)).encode())
        self.own_was_read = await self._try_read(own)
        self._signs = await read_signs(self._bus, self._cluster, [own])

    async def _note_read(self, partition: int, read: list[bool]) -> None:
        read.append(await self._try_read(partition))

    async def _try_read(self, partition: int) -> bool:
        try:
            await self._read(partition)
        except BusError:
            return False
        return True

    async def _read(self, partition: int) -> None:
        if await self._is_hidden(partition):
            return
        end = await self._bus.stable_end(self._topic, partition)
        async with await self._bus.open_reader(self._topic, partition, start=None, committed=True) as reader:
            async for messages in read_to(reader, end):
                for message in messages:
                    self._apply(message)

    def _apply(self, message: Message) -> None:
        key = message.key or b""
        host = keys.host_of(key) if key.startswith(keys.HOST) else None
        if host is not None and partition_of(host, self._partitions) != message.partition:
            return  # version 0.2 has moved the host away
        if host is None and key not in self._own_keys:
            return
        if message.value is None:
            self.hosts.pop(host or "", None)
            return
        try:
            record = codec.decode_ledger(message.value, key=key)
        except codec.WireError:
            return  # of a later version, or damaged
        if isinstance(record, Host):
            self.hosts[record.host] = record
            if record.host == self.host:
                self._note_times(record.since, record.manager.since, record.manager.stopped_at)
        elif isinstance(record, Checkpoint):
            self._note_times(record.at)
            self._scope = record.scope
            self._checkpoints[record.writer] = record

    def _note_times(self, *times: datetime | None) -> None:
        self._last_seen = max((at for at in (self._last_seen, *times) if at is not None), default=None)

    async def _is_hidden(self, partition: int) -> bool:
        """Whether one transaction stays open at the partition's end, so that no answer can be read."""
        first = await self._bus.open_transaction(self._topic, partition)
        if first is None:
            return False
        await anyio.sleep(_OPEN_FOR)
        is_hidden = await self._bus.open_transaction(self._topic, partition) == first
        if is_hidden and partition == self._own:
            self._hidden = first
        return is_hidden

    @property
    def verdict(self) -> Verdict:
        """Whether the host's manager lives."""
        own_host = self.hosts.get(self.host)
        return judge(self._signs, self._checkpoint, own_host.manager if own_host is not None else None)

    @property
    def _checkpoint(self) -> Checkpoint | None:
        return responsible(self._checkpoints, self.host, self._partitions)

    def sign_of_life(self) -> str | None:
        """What shows that the host's manager may still answer, as a clause; None: nothing does."""
        own_host, checkpoint, life = self.hosts.get(self.host), self._checkpoint, self.verdict.life
        if life is Life.STOPPED or self._hidden is not None:
            return None
        if checkpoint is not None and self._signs.runs_here(checkpoint):
            return "its manager runs on this machine"
        if life is Life.DEAD:
            return None
        boot = own_host.manager.boot_id if own_host is not None else None
        if boot is not None and boot == boot_id() and manager_lock.is_held(self.host):
            return "its manager holds this machine's lock"
        if life is Life.LIVES:
            return "its manager says on the bus that it lives"
        now = datetime.now(UTC)
        if self._last_seen is not None and abs((now - self._last_seen).total_seconds()) <= RECENT_S:
            return f"its manager last wrote {_ago(self._last_seen)}"
        return None

    def end_of_manager(self) -> str | None:
        """What has become of the host's manager if it is stopped, or has given no sign of life for so long that it
        counts as dead, as `outfitter status` says it; None: nothing is known of an end."""
        verdict = self.verdict
        if verdict.life not in UNSERVED:
            return None
        return f"the manager of host {self.host!r} {in_words(verdict, _ago)}"

    def error(self) -> NoManagerError | BusUnavailableError:
        """Why a worker of `host` gets no answer: there is no manager, or its answer cannot be read."""
        if self._hidden is not None:
            return BusUnavailableError(
                f"{self._bus.url}: the answer for host {self.host!r} cannot be read yet: the end of {self._topic}/"
                f"{self._own} stays undecided: {self._hidden}"
            )
        return NoManagerError(f"no manager answers for host {self.host!r}: {'; '.join(self._clauses())}")

    def _clauses(self) -> Iterator[str]:
        own_host = self.hosts.get(self.host)
        verdict, checkpoint = self.verdict, self._checkpoint
        if own_host is not None and own_host.manager.stopped_at is not None:
            yield f"its manager {own_host.manager.instance} was stopped {_ago(own_host.manager.stopped_at)}"
        elif verdict.life is Life.STOPPED and verdict.at is not None and checkpoint is not None:
            yield f"its manager {checkpoint.instance} was stopped {_ago(verdict.at)}"
        elif verdict.life is Life.DEAD:
            yield f"its manager {in_words(verdict, _ago)}"
        elif self._last_seen is not None:
            yield f"its manager last wrote {_ago(self._last_seen)} and has not reported that it stopped"
        elif self.own_was_read:
            yield "it never had a manager here"
        else:
            yield "the ledger could not be read, so it is not known whether there is one"
        served = sorted(name for name, host in self.hosts.items() if host.manager.stopped_at is None)
        others = [name for name in served if name != self.host]
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        listed = ", ".join(others[:_SHOWN]) + more if others else "none"
        yield f"other hosts served: {listed}" + ("" if self.complete else " (not all partitions were read)")
        start = f"--host {self.host}" if self._scope == HOST_SCOPE else "--scope cluster"
        remedy = f"start one with `outfitter serve {start}`, or " if verdict.process is None else ""
        yield f"{remedy}check host, bus {self._bus.url} and cluster {self._cluster!r}"


def _ago(at: datetime) -> str:
    seconds = max(0, int((datetime.now(UTC) - at).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago ({at:%Y-%m-%dT%H:%M:%SZ})"
    return f"{seconds} s ago ({at:%Y-%m-%dT%H:%M:%SZ})"

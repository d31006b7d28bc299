"""Tells where the records of a ledger are, from the bytes of its partitions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from outfitter_proto.bus import Message
from outfitter_proto.codec import WireError, decode_ledger
from outfitter_proto.keys import CHECKPOINT, HOST, host_of, is_sweeper, writer_names, writer_of
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint
from outfitter_service.runtime.changelog.backup.archive import SavedRecord
from outfitter_service.runtime.changelog.topic_layout import unfinished


class Places:
    """Sees the records of all partitions, in their order.

    `checkpoints`: the last ones, encoded, by partition and key; they have `checkpoint_bytes`.
    """

    def __init__(self, partitions: int) -> None:
        """`partitions`: their number, which determines where a host's records belong."""
        self.checkpoints: dict[tuple[int, bytes], bytes] = {}
        self.checkpoint_bytes = 0
        self._partitions = partitions
        self._homes: dict[str, int] = {}
        self._at_home: set[str] = set()
        self._strays: dict[tuple[int, bytes], str] = {}

    def see(self, partition: int, record: Message | SavedRecord) -> None:
        """The next record of a partition."""
        key, value = record.key or b"", record.value
        self._strays.pop((partition, key), None)
        if key.startswith(CHECKPOINT):
            self._see_checkpoint((partition, key), value)
        writer = writer_of(key)
        host = host_of(key) if writer is None else writer_names(writer).host
        if host is None:
            return
        if self._home(host) != partition:
            if value is not None:
                self._strays[partition, key] = host
        elif value is not None:
            self._at_home.add(host)
        elif key.startswith(HOST):
            self._at_home.discard(host)

    @property
    def has_managers(self) -> bool:
        """Whether there is a manager's checkpoint, readable or not."""
        return any(not is_sweeper(writer_of(key) or "") for _, key in self.checkpoints)

    def strays(self, partition: int) -> list[str]:
        """The hosts with records in this partition that belong to another one."""
        return sorted({host for (number, _), host in self._strays.items() if number == partition})

    def readable_checkpoints(self, partition: int | None = None) -> Iterator[Checkpoint]:
        """The last checkpoints of a partition, or of all. Damaged ones are left out; see `damaged`."""
        for (number, key), value in self.checkpoints.items():
            if partition in (None, number):
                with suppress(WireError):
                    record = decode_ledger(value, key=key)
                    if isinstance(record, Checkpoint):
                        yield record

    def damaged(self) -> str | None:
        """Which manager's checkpoint cannot be read, and why; None: all can. A sweeper that has lost its own one sweeps
        from the beginning."""
        for (partition, key), value in self.checkpoints.items():
            if is_sweeper(writer_of(key) or ""):
                continue
            try:
                record = decode_ledger(value, key=key)
            except WireError as error:
                return f"{key.decode(errors='replace')} in partition {partition}: {error}"
            if not isinstance(record, Checkpoint):
                return f"{key.decode(errors='replace')} in partition {partition} is of a later version of Outfitter"
        return None

    def problem(self) -> str | None:
        """Why grants are missing from this ledger, or are in it twice, and what to do; None: neither is known."""
        for record in self.readable_checkpoints():
            if (reason := unfinished(record)) is not None:
                return f"{record.key} says that {reason}"
        places: dict[str, int] = {}
        for (partition, _), host in self._strays.items():
            other = self._home(host) if host in self._at_home else places.setdefault(host, partition)
            if other != partition:
                return (
                    f"host {host!r} has records in partitions {partition} and {other}, and none of them can be called "
                    "the newer ones: end all workers of this host, and begin a new ledger"
                )
        return None

    def _see_checkpoint(self, place: tuple[int, bytes], value: bytes | None) -> None:
        earlier = self.checkpoints.pop(place, None)
        if earlier is not None:
            self.checkpoint_bytes -= len(place[1]) + len(earlier)
        if value is not None:
            self.checkpoints[place] = value
            self.checkpoint_bytes += len(place[1]) + len(value)

    def _home(self, host: str) -> int:
        if host not in self._homes:
            self._homes[host] = partition_of(host, self._partitions)
        return self._homes[host]

"""Tells whether all records of a ledger are where they belong, from the bytes of its partitions."""

from __future__ import annotations

from msgspec import UNSET

from outfitter_proto.bus import Message
from outfitter_proto.codec import WireError, decode_ledger
from outfitter_proto.keys import CHECKPOINT, host_of, is_sweeper, writer_names, writer_of
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint
from outfitter_service.runtime.changelog.backup.archive import SavedRecord
from outfitter_service.runtime.changelog.shape import MOVING, is_half_restored

_HALF_RESTORED = "its records are being restored"


class Places:
    """Sees the records of all partitions, in their order, and names then what is not where it belongs.

    Such a ledger lacks grants, or has some of them twice.
    """

    def __init__(self, partitions: int) -> None:
        """`partitions`: their number, which determines where a host's records belong."""
        self._partitions = partitions
        self._of_hosts: dict[str, int] = {}
        self._strays: dict[tuple[int, bytes], str] = {}
        self._unfinished: dict[tuple[int, bytes], str] = {}

    def see(self, partition: int, record: Message | SavedRecord) -> None:
        """The next record of a partition."""
        key, value = record.key or b"", record.value
        self._strays.pop((partition, key), None)
        self._unfinished.pop((partition, key), None)
        if value is None:
            return
        writer = writer_of(key)
        host = host_of(key) if writer is None else writer_names(writer).host
        if host is not None and self._belongs(host) != partition:
            self._strays[partition, key] = host
        if key.startswith(CHECKPOINT) and (state := self._state(key, value)) is not None:
            self._unfinished[partition, key] = state

    @property
    def half_restored(self) -> bool:
        """Whether `outfitter restore` has not completed the ledger."""
        return _HALF_RESTORED in self._unfinished.values()

    def problem(self) -> str | None:
        """What is not where it belongs; None: nothing."""
        for (partition, key), state in self._unfinished.items():
            return f"{key.decode(errors='backslashreplace')} in partition {partition} says that {state}"
        for (partition, _), host in self._strays.items():
            return f"partition {partition} has records of host {host!r}, which belong in {self._belongs(host)}"
        return None

    def _belongs(self, host: str) -> int:
        if host not in self._of_hosts:
            self._of_hosts[host] = partition_of(host, self._partitions)
        return self._of_hosts[host]

    def _state(self, key: bytes, value: bytes) -> str | None:
        """What a manager's checkpoint says about its records, unless they are complete among this number of
        partitions."""
        try:
            record = decode_ledger(value, key=key)
        except WireError:
            return None  # whoever restores it says what is damaged
        if not isinstance(record, Checkpoint) or is_sweeper(record.writer):
            return None
        if is_half_restored(record):
            return _HALF_RESTORED
        if record.partitions == MOVING:
            return "its records are being moved"
        if record.partitions in (UNSET, self._partitions):
            return None
        return f"its records are among {record.partitions} partitions"

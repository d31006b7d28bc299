"""The contents of one partition of the ledger, as far as growth needs them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, Struct

from outfitter_proto.bus import Bus
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_ledger
from outfitter_proto.keys import CHECKPOINT, HOST, host_of, is_sweeper, writer_names, writer_of
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint, Host


class CannotGrowError(RuntimeError):
    """The topics cannot get more partitions now. The message says what to do."""


class PartitionContents(Struct, kw_only=True):
    """What lies in one partition of the ledger. `checkpoints`: by writer. `at_work`: the hosts whose managers have not
    said that they stopped. `strays`: records of hosts that belong elsewhere, as they are on the wire, by host and
    key."""

    checkpoints: dict[str, Checkpoint] = {}
    at_work: list[str] = []
    strays: dict[str, dict[bytes, bytes]] = {}


async def read_contents(bus: Bus, topic: str, partition: int, partitions: int) -> PartitionContents:
    """The committed contents of one partition of the ledger, for growth to `partitions`.

    Raises:
        CannotGrowError: a checkpoint that cannot be read.
        BusError: the ledger cannot be read.
    """
    last: dict[bytes, bytes] = {}
    places: dict[str, int] = {}
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                key = message.key or b""
                if message.value is None:
                    last.pop(key, None)
                elif key.startswith((CHECKPOINT, HOST)) or _strays(key, partition, partitions, places):
                    last[key] = message.value
    return _sorted(last, partition, partitions, f"{topic}/{partition}")


def _strays(key: bytes, partition: int, partitions: int, places: dict[str, int]) -> bool:
    host = _whose(key)
    if host is None:
        return False
    if host not in places:
        places[host] = partition_of(host, partitions)
    return places[host] != partition


def _whose(key: bytes) -> str | None:
    """The host of a record or of its manager's checkpoint."""
    writer = writer_of(key)
    return host_of(key) if writer is None else writer_names(writer).host


def _sorted(last: Mapping[bytes, bytes], partition: int, partitions: int, place: str) -> PartitionContents:
    found = PartitionContents()
    places: dict[str, int] = {}
    for key, value in last.items():
        if key.startswith((CHECKPOINT, HOST)):
            try:
                record = decode_ledger(value, key=key)
            except WireError as error:
                if key.startswith(HOST):
                    record = None
                else:
                    raise CannotGrowError(f"{error}. The ledger in {place} is damaged there: repair it") from error
            if isinstance(record, Checkpoint):
                found.checkpoints[record.writer] = record
            elif isinstance(record, Host) and record.manager.stopped_at is None:
                found.at_work.append(record.host)
        host = _whose(key)
        if host is not None and _strays(key, partition, partitions, places):
            found.strays.setdefault(host, {})[key] = value
    return found


def unfinished(found: PartitionContents, partitions: int) -> list[str]:
    """The writers whose checkpoint has another number of partitions. A sweeper's has none."""
    return [
        writer for writer, each in found.checkpoints.items() if not is_sweeper(writer) and each.partitions != partitions
    ]


def is_begun(found: PartitionContents, partitions: int) -> bool:
    """Whether growth to so many was announced there, and unread registrations are still to be sent again."""
    grown = [each.grown for each in found.checkpoints.values() if each.grown is not UNSET]
    return any(each.until is UNSET and each.partitions < partitions for each in grown)

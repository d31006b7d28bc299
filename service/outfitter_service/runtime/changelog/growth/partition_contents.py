"""The contents of one partition of the ledger, as far as growth needs them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, Struct

from outfitter_proto.bus import Bus
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_ledger
from outfitter_proto.keys import (
    CHECKPOINT,
    HOST,
    host_of,
    host_writer,
    is_sweeper,
    partition_writer,
    writer_names,
    writer_of,
)
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint, Host
from outfitter_service.runtime.changelog.ledger_format import refusal
from outfitter_service.runtime.changelog.shape import HALF_RESTORED, is_half_restored


class CannotGrowError(RuntimeError):
    """The topics cannot get more partitions now. The message says what to do."""


class PartitionContents(Struct, kw_only=True):
    """The contents of one partition of the ledger. `checkpoints`: by writer. `at_work`: the hosts whose managers have
    not written that they stopped. `strays`: the encoded records of hosts that belong to another partition, by host and
    key."""

    checkpoints: dict[str, Checkpoint] = {}
    at_work: list[str] = []
    strays: dict[str, dict[bytes, bytes]] = {}

    def copies(self, partition: int, partitions: int) -> list[str]:
        """The hosts with strays in this partition although their manager's checkpoint here says that all records are
        where they belong among `partitions`. Growth never leaves that."""
        owner = self.checkpoints.get(partition_writer(partition))
        keepers = {host: self.checkpoints.get(host_writer(host)) or owner for host in self.strays}
        return [host for host, keeper in keepers.items() if keeper is not None and keeper.partitions == partitions]


async def read_contents(bus: Bus, topic: str, partition: int, partitions: int) -> PartitionContents:
    """The committed contents of one partition of the ledger, for growth to `partitions`.

    Raises:
        CannotGrowError: a checkpoint cannot be read, or is of a later version.
        BusError: the ledger cannot be read.
    """
    last: dict[bytes, bytes] = {}
    partitions_of_hosts: dict[str, int] = {}
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                key = message.key or b""
                if message.value is None:
                    last.pop(key, None)
                elif key.startswith((CHECKPOINT, HOST)) or _is_stray(key, partition, partitions, partitions_of_hosts):
                    last[key] = message.value
    return _sorted(last, partition, partitions, f"{topic}/{partition}")


def _is_stray(key: bytes, partition: int, partitions: int, partitions_of_hosts: dict[str, int]) -> bool:
    """Whether a record of this partition belongs to another one. `partitions_of_hosts`: the results so far."""
    host = _host_of(key)
    if host is None:
        return False
    if host not in partitions_of_hosts:
        partitions_of_hosts[host] = partition_of(host, partitions)
    return partitions_of_hosts[host] != partition


def _host_of(key: bytes) -> str | None:
    """The host of a record or of its manager's checkpoint."""
    writer = writer_of(key)
    return host_of(key) if writer is None else writer_names(writer).host


def _sorted(last: Mapping[bytes, bytes], partition: int, partitions: int, topic_partition: str) -> PartitionContents:
    """The contents, from the last value of each key."""
    contents = PartitionContents()
    partitions_of_hosts: dict[str, int] = {}
    for key, value in last.items():
        if key.startswith((CHECKPOINT, HOST)):
            try:
                record = decode_ledger(value, key=key)
            except WireError as error:
                if key.startswith(HOST):
                    record = None
                else:
                    raise CannotGrowError(
                        f"{error}. The ledger in {topic_partition} is damaged there: repair it"
                    ) from error
            if isinstance(record, Checkpoint):
                _refuse(record, topic_partition)
                contents.checkpoints[record.writer] = record
            elif isinstance(record, Host) and record.manager.stopped_at is None:
                contents.at_work.append(record.host)
        host = _host_of(key)
        if host is not None and _is_stray(key, partition, partitions, partitions_of_hosts):
            contents.strays.setdefault(host, {})[key] = value
    return contents


def _refuse(checkpoint: Checkpoint, topic_partition: str) -> None:
    """Refuse a ledger of which this version could lose something."""
    if (reason := refusal(checkpoint)) is not None:
        raise CannotGrowError(f"{topic_partition}: {reason}")
    if is_half_restored(checkpoint):
        raise CannotGrowError(f"{topic_partition}: {HALF_RESTORED}")


def unfinished(contents: PartitionContents, partitions: int) -> list[str]:
    """The writers whose checkpoint has another number of partitions. A sweeper's checkpoint has no number."""
    return [
        writer
        for writer, checkpoint in contents.checkpoints.items()
        if not is_sweeper(writer) and checkpoint.partitions != partitions
    ]


def is_begun(contents: PartitionContents, partitions: int) -> bool:
    """Whether growth to `partitions` was announced in this partition, and unread registrations are still to be sent
    again."""
    grown = [each.grown for each in contents.checkpoints.values() if each.grown is not UNSET]
    return any(each.until is UNSET and each.partitions < partitions for each in grown)

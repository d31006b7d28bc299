"""Checks for `outfitter topics check` that a cluster's ledger is in the partitions where it was written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from msgspec import UNSET

from outfitter_proto.bus import Bus, BusAccessError, TopicLayout
from outfitter_proto.bus.reading import read_to
from outfitter_proto.keys import host_writer, is_sweeper, partition_writer
from outfitter_proto.names import Topics, topics, transactional_id
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint
from outfitter_proto.topics import TopicDifference
from outfitter_service.runtime.changelog.places import Places
from outfitter_service.runtime.changelog.topic_layout import replacing, unfinished

_SHOWN = 3
_ADOPT = (
    "make sure that `outfitter status` shows each running worker's allocation, then start each manager once with "
    "--adopt-ledger"
)


async def check(bus: Bus, cluster: str, host: str) -> list[TopicDifference]:
    """The differences between the topics and the ledger's data about them; empty if there are none, or no topics. Reads
    the whole ledger. `host`: the host whose manager's writer is looked for, besides those of cluster scope.

    Raises:
        BusError: the bus failed.
    """
    names = topics(cluster)
    layouts = await bus.layouts([*names])
    if not {names.allocations, names.registrations} <= layouts.keys():
        return []
    ledger, registrations = layouts[names.allocations], layouts[names.registrations]
    differences: list[TopicDifference] = []
    emptied: list[TopicDifference] = []
    try:
        for partition in range(ledger.partitions):
            topic_partition = f"{names.allocations}/{partition}"
            places = await _read(bus, names.allocations, partition, ledger.partitions)
            if strays := places.strays(partition):
                differences.append(_strays(topic_partition, strays, ledger.partitions))
            own = [each for each in places.readable_checkpoints() if not is_sweeper(each.writer)]
            differences += _of_checkpoints(topic_partition, own, ledger, registrations)
            trace = await _trace(bus, cluster, names, layouts, partition, host) if not places.has_managers else None
            if trace is not None:
                emptied.append(_emptied(topic_partition, trace))
            if not bus.local:
                start, _ = await bus.offsets(names.allocations, partition)
                differences += _deleted(topic_partition, own, start)
    except BusAccessError as error:
        why = "it cannot be checked whether each host's records are where its manager looks for them"
        remedy = f"grant this principal Read on topic {names.allocations}: {error}"
        differences.append(
            TopicDifference(names.allocations, "(records)", "not shown to this principal", "shown", why, remedy, False)
        )
    # whoever adopted a ledger whose records are elsewhere would lend again what they have
    return differences if any(each.fatal for each in differences) else differences + emptied


async def _read(bus: Bus, topic: str, partition: int, partitions: int) -> Places:
    places = Places(partitions)
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                places.see(partition, message)
    return places


async def _trace(
    bus: Bus, cluster: str, names: Topics, layouts: Mapping[str, TopicLayout], partition: int, host: str
) -> str | None:
    """What shows that managers have written to a partition whose ledger has no checkpoint; None: nothing does."""
    writers = [partition_writer(partition)]
    if partition_of(host, layouts[names.allocations].partitions) == partition:
        writers.append(host_writer(host))
    for writer in writers:
        identity = transactional_id(cluster, writer)
        with suppress(BusAccessError):  # a principal that may not see transactions: other traces may tell
            if await bus.has_committed(identity):
                return f"{identity!r} has committed"
    _, end = await bus.offsets(names.allocations, partition)
    for topic in (names.history, names.dead_letters):
        if end == 0 and topic in layouts and await _has_records(bus, topic, partition):
            return f"{topic}/{partition} has records"
    return None


async def _has_records(bus: Bus, topic: str, partition: int) -> bool:
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        async for messages in read_to(reader, end):
            if messages:
                return True
    return False


def _emptied(topic_partition: str, trace: str) -> TopicDifference:
    return TopicDifference(
        topic_partition, "ledger", "nothing", f"what managers have written ({trace})",
        "the topic was recreated, or restored without its records: grants may be missing, so managers do not start",
        _ADOPT, True,
    )  # fmt: skip


def _strays(topic_partition: str, hosts: list[str], partitions: int) -> TopicDifference:
    shown = ", ".join(hosts[:_SHOWN]) + (f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else "")
    return TopicDifference(
        topic_partition, "records", f"those of {shown}", f"those of hosts of this one of {partitions} partitions",
        "partitions were added, or it was restored with another number: managers look elsewhere, and would grant these "
        "hosts' devices again, so they do not start",
        replacing(partitions), True,
    )  # fmt: skip


def _of_checkpoints(
    topic_partition: str, checkpoints: list[Checkpoint], ledger: TopicLayout, registrations: TopicLayout
) -> list[TopicDifference]:
    differences: list[TopicDifference] = []
    for each in checkpoints:
        where = f"{topic_partition} ({each.writer})"
        if (reason := unfinished(each)) is not None:
            differences.append(
                TopicDifference(where, "records", "not all", "all", "managers do not start on a part", reason, True)
            )
        elif each.partitions not in (UNSET, ledger.partitions):
            differences.append(
                TopicDifference(
                    where, "partitions", str(each.partitions), str(ledger.partitions),
                    "partitions were added, and not all records are where they belong: managers do not start",
                    replacing(ledger.partitions), True,
                )
            )  # fmt: skip
        if each.ledger_id not in (UNSET, ledger.id):
            differences.append(
                TopicDifference(
                    where, "ledger", f"of topic id {each.ledger_id}", ledger.id,
                    "the topic was recreated, or restored from a copy: grants may be missing, so managers do not start",
                    _ADOPT, True,
                )
            )  # fmt: skip
        if each.input.topic_id != registrations.id:
            differences.append(
                TopicDifference(
                    where, "input", f"of topic id {each.input.topic_id}", registrations.id,
                    "the registrations topic was recreated: unanswered registrations are lost, and the new topic is "
                    "read from its beginning",
                    "none: its manager continues when it starts, and logs it", False,
                )
            )  # fmt: skip
    return differences


def _deleted(topic_partition: str, checkpoints: list[Checkpoint], start: int) -> list[TopicDifference]:
    return [
        TopicDifference(
            f"{topic_partition} ({each.writer})", "start", str(start), str(each.ledger_start or 0),
            "records before it were deleted, by hand or by a cleanup.policy other than compact: grants may be missing, "
            "so managers do not start",
            _ADOPT, True,
        )
        for each in checkpoints
        if start > (each.ledger_start or 0)
    ]  # fmt: skip

"""Hosts that workers ask for and no manager serves: as the newest dead letters tell, less those that have one now."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

import anyio

from outfitter_proto import codec, names
from outfitter_proto.bus import Bus
from outfitter_proto.records import DeadLetter, NobodysCode
from outfitter_service.cli import ledger

NEWEST = 2_000
"""Dead letters of each partition that are looked at."""
_AT_ONCE = 8


class Unserved(NamedTuple):
    """A host without a manager: how many of its messages are among the newest dead letters, and since the last one."""

    host: str
    messages: int
    last: datetime


async def find(bus: Bus, cluster: str, *, served: Collection[str], host: str | None = None) -> list[Unserved]:
    """The hosts without a manager, of all or narrowed to `host`; `served` are those that have one.

    Raises:
        BusError: the dead letters cannot be read.
    """
    found: dict[str, Unserved] = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def read_one(partition: int) -> None:
        async with limiter:
            for letter in await _newest(bus, names.topics(cluster).dead_letters, partition):
                asked = letter.message_key
                if (
                    letter.code != NobodysCode.NO_MANAGER
                    or asked is None
                    or asked in served
                    or host not in (None, asked)
                ):
                    continue
                before = found.get(asked)
                found[asked] = Unserved(asked, 1 + (before.messages if before else 0), letter.at)

    async with anyio.create_task_group() as group:
        for partition in await ledger.partitions(bus, cluster, host):
            group.start_soon(read_one, partition)
    return sorted(found.values())


async def _newest(bus: Bus, topic: str, partition: int) -> list[DeadLetter]:
    start, _ = await bus.offsets(topic, partition)
    end = await bus.stable_end(topic, partition)
    letters: list[DeadLetter] = []
    async with await bus.open_reader(topic, partition, start=max(start, end - NEWEST), committed=True) as reader:
        while reader.position < end:
            for message in await ledger.fetch(reader):
                try:
                    letters.append(codec.decode_dead_letter(message.value or b""))
                except codec.WireError:
                    continue  # of a later version
    return letters

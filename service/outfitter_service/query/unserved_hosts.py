"""Messages that reached no manager, from the newest dead letters: for hosts without a manager, and misdirected ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

import anyio

from outfitter_proto import codec, names
from outfitter_proto.bus import Bus, BusAuthorizationError, Right
from outfitter_proto.bus.reading import read_to
from outfitter_proto.records import DeadLetter, NobodysCode
from outfitter_proto.support.causes import side_by_side
from outfitter_service.query import ledger_view

NEWEST = 2_000
"""How many dead letters of each partition are read: the last ones."""
_AT_ONCE = 8
"""Partitions that are read at the same time."""


class UnansweredHost(NamedTuple):
    """A host without a manager: the number of its messages among the newest dead letters, and the time of the last."""

    host: str
    messages: int
    last: datetime


class LostMessages(NamedTuple):
    """`misdirected`: the number, by code, of messages that no host's manager would have read."""

    hosts: list[UnansweredHost]
    misdirected: dict[str, int]


async def find(
    bus: Bus, cluster: str, *, served: Collection[str], since: datetime, host: str | None = None
) -> LostMessages:
    """The messages lost since a moment, of all hosts or of `host` only. `served`: the hosts with a manager.

    Raises:
        BusError: the dead letters cannot be read.
    """
    topic = names.topics(cluster).dead_letters
    if missing := await bus.missing_rights([Right("Read", "topic", topic)]):
        raise BusAuthorizationError(missing[0])  # brokers would name Describe, which is not enough
    hosts: dict[str, UnansweredHost] = {}
    misdirected: Counter[str] = Counter()
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def read_one(partition: int) -> None:
        async with limiter:
            for letter in await _newest(bus, topic, partition):
                key = letter.message_key
                if letter.at < since or not isinstance(letter.code, str) or host not in {None, key}:
                    continue
                count = letter.count or 1
                if letter.code != NobodysCode.NO_MANAGER:
                    misdirected[letter.code] += count
                elif key is not None and key not in served:
                    before = hosts.get(key)
                    hosts[key] = UnansweredHost(key, count + (before.messages if before else 0), letter.at)

    async with side_by_side() as group:
        # a message in a wrong partition is a dead letter there
        for partition in await ledger_view.partitions(bus, cluster, None):
            group.start_soon(read_one, partition)
    return LostMessages(sorted(hosts.values()), dict(misdirected))


async def _newest(bus: Bus, topic: str, partition: int) -> list[DeadLetter]:
    start, _ = await bus.offsets(topic, partition)
    end = await bus.stable_end(topic, partition)
    letters: list[DeadLetter] = []
    async with await bus.open_reader(
        topic, partition, start=max(start, end - NEWEST), committed=True, lenient=True
    ) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                try:
                    letters.append(codec.decode_dead_letter(message.value or b""))
                except codec.WireError:
                    continue  # of a later version
    return letters

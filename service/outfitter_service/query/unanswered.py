"""Counts the messages that lie unanswered because their host's manager is stopped or dead."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from outfitter_proto import names
from outfitter_proto.bus import Bus, BusError
from outfitter_proto.bus.reading import read_to
from outfitter_proto.records import Checkpoint

NEWEST = 2_000
"""How many messages of each partition are read: the last ones."""


class UnansweredMessages:
    """Counts again and again, and reads each message once. `counts`: by host."""

    def __init__(self, bus: Bus, cluster: str) -> None:
        self.counts: dict[str, int] = {}
        self._bus = bus
        self._topic = names.topics(cluster).registrations
        self._read_to: dict[int, int] = {}
        self._counted: dict[int, dict[str, int]] = {}
        """By partition: from which offset on each host's messages were counted."""

    async def look(self, unserved: Mapping[str, Checkpoint]) -> None:
        """Count the messages of these hosts behind their manager's last checkpoint. Raises nothing: who may not read
        registrations gets no counts."""
        of_partition: defaultdict[int, dict[str, int]] = defaultdict(dict)
        for host, checkpoint in unserved.items():
            position = checkpoint.input
            of_partition[position.partition][host] = max(position.to, (position.ahead or {}).get(host, 0))
        counts: dict[str, int] = {}
        for partition, starts in of_partition.items():
            try:
                found = await self._count(partition, starts)
            except BusError:
                continue
            self._counted[partition] = starts
            counts |= found
        self.counts = counts

    async def _count(self, partition: int, starts: dict[str, int]) -> dict[str, int]:
        first, end = await self._bus.offsets(self._topic, partition)
        is_new = self._counted.get(partition) != starts
        start = min(starts.values()) if is_new else self._read_to[partition]
        start = max(first, min(start, end), end - NEWEST)
        counts = Counter(dict.fromkeys(starts, 0))
        if not is_new:
            counts.update({host: self.counts.get(host, 0) for host in starts})
        if start < end:
            reader = await self._bus.open_reader(self._topic, partition, start=start, committed=False)
            async with reader:
                async for messages in read_to(reader, end):
                    for message in messages:
                        host = (message.key or b"").decode("utf-8", "replace")
                        if message.offset < end and message.offset >= starts.get(host, end):
                            counts[host] += 1
        self._read_to[partition] = end
        return dict(counts)

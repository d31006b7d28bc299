"""Partition 0 of a topic as it lies at its broker: record batches as they are, packed."""

from __future__ import annotations

from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.produce import ProduceRequest

from outfitter_proto.bus.kafka import KafkaBus
from outfitter_proto.bus.kafka.reading import batches


class PartitionLog:
    """Reads and appends record batches."""

    def __init__(self, bus: KafkaBus) -> None:
        self._bus = bus

    async def batches(self, topic: str, start: int = 0) -> list[batches.RecordBatch]:
        found: list[batches.RecordBatch] = []
        _, end = await self._bus.offsets(topic, 0)
        while start < end:
            request = FetchRequest(500, 1, 2**20, 0, [(topic, [(0, start, 2**20)])])
            row = await self._bus._cluster.ask_leader(topic, 0, request)
            found += batches.split(row[-1])
            start = found[-1].next
        return found

    async def size(self, *names: str) -> int:
        return sum([len(batch.data) for name in names for batch in await self.batches(name)])

    async def append(self, topic: str, batch: bytes) -> None:
        request = ProduceRequest(
            transactional_id=None, required_acks=-1, timeout=3000, topics=[(topic, [(0, batch)])]
        )  # fmt: skip
        row = await self._bus._cluster.ask_leader(topic, 0, request, repeatable=False)
        assert row[1] == 0

"""Publishes records without transactions. The records that arrive while a batch is under way form the next batch.

aiokafka's producer is unsuitable. Without a broker it asks and logs a hundred times a second, and sends unsent records
later. Here a record is acknowledged or its publisher gets an error. The publisher needs only Write on the topic.
"""

from __future__ import annotations

import asyncio

from aiokafka.protocol.produce import ProduceRequest

from outfitter_proto.bus.kafka.connecting.cluster import REQUEST_TIMEOUT, Cluster
from outfitter_proto.bus.kafka.connecting.protocol import OK, refusal
from outfitter_proto.bus.kafka.writing.record_batches import split
from outfitter_proto.bus.port import BusUnavailableError, Entry, TooLargeError

FULL_BYTES = 256 * 1024
"""Size of a full batch. A single record may be larger; the topic's limit applies."""

_Waiting = tuple[Entry, "asyncio.Future[int]"]


class BatchingPublisher:
    """Publishes to one partition in batches."""

    def __init__(self, cluster: Cluster, topic: str, partition: int) -> None:
        self._cluster = cluster
        self._topic = topic
        self._partition = partition
        self._waiting: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    async def publish(self, entry: Entry) -> int:
        """Publish the record; return its offset once all in-sync replicas have it."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name=f"publish {self._topic}/{self._partition}")
        return await answer

    async def aclose(self) -> None:
        """Stop sending. Waiting publishers get an error."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending], timeout=1)

    async def _send_all(self) -> None:
        try:
            while batch := self._next_batch():
                await self._send(batch)
        finally:
            self._sending = None
            left, self._waiting = self._waiting, []
            for _, answer in left:
                if not answer.done():
                    answer.set_exception(BusUnavailableError(f"{self._cluster.url}: the bus was closed"))

    def _next_batch(self) -> list[_Waiting]:
        """The records of the next batch, without those of cancelled publishers."""
        size = 0
        batch: list[_Waiting] = []
        for entry, answer in self._waiting:
            size += len(entry.key or b"") + len(entry.value or b"") + 32
            if batch and size > FULL_BYTES:
                break
            batch.append((entry, answer))
        del self._waiting[: len(batch)]
        return [pair for pair in batch if not pair[1].done()] or (self._next_batch() if self._waiting else [])

    async def _send(self, batch: list[_Waiting]) -> None:
        try:
            base = await self._produce([entry for entry, _ in batch])
        except TooLargeError as error:
            if len(batch) == 1:
                _reject(batch, error)
                return
            for pair in batch:  # one record is too large for the topic, so send each alone
                await self._send([pair])
        except asyncio.CancelledError:
            _reject(batch, BusUnavailableError(f"{self._cluster.url}: the bus was closed"))
            raise
        except Exception as error:  # noqa: BLE001  (the waiting publishers must get any error)
            _reject(batch, error)
        else:
            for number, (_, answer) in enumerate(batch):
                if not answer.done():
                    answer.set_result(base + number)

    async def _produce(self, entries: list[Entry]) -> int:
        """Send one batch. Never repeat it once it may have arrived, to avoid duplicates."""
        [batch] = split(self._topic, entries, transactional=False, limit=2**31 - 1)
        batch.encode()
        request = ProduceRequest(
            transactional_id=None,
            required_acks=-1,
            timeout=int(REQUEST_TIMEOUT * 1000),
            topics=[(self._topic, [(self._partition, batch.data)])],
        )
        _, code, offset, *_ = await self._cluster.ask_leader(self._topic, self._partition, request, repeatable=False)
        if code != OK:
            raise refusal(self._cluster.login, code, topic=self._topic, operation="Write")
        return int(offset)


def _reject(batch: list[_Waiting], error: Exception) -> None:
    """Raise the error in each waiting publisher."""
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(error)

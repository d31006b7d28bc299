"""A cursor over one partition, with a fetch loop of our own that prefetches one answer.

The next fetch runs while the caller handles the records of the last one. It belongs to the reader, so a cancelled
`fetch` loses nothing: the next call gets the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anyio
from aiokafka.protocol.fetch import FetchRequest

from outfitter_proto.bus.kafka.connecting.cluster import ANSWER_WITHIN, EARLIEST, LATEST, Cluster
from outfitter_proto.bus.kafka.connecting.protocol import OFFSET_OUT_OF_RANGE, OK, refusal
from outfitter_proto.bus.kafka.reading import batches
from outfitter_proto.bus.kafka.reading.answer_allowance import Allowance
from outfitter_proto.bus.kafka.reading.batches import RecordBatch
from outfitter_proto.bus.port import BusUnavailableError, DamagedTopicError, Message, OffsetOutOfRangeError, Reader

LONG_POLL = 0.5
"""Seconds for which a broker holds a fetch without records. It sends new records at once."""
THROTTLED_POLL = 1.5
"""The same once a quota has held this reader back, because answers without records count in quotas, too."""
LATE_S = 0.5
"""Seconds beyond the poll from which on an answer is late. An outage that is over before a `fetch` of a second can tell
is shorter than the usual grace of a lease."""
DECODED_BYTES = 1024 * 1024
"""Bytes of decoded records in memory from which on no further batch is decompressed. One answer can have hundreds."""
FALSE_ANSWER_PAUSE_S = 0.05
"""Seconds until a fetch is repeated after a false OFFSET_OUT_OF_RANGE."""
FETCH_BYTES = 1024 * 1024
"""Bytes of one answer. A larger batch still comes whole."""
_FIELDS_WITHOUT_LOG_START = 6


class _Answer:
    """The answer of one fetch, decoded batch by batch on demand."""

    def __init__(self, data: bytes, aborted: list[tuple[int, int]] | None, at: int, *, committed: bool) -> None:
        whole = _whole(data, at)
        self.next = whole[-1].next if whole else at
        """The offset after it."""
        self.left: Iterator[tuple[RecordBatch, bool]] = (
            batches.committed(iter(whole), aborted or ()) if committed else batches.everything(iter(whole))
        )
        """Its batches that are not decoded yet, each with whether its records are visible."""


class KafkaReader(Reader):
    """Reads one partition. It has its own connections, because a held fetch would delay other requests."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        partition: int,
        start: int,
        *,
        committed: bool,
        lenient: bool = False,
        allowance: Allowance | None = None,
    ) -> None:
        """`lenient`: see `Bus.open_reader`. `allowance` counts the bytes read, before decompression."""
        self.position = start
        self.has_answered = False
        self._cluster = cluster
        self._topic = topic
        self._partition = partition
        self._committed = committed
        self._lenient = lenient
        self._allowance = allowance
        self._buffer: list[Message] = []
        self._taken = 0  # how many records at the start of the buffer the caller has already
        self._decoded = start  # the offset after the last batch in the buffer
        self._answer: _Answer | None = None
        self._fetching: asyncio.Task[_Answer] | None = None
        self._closed = False
        self._poll = LONG_POLL
        self._asked_at = 0.0  # by the clock of `patience`

    async def fetch(self, *, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
        """Return the next records; see `Reader.fetch`.

        An unreadable batch is one message without a key for a lenient reader, so that no sender can block the
        partition. For others it is an error: in the ledger, it may hold what is lent.
        """
        if self._closed:
            raise BusUnavailableError(f"{self._cluster.url}: the reader of {self._topic}/{self._partition} is closed")
        deadline = anyio.current_time() + timeout
        while True:
            self._decode(max_records)
            if self._taken < len(self._buffer):
                return self._pop(max_records)
            if self._fetching is None:
                self._fetching = self._start_fetch(self.position)
            await asyncio.wait([self._fetching], timeout=max(0.0, deadline - anyio.current_time()))
            if not self._fetching.done():
                # held back, it does not know what has come since: silence shows nothing
                self.has_answered = self.has_answered and not self._cluster.patience.is_held_back
                owed = self._cluster.patience.now() - self._asked_at - self._poll
                self.late_s = owed if owed > LATE_S else 0.0
                return []
            fetched, self._fetching = self._fetching, None
            self.has_answered = False
            self.late_s = 0.0
            try:
                self._answer = fetched.result()
            finally:
                del fetched  # else its error's traceback would keep it, and all messages of the callers, alive
            self.has_answered = True
            if self._answer.next > self.position:
                self._fetching = self._start_fetch(self._answer.next)

    async def seek(self, offset: int) -> None:
        """Read from `offset` next."""
        await self._stop_fetching()
        self.position = self._decoded = offset
        self._buffer, self._taken, self._answer = [], 0, None

    async def aclose(self) -> None:
        """Close the connections. Repeatable and bounded."""
        self._closed = True
        await self._stop_fetching()
        await self._cluster.aclose()

    def _pop(self, max_records: int) -> list[Message]:
        if self._taken == 0 and len(self._buffer) <= max_records:
            popped, self._buffer = self._buffer, []
        else:
            popped = self._buffer[self._taken : self._taken + max_records]
            self._taken += len(popped)
        if self._taken >= len(self._buffer):
            self._buffer, self._taken = [], 0
            self.position = self._decoded
        else:
            self.position = self._buffer[self._taken].offset
        return popped

    def _decode(self, max_records: int) -> None:
        """Decode batches of the answer until there are `max_records` records or no more batches."""
        if self._answer is None:
            return
        decoded_bytes = 0
        while len(self._buffer) - self._taken < max_records and decoded_bytes < DECODED_BYTES:
            batch, visible = next(self._answer.left, (None, False))
            if batch is None:
                self._answer = None
                break
            if visible and batch.next > self._decoded:
                decoded = self._messages(batch)
                if self._allowance is not None:
                    self._allowance.read(batch.next, len(batch.data))
                if batch.base < self._decoded:  # it begins before the position, because brokers send whole batches
                    decoded = [m for m in decoded if m.offset >= self._decoded]
                decoded_bytes += sum(len(m.value) for m in decoded if m.value is not None)
                self._buffer += decoded
            self._decoded = max(self._decoded, batch.next)
        if self._taken >= len(self._buffer):
            self.position = self._decoded

    def _messages(self, batch: RecordBatch) -> list[Message]:
        try:
            return batches.messages(batch, self._topic, self._partition)
        except batches.UnreadableBatchError as error:
            if self._lenient:
                return [batches.raw_message(batch, self._topic, self._partition, error)]
            self._restart(batch.base)
            raise DamagedTopicError(
                f"{self._cluster.url}: {self._topic}/{self._partition}: {error}. No manager writes such a batch, and "
                "nobody reads past it, because what it hides may be lent. Restore a backup into new topics"
            ) from error
        except batches.CorruptBatchError as error:
            self._restart(batch.base)
            raise BusUnavailableError(f"{self._cluster.url}: {error}") from error

    def _restart(self, at: int) -> None:
        """Fetch again from `at`. Keep decoded records before it, and drop the prefetched answer."""
        self._answer = None
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None
            self._cluster.forget()
        self._decoded = max(self._decoded, at)
        if self._taken >= len(self._buffer):
            self.position = self._decoded

    def _start_fetch(self, at: int) -> asyncio.Task[_Answer]:
        task = asyncio.create_task(self._fetch(at), name=f"fetch {self._topic}/{self._partition}")
        task.add_done_callback(_mark_error_seen)
        return task

    async def _fetch(self, at: int) -> _Answer:
        deadline = self._cluster.patience.now() + ANSWER_WITHIN
        while True:
            request = FetchRequest(
                int(self._poll * 1000), 1, FETCH_BYTES, int(self._committed),
                [(self._topic, [(self._partition, at, FETCH_BYTES)])],
            )  # fmt: skip
            self._asked_at = self._cluster.patience.now()
            row = await self._cluster.ask_leader(self._topic, self._partition, request)
            if row is None:
                self._poll = THROTTLED_POLL
                continue
            code = row[1]
            if code != OFFSET_OUT_OF_RANGE:
                break
            # A newly elected leader, or one that does not know of its successor yet, may answer so by mistake.
            await self._cluster.ask_majority(self._topic)
            start = await self._cluster.offset(self._topic, self._partition, EARLIEST)
            end = await self._cluster.offset(self._topic, self._partition, LATEST)
            if start <= at <= end and self._cluster.patience.now() < deadline:
                await anyio.sleep(FALSE_ANSWER_PAUSE_S)
                continue
            raise OffsetOutOfRangeError(
                f"{self._cluster.url}: {self._topic}/{self._partition} has the offsets {start} to {end}, not {at}",
                start=start,
                end=end,
            )
        if code != OK:
            raise refusal(self._cluster.login, code, topic=self._topic, operation="Read")
        # After the error code: high watermark, last stable offset, [log start], aborted, [preferred replica], records.
        aborted = row[4] if len(row) == _FIELDS_WITHOUT_LOG_START else row[5]
        try:
            return _Answer(row[-1] or b"", aborted, at, committed=self._committed)
        except batches.CorruptBatchError as error:
            raise BusUnavailableError(f"{self._cluster.url}: {self._topic}/{self._partition}: {error}") from error

    async def _stop_fetching(self) -> None:
        task, self._fetching = self._fetching, None
        if task is None:
            return
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task], timeout=1)
        # A broker answers the requests of a connection in order. Drop it, so that no request waits for the abandoned
        # one.
        self._cluster.forget()


def _whole(data: bytes, at: int) -> list[RecordBatch]:
    """The complete batches of an answer, up to a corrupt one, which is fetched again.

    Raises:
        CorruptBatchError: the answer has bytes but no complete batch.
    """
    whole: list[RecordBatch] = []
    try:
        whole.extend(batches.split(data))
    except batches.CorruptBatchError:
        if not whole:
            raise
    if data and (not whole or whole[-1].next <= at):
        raise batches.CorruptBatchError(f"the broker's answer holds {len(data)} bytes, and no whole batch from {at} on")
    return whole


def _mark_error_seen(task: asyncio.Task[_Answer]) -> None:
    """Mark an error as seen, so that asyncio does not log it after the reader was closed."""
    if not task.cancelled():
        task.exception()

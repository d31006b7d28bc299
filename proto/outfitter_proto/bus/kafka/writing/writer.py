"""A writer identity on Kafka: one transactional id, one transaction a commit."""

from __future__ import annotations

from collections.abc import Sequence

from outfitter_proto.bus.kafka.reading.answer_allowance import Allowance
from outfitter_proto.bus.kafka.reading.codecs import FAST, GZIP, SMALL, ZSTD
from outfitter_proto.bus.kafka.writing.record_batches import BATCH_BYTES, Batch, split
from outfitter_proto.bus.kafka.writing.transactions import TransactionalId
from outfitter_proto.bus.port import BusUnavailableError, Entry, TooLargeError, Writer
from outfitter_proto.names import is_history

MAX_BATCH_BYTES = 900 * 1024
"""Limit of keys and values in a commit's last part. The records' headers (about 15 bytes each) are added, and the
topic's limit is 1 MiB. Large batches are better, because a transaction of any size costs milliseconds."""


class KafkaWriter(Writer):
    """See `Writer`. A commit becomes visible a few milliseconds after it returns, when the broker has written the
    markers. `Bus.stable_end` waits for that.

    `held`: the transactional id, taken. `allowance`: see `answer_allowance`. `watchdog`: see `TransactionalId.commit`.
    """

    def __init__(
        self, name: str, partition: int, held: TransactionalId, *, allowance: Allowance, watchdog: float
    ) -> None:
        self.partition = partition
        self._name = name
        self._held = held
        self._allowance = allowance
        self._watchdog = watchdog
        self._unusable = False
        self._closed = False
        self._busy = False

    @property
    def must_reopen(self) -> bool:
        """See `Writer.must_reopen`."""
        return self._unusable or self._held.may_act_late

    @property
    def max_part_bytes(self) -> int:
        """See `Writer.max_part_bytes`."""
        return MAX_BATCH_BYTES

    @property
    def tenure(self) -> str:
        """See `Writer.tenure`."""
        return str(self._held.holder)

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        """One transaction; see `Writer.commit`. Once the request to commit is sent, cancellation waits for its answer
        for as long as the watchdog."""
        if self._unusable or self._closed or self._busy:
            raise BusUnavailableError(f"{self._name} is {'busy' if self._busy else 'at its end'}: open a new one")
        batches = self._prepare(parts)
        if not batches:
            return
        self._busy = True
        finished = False
        try:
            await self._held.commit(batches, within=self._watchdog)
            finished = True
        finally:
            self._busy = False
            # after a TooLargeError from the broker, too: the batch that it refused has a sequence number
            self._unusable = not finished

    async def aclose(self) -> None:
        """Abort an open transaction and close."""
        self._closed = True
        await self._held.aclose()

    def _prepare(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> list[Batch]:
        """The record batches, in order. All must fit before the first is sent.

        History and dead letters, which are kept long and read seldom, are always compressed. The last part is
        compressed only if the commit exceeds the allowance. Workers of any language read it, and dead letters, so these
        have gzip, which needs no library."""
        filled = [(topic, entries) for topic, entries in parts if entries]
        if not filled:
            return []
        prepared = [batch for topic, entries in filled for batch in self._batches(topic, entries)]
        topic, entries = filled[-1]
        last = prepared[-1]
        if last.count != len(entries):
            raise TooLargeError(
                f"{self._name}: the last part ({len(entries)} records for {topic!r}) does not fit into one "
                f"record batch of {BATCH_BYTES} bytes; keep it within max_part_bytes = {MAX_BATCH_BYTES}"
            )
        is_plain = self._allowance.take(last.size)
        for batch in prepared[:-1] if is_plain else prepared:
            batch.pack(ZSTD if is_history(batch.topic) else GZIP, FAST if is_plain else SMALL)
        return prepared

    def _batches(self, topic: str, entries: Sequence[Entry]) -> list[Batch]:
        """The record batches of one part."""
        batches = split(topic, entries, transactional=True)
        done = 0
        for batch in batches:
            if batch.size > BATCH_BYTES:  # a single record
                entry = entries[done]
                raise TooLargeError(
                    f"{self._name}: the record with key {entry.key!r} for {topic!r} is {len(entry.value or b'')} "
                    f"bytes; at most about {BATCH_BYTES} fit"
                )
            done += batch.count
        return batches

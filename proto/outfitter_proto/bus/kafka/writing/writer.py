"""A writer identity on Kafka: one transactional producer, one transaction a commit.

The meaning of an error depends on whether the request to commit was sent. Before that, nothing can become visible.
After that, only an answer decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from aiokafka import errors as kafka_errors

from outfitter_proto.bus.kafka.connecting.cluster import Cluster
from outfitter_proto.bus.kafka.connecting.protocol import TOPIC_AUTHORIZATION_FAILED, UNKNOWN_TOPIC, refusal
from outfitter_proto.bus.kafka.reading.answer_allowance import Allowance
from outfitter_proto.bus.kafka.reading.codecs import FAST, GZIP, SMALL, ZSTD
from outfitter_proto.bus.kafka.writing.producer import BUILDER_BYTES, TransactionalProducer, pack, sent_bytes
from outfitter_proto.bus.port import BusUnavailableError, CommitUnknownError, Entry, FencedError, TooLargeError, Writer
from outfitter_proto.names import is_history

MAX_BATCH_BYTES = 900 * 1024
"""Limit of keys and values in a commit's last part. The records' headers (about 15 bytes each) are added, and the
topic's limit is 1 MiB. Large batches are better, because a transaction of any size costs milliseconds."""

_FENCED = (kafka_errors.ProducerFenced, kafka_errors.InvalidProducerEpoch)
_Batch = tuple[str, Any]


class KafkaWriter(Writer):
    """See `Writer`. A commit becomes visible a few milliseconds after it returns, when the broker has written the
    markers. `Bus.stable_end` waits for that.

    `allowance`: see `answer_allowance`. `watchdog`: time limit of one step in seconds. `release`: called after an
    orderly end. `clean_up`: disposes of the producer in the background.
    """

    def __init__(
        self,
        identity: str,
        partition: int,
        producer: TransactionalProducer,
        cluster: Cluster,
        *,
        allowance: Allowance,
        watchdog: float,
        release: Callable[[], None],
        clean_up: Callable[[], None],
    ) -> None:
        self.partition = partition
        self._login = producer.connector.login
        self._identity = identity
        self._name = f"{self._login.url}: writer {identity!r}"
        self._producer = producer
        self._cluster = cluster
        self._allowance = allowance
        self._watchdog = watchdog
        self._release = release
        self._clean_up = clean_up
        self._unusable = False
        self._closed = False
        self._busy = False

    @property
    def must_reopen(self) -> bool:
        """See `Writer.must_reopen`."""
        return self._unusable or self._producer.may_act_late

    @property
    def max_part_bytes(self) -> int:
        """See `Writer.max_part_bytes`."""
        return MAX_BATCH_BYTES

    @property
    def tenure(self) -> str:
        """See `Writer.tenure`."""
        return self._producer.tenure

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        """One transaction; see `Writer.commit`.

        Each await has a watchdog, because aiokafka retries for ever without an error. Once the request to commit is
        sent, cancellation waits for its answer as long as the watchdog.
        """
        if self._unusable or self._closed or self._busy:
            raise BusUnavailableError(f"{self._name} is {'busy' if self._busy else 'at its end'}: open a new one")
        prepared = self._prepare(parts)
        if not prepared:
            return
        self._busy = True
        finished = False
        try:
            await self._send(prepared)
            await self._end()
            finished = True
        finally:
            self._busy = False
            # After a TooLargeError from the broker, too: the producer has counted a batch that the broker refused.
            self._unusable = not finished

    async def aclose(self) -> None:
        """Abort an open transaction and close. A producer that may hang is disposed of in the background."""
        if self._closed:
            return
        self._closed = True
        if self.must_reopen:
            self._clean_up()
        else:
            await self._producer.dispose(1.0)
            self._release()

    def _prepare(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> list[_Batch]:
        """The record batches, in order. All must fit before the first is sent.

        History and dead letters, which are kept long and read seldom, are always compressed. The last part is
        compressed only if the commit exceeds the allowance. Workers of any language read it, and dead letters, so these
        have gzip, which needs no library."""
        prepared: list[_Batch] = []
        filled = [(topic, entries) for topic, entries in parts if entries]
        for number, (topic, entries) in enumerate(filled):
            builders = self._pack(topic, entries)
            if number == len(filled) - 1 and len(builders) > 1:
                raise TooLargeError(
                    f"{self._name}: the last part ({len(entries)} records for {topic!r}) does not fit into one "
                    f"record batch of {BUILDER_BYTES} bytes; keep it within max_part_bytes = {MAX_BATCH_BYTES}"
                )
            prepared += [(topic, builder) for builder in builders]
        if prepared:
            is_plain = self._allowance.take(prepared[-1][1].size())
            for topic, builder in prepared[:-1] if is_plain else prepared:
                pack(builder, ZSTD if is_history(topic) else GZIP, FAST if is_plain else SMALL)
        return prepared

    def _pack(self, topic: str, entries: Sequence[Entry]) -> list[Any]:
        """The record batches of one topic."""
        packed = self._producer.pack(entries)
        done = 0
        for batch in packed:
            if batch.size() > BUILDER_BYTES:  # a single record
                entry = entries[done]
                raise TooLargeError(
                    f"{self._name}: the record with key {entry.key!r} for {topic!r} is {len(entry.value or b'')} "
                    f"bytes; at most about {BUILDER_BYTES} fit"
                )
            done += batch.record_count()
        return packed

    async def _send(self, prepared: list[_Batch]) -> None:
        """Begin the transaction and wait until all batches are acknowledged, because a commit would succeed even
        without one of them. They are sent concurrently, because none is visible before the commit."""
        refused = prepared[-1]
        try:
            with self._producer.patience.limit(self._watchdog * len(prepared)):
                await self._producer.begin_transaction()
                self._producer.announce((topic for topic, _ in prepared), self.partition)
                acknowledged = []
                for topic, builder in prepared:
                    future = await self._producer.send_batch(builder, topic, partition=self.partition)
                    future.add_done_callback(_mark_error_seen)
                    acknowledged.append(future)
                for batch, future in zip(prepared, acknowledged, strict=True):
                    refused = batch  # if this one's acknowledgement is an error
                    await future
        except TimeoutError as error:
            raise BusUnavailableError(
                f"{self._name}: records were not acknowledged in time; nothing is committed{self._why}"
            ) from error
        except (kafka_errors.KafkaError, kafka_errors.IllegalOperation, AssertionError, OSError) as error:
            # The producer's own failure, in the background, is the cause. This error may be its consequence.
            reason = _root(self._producer.failure or error)
            if isinstance(reason, _FENCED):
                raise self._fenced() from error
            if isinstance(reason, kafka_errors.BrokerResponseError):
                if reason.errno == UNKNOWN_TOPIC:
                    for topic, _ in prepared:
                        await self._cluster.topic(topic, fresh=True)  # raises an error that names the one that is gone
                raise refusal(
                    self._login, reason.errno, topic=topic_of(reason) or refused[0], operation="Write",
                    name=self._identity, detail=str(reason), size=sent_bytes(refused[1]),
                ) from error  # fmt: skip
            why = self._producer.answers.trouble or str(reason) or type(reason).__name__
            raise BusUnavailableError(f"{self._name}: nothing is committed: {why}") from error

    async def _end(self) -> None:
        """Commit, and raise the error for an uncertain or failed result."""
        try:
            with anyio.CancelScope(shield=True), self._producer.patience.limit(self._watchdog):
                await self._producer.commit_transaction()
        except TimeoutError as error:
            raise CommitUnknownError(f"{self._name}: no answer to the request to commit{self._why}") from error
        except _FENCED as error:
            if self._producer.may_act_late:  # perhaps the first request committed, and only its repetition was fenced
                raise CommitUnknownError(f"{self._name}: fenced while it asked again to commit") from error
            raise self._fenced() from error
        except (kafka_errors.KafkaError, kafka_errors.IllegalOperation, AssertionError, OSError) as error:
            raise CommitUnknownError(f"{self._name}: {str(error) or type(error).__name__}") from error

    @property
    def _why(self) -> str:
        """What is known of the cause of a missing answer."""
        trouble = self._producer.answers.trouble
        return f" ({trouble})" if trouble is not None else ""

    def _fenced(self) -> FencedError:
        return FencedError(f"{self._name} was taken over, or its transaction was open for too long")


def _root(error: BaseException) -> BaseException:
    """The cause of an error of aiokafka's background task, which itself says only that delivery has failed."""
    while isinstance(error, kafka_errors.KafkaError) and isinstance(error.__cause__, kafka_errors.KafkaError):
        error = error.__cause__
    return error


def topic_of(error: kafka_errors.BrokerResponseError) -> str | None:
    """The topic in an aiokafka error."""
    [topic] = error.args if len(error.args) == 1 else [None]
    if isinstance(topic, set):
        topic = min(topic, default=None)
    return topic if isinstance(topic, str) and error.errno == TOPIC_AUTHORIZATION_FAILED else None


def _mark_error_seen(future: asyncio.Future[Any]) -> None:
    """Mark a batch's error as seen. Its first awaiter reports it; asyncio need not log it, too."""
    if not future.cancelled():
        future.exception()

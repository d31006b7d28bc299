"""The model broker: topics, the transaction coordinator, and nothing that could be asked of it but by a request.

Transactions as in Kafka's KIP-98 with the requests' first version, which is what aiokafka speaks: an epoch is
raised by whoever initialises the producer and by the coordinator when it aborts, and by nothing else. A transaction is
decided when EndTxn is answered; its markers reach each partition later. A partition takes a transaction's first
batch only after it has asked the coordinator (KIP-890, part 1).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outfitter_proto.bus import Entry, Message, TopicInfo, UnknownTopicError
from simulation.loop import Loop
from simulation.model.errors import (
    CONCURRENT_TRANSACTIONS,
    INVALID_PRODUCER_EPOCH,
    INVALID_PRODUCER_ID,
    INVALID_TXN_STATE,
    OUT_OF_ORDER_SEQUENCE,
    OutOfRangeError,
    RefusedError,
)
from simulation.model.group import Group
from simulation.model.log import Log, Part, Seen

EMPTY, ONGOING, PREPARE, COMPLETE = "empty", "ongoing", "prepare", "complete"
LONG_POLL_S = 1.5


class Producer(NamedTuple):
    """A transactional producer as it names itself in each request."""

    identity: str
    id: int
    epoch: int


class Transaction:
    """What the coordinator knows of one transactional id."""

    def __init__(self, identity: str, id_: int) -> None:
        self.identity = identity
        self.id = id_
        self.epoch = -1
        self.state = EMPTY
        self.commit = False
        self.places: dict[tuple[str, int], None] = {}
        self.begun = 0.0
        self.timeout = 0.0


class Habits(NamedTuple):
    """How slow the broker is: seconds until a marker is written (at most), between two looks for transactions that
    were open for too long, and between two compactions (None: never)."""

    marker_s: float = 0.05
    scan_s: float = 1.0
    clean_s: float | None = 10.0


class Broker:
    """See the module. All methods but `run` answer one request, at once; a `Future` is an answer that comes later."""

    def __init__(self, loop: Loop, seed: int, topics: Mapping[str, bool], partitions: int, habits: Habits) -> None:
        """`topics` by name: whether they are compacted."""
        self._loop = loop
        self._dice = random.Random(f"{seed}/broker")
        self._habits = habits
        self.partitions = partitions
        self.topics = dict.fromkeys(topics, partitions)
        """The topics that there are, with their numbers of partitions."""
        self.logs = {
            (topic, number): Log(topic, number, compact=compact)
            for topic, compact in topics.items()
            for number in range(partitions)
        }
        self.transactions: dict[str, Transaction] = {}
        self.groups: dict[str, Group] = {}
        self.gone: list[Log] = []
        """What topics held that were deleted and made anew, in the order in which that happened."""
        self.timed_out = 0
        self.too_large: list[str] = []
        """The commits that were larger than the topics take, although nobody had lowered that."""
        self.lowered_to: int | None = None
        """What an administrator has lowered that to, for all topics; None: nothing was lowered."""

    def now(self) -> float:
        return self._loop.time()

    async def run(self) -> None:
        """What a broker does by itself."""
        cleaned = self._loop.time()
        while True:
            await asyncio.sleep(self._habits.scan_s)
            now = self._loop.time()
            for group in self.groups.values():
                group.expel()
            for transaction in self.transactions.values():
                if transaction.state == ONGOING and now - transaction.begun > transaction.timeout:
                    self.timed_out += 1
                    self._abort(transaction)
            if self._habits.clean_s is not None and now - cleaned >= self._habits.clean_s:
                cleaned = now
                for log in self.logs.values():
                    if log.compact:
                        log.clean()

    # --- topics ---

    def topic(self, name: str) -> TopicInfo:
        if name not in self.topics:
            raise UnknownTopicError(f"there is no topic {name}")
        config = {"max.message.bytes": str(self.lowered_to)} if self.lowered_to is not None else {}
        lives = 1 + sum(log.topic == name and log.partition == 0 for log in self.gone)
        topic_id = f"id-of-{name}" if lives == 1 else f"id-{lives}-of-{name}"
        return TopicInfo(name, topic_id, self.topics[name], 3, config)

    def add_topic(self, name: str, *, compact: bool) -> None:
        """Make a topic of one partition."""
        self.topics[name] = 1
        self.logs[name, 0] = Log(name, 0, compact=compact)

    def lose(self, name: str) -> None:
        """Delete a topic."""
        for number in range(self.topics.pop(name)):
            old = self.logs.pop((name, number))
            self.gone.append(old)
            old.tell()

    def remake(self, name: str) -> None:
        """Delete a topic and make it anew, under another id. Who asks for it by name finds the new one."""
        for number in range(self.topics[name]):
            old = self.logs[name, number]
            self.gone.append(old)
            self.logs[name, number] = Log(name, number, compact=old.compact)
            old.tell()

    def lives(self, topic: str, partition: int) -> list[Log]:
        """A partition of all topics that had a name, one after the other."""
        gone = [log for log in self.gone if (log.topic, log.partition) == (topic, partition)]
        return [*gone, self.logs[topic, partition]]

    def publish(self, log: Log, entry: Entry) -> int:
        return log.append([entry], self._loop.time())

    def offset(self, log: Log, *, committed: bool) -> tuple[int, int]:
        return log.start, log.stable if committed else log.end

    def fetch(
        self, log: Log, position: int, most: int, *, committed: bool
    ) -> tuple[list[Message], int] | asyncio.Future[tuple[list[Message], int]]:
        """Records from `position`; when there are none, they are waited for a while."""
        if not log.start <= position <= log.end:
            raise OutOfRangeError(log.start, log.end)
        messages, after = log.read(position, most, committed=committed)
        if messages or after > position:
            return messages, after
        answer: asyncio.Future[tuple[list[Message], int]] = self._loop.create_future()

        def look() -> None:
            timer.cancel()
            if not answer.done():
                answer.set_result(log.read(max(position, log.start), most, committed=committed))

        def give_up() -> None:
            log.forget(look)
            if not answer.done():
                answer.set_result(([], position))

        timer = self._loop.call_later(LONG_POLL_S, give_up)
        log.listen(look)
        return answer

    # --- producers ---

    def is_committing(self, identity: str) -> bool:
        """DescribeTransactions: whether some partitions do not show yet what a writer has committed."""
        own = self.transactions.get(identity)
        return own is not None and own.state == PREPARE and own.commit

    def has_committed(self, identity: str) -> bool:
        """DescribeTransactions: whether a writer's last transaction was committed."""
        own = self.transactions.get(identity)
        return own is not None and own.state in (PREPARE, COMPLETE) and own.commit

    def init_producer(self, identity: str, timeout: float) -> Producer:
        """InitProducerId: fence whoever had the identity, and end what it left open."""
        transaction = self.transactions.get(identity)
        if transaction is None:
            transaction = self.transactions[identity] = Transaction(identity, 1000 + len(self.transactions))
        if transaction.state == ONGOING:
            self._abort(transaction)
        if transaction.state == PREPARE:
            raise RefusedError(CONCURRENT_TRANSACTIONS)
        transaction.epoch += 1
        transaction.state = EMPTY
        transaction.timeout = timeout
        return Producer(identity, transaction.id, transaction.epoch)

    def add_partitions(self, producer: Producer, logs: Sequence[Log]) -> None:
        """AddPartitionsToTxn: begin a transaction, or widen it."""
        transaction = self._check(producer)
        if transaction.state == PREPARE:
            raise RefusedError(CONCURRENT_TRANSACTIONS)
        if transaction.state != ONGOING:
            transaction.state = ONGOING
            transaction.begun = self._loop.time()
            transaction.places = {}
        transaction.places.update(dict.fromkeys(log.place for log in logs))

    def produce(self, producer: Producer, log: Log, sequence: int, entries: Sequence[Entry]) -> int:
        """Produce one batch within a transaction; the same one twice is written once. A partition that knows nothing of
        a producer takes whatever number comes first."""
        seen = log.seen.get(producer.id)
        if seen is None:
            seen = log.seen[producer.id] = Seen(producer.epoch)
            seen.next = sequence
        if producer.epoch > seen.epoch:
            seen = log.seen[producer.id] = Seen(producer.epoch)
        if producer.epoch < seen.epoch:
            raise RefusedError(INVALID_PRODUCER_EPOCH)
        for first, offset in seen.batches:
            if first == sequence:
                return offset
        if sequence != seen.next:
            raise RefusedError(OUT_OF_ORDER_SEQUENCE)
        part = log.open.get(producer.id)
        if part is None:
            transaction = self.transactions[producer.identity]
            if transaction.epoch != producer.epoch:
                raise RefusedError(INVALID_PRODUCER_EPOCH)
            if transaction.state != ONGOING or log.place not in transaction.places:
                raise RefusedError(INVALID_TXN_STATE)
            part = log.open[producer.id] = Part(producer.id, log.end)
        offset = log.append(entries, self._loop.time(), part)
        seen.next += len(entries)
        seen.batches.append((sequence, offset))
        return offset

    def end(self, producer: Producer, *, commit: bool) -> None:
        """EndTxn: once this is answered, the transaction is decided; its markers follow."""
        transaction = self._check(producer)
        if transaction.state == ONGOING:
            self._prepare(transaction, commit=commit)
        elif transaction.state == PREPARE and transaction.commit == commit:
            raise RefusedError(CONCURRENT_TRANSACTIONS)
        elif transaction.state != COMPLETE or transaction.commit != commit:
            raise RefusedError(INVALID_TXN_STATE)

    def _check(self, producer: Producer) -> Transaction:
        transaction = self.transactions[producer.identity]
        if transaction.id != producer.id:
            raise RefusedError(INVALID_PRODUCER_ID)
        if transaction.epoch != producer.epoch:
            raise RefusedError(INVALID_PRODUCER_EPOCH)
        return transaction

    def _abort(self, transaction: Transaction) -> None:
        """The coordinator's own abort fences the producer, too."""
        transaction.epoch += 1
        self._prepare(transaction, commit=False)

    def _prepare(self, transaction: Transaction, *, commit: bool) -> None:
        transaction.state = PREPARE
        transaction.commit = commit
        places = list(transaction.places)
        self._dice.shuffle(places)
        left = len(places)

        def mark(place: tuple[str, int]) -> None:
            nonlocal left
            self.logs[place].mark(transaction.id, transaction.epoch, commit=commit, now=self._loop.time())
            left -= 1
            if left == 0:
                transaction.state = COMPLETE

        for place in places:
            self._loop.call_later(self._dice.random() * self._habits.marker_s, mark, place)
        if not places:
            transaction.state = COMPLETE

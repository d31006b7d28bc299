"""A transactional id and its transactions: six requests of our own, each visible, none in the background.

| | version 1 | version 2 (KIP-890) |
|---|---|---|
| where | every broker | clusters in which `transaction.version` 2 is switched on |
| a partition joins by | AddPartitionsToTxn | being written to |
| a commit takes | three round trips, more if the last one is not complete | two round trips |
| the epoch rises | when the id is taken, or a transaction expires | with the end of each transaction as well |
| a late request to end one | ends the next one of the epoch | is refused |

So in version 1 the id is taken anew after a request to the coordinator got no answer, although its repetition was
answered. In version 2 that answer settles it. `steps` has each answer and what is known then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest

from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka.connecting.cluster import REQUEST_TIMEOUT, Cluster, UnansweredError
from outfitter_proto.bus.kafka.connecting.connection import Connector
from outfitter_proto.bus.kafka.connecting.diagnosis import OldBrokerError
from outfitter_proto.bus.kafka.connecting.protocol import (
    OK,
    TOPIC_AUTHORIZATION_FAILED,
    TRANSACTIONAL_ID_DENIED,
    UNKNOWN_TOPIC,
    DescribeTransactionsRequest,
    EpochEndTxnRequest,
    FeaturesRequest,
    JoiningProduceRequest,
    coordinator_of,
    error_in_words,
    features,
    refusal,
)
from outfitter_proto.bus.kafka.writing.open_transactions import LastTransaction
from outfitter_proto.bus.kafka.writing.record_batches import Batch
from outfitter_proto.bus.kafka.writing.steps import NO_ANSWER, Known, Step, known
from outfitter_proto.bus.patience import Patience
from outfitter_proto.bus.port import (
    BusAuthorizationError,
    BusError,
    BusUnavailableError,
    CommitUnknownError,
    FencedError,
)
from outfitter_proto.support.backoff import Backoff
from outfitter_proto.support.causes import side_by_side

VERSION = "transaction.version"
"""The feature of a cluster that tells the version of its transactions."""
ABORTED_WITHIN_S = 1.0
"""Time limit of the abort when a holder ends and has a transaction open."""
_PAUSE_S = 0.002, 0.1
"""The coordinator answers a commit before it writes the markers, and refuses the next transaction until they are
written. That is mostly a matter of milliseconds."""
MARKED_AFTER_S = 0.001
"""Seconds after which the markers of a commit are mostly written. In version 2 a leader that is written to before that
waits for 20 ms (add.partitions.to.txn.retry.backoff.ms): one commit of nine, if they follow at once."""
_NOT_TRIED = 55
"""The code of topics that are not added because of another one."""


class Holder(NamedTuple):
    """How brokers know a holder of a transactional id. Of two with one producer id, the later has the higher epoch."""

    producer_id: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.producer_id}/{self.epoch}"


class Reply(NamedTuple):
    """What came of one request. `code`, `answer`: None if there was no answer."""

    known: Known
    code: int | None
    answer: Any


class TransactionalId:
    """A holder of a transactional id, once `take` has returned. One call at a time.

    Its coordinator and the leaders have connections of their own: a quota on what is written must not hold back the
    end of the transaction, which others wait for.
    """

    def __init__(
        self,
        connector: Connector,
        identity: str,
        partition: int,
        *,
        timeout_s: float,
        last: LastTransaction | None = None,
    ) -> None:
        """`partition`: the one of each topic to which it writes. `timeout_s`: of its transactions. `last`: the id's
        last transaction, as an earlier attempt to take the id has seen it."""
        self.patience = Patience(connector.patience)
        """The clock for time limits of whoever waits for it."""
        self.last = last
        """The id's last transaction before it was taken. None: unknown, or complete."""
        self.may_act_late = False
        """A request of version 1 got no answer. A late copy of it opens or ends a later transaction of this epoch."""
        self.trouble: str | None = None
        """Why a request failed or must be repeated, at last."""
        self.version = 1
        self.holder = Holder(-1, -1)
        self._login = connector.login
        self._directory = connector.directory
        self._identity = identity
        self._partition = partition
        self._timeout_s = timeout_s
        self._leaders = Cluster(connector, identity, self.patience)
        self._coordination = Cluster(connector, identity, self.patience)
        self._coordinator: Node | None = None
        self._sequences: Counter[str] = Counter()
        self._is_open = False
        self._marked_at = 0.0
        self._name = f"{self._login.url}: writer {identity!r}"

    async def aclose(self) -> None:
        """Abort an open transaction and close the connections. Bounded; unreachable brokers raise nothing."""
        with anyio.CancelScope(shield=True):
            await self._leaders.aclose()  # first, so that nothing is written after the abort
            if self._is_open:
                self._is_open = False
                with anyio.move_on_after(ABORTED_WITHIN_S), suppress(BusError):
                    reply = await self._attempt(Step.END, self._ending(commit=False))
                    self._become(reply)
            await self._coordination.aclose()

    # --- taking the id ---

    async def take(self, topics: Collection[str]) -> None:
        """Take the id: the coordinator fences its last holder and aborts what that has open. Then complete the last
        transaction in `topics`, see `LastTransaction`. Repeats requests until cancelled.

        Raises:
            BusError: nobody answers, a right is missing, or the id must be taken anew.
        """
        await self._found_coordinator()
        request = InitProducerIdRequest(self._identity, int(self._timeout_s * 1000))
        self._become(await self._repeated(Step.TAKE, request, first=self._see_last))
        self.version = 2 if await self._speaks_version_2() else 1
        if topics and self.last is not None and not self.last.is_none:
            await self._complete(topics, commit=self.last.committed)
            self.last = None

    async def _see_last(self) -> None:
        """See how the last transaction ended. Taking the id makes its coordinator forget that."""
        try:
            reply = await self._repeated(Step.DESCRIBE, DescribeTransactionsRequest(self._identity))
        except OldBrokerError:  # Kafka before 3.0 does not know the question
            seen = LastTransaction("Unknown")
        else:
            [(_, _, state, _, _, producer_id, epoch, *_)] = reply.answer.transaction_states
            seen = LastTransaction(state, producer_id, epoch) if reply.code == OK else LastTransaction("")
        self.last = self.last.then(seen) if self.last is not None else seen

    async def _speaks_version_2(self) -> bool:
        try:
            answer = await self._coordination.send(self._coordinator, FeaturesRequest())
        except OldBrokerError:  # it is older than features
            return False
        return features(answer).get(VERSION, 0) >= 2

    async def _complete(self, topics: Collection[str], *, commit: bool) -> None:
        """End an empty transaction in these topics. Its markers decide whatever the producer id has open there. It is
        one of version 1, because in version 2 no partition joins without records."""
        await self._add(topics)
        await self._repeated(Step.END, EndTxnRequest(self._identity, *self.holder, commit))
        if self.may_act_late:
            raise BusUnavailableError(
                f"{self._name}: a request got no answer, and may end a later transaction: take the identity anew"
            )

    # --- a transaction ---

    async def commit(self, batches: Sequence[Batch], *, within: float) -> None:
        """Commit these batches in one transaction. Those of one topic keep their order. `within`: time limit in
        seconds of the end, and times the number of batches of what comes before.

        Raises:
            CommitUnknownError: the outcome is unknown.
            BusError: nothing is committed.
        """
        self._is_open = True
        self.trouble = None
        try:
            with self.patience.limit(within * len(batches)):
                if self.version == 1:
                    await self._add(list(dict.fromkeys(batch.topic for batch in batches)))
                elif (left := self._marked_at - anyio.current_time()) > 0:
                    await anyio.sleep(left)
                while batches:
                    first, batches = _first_of_each_topic(batches)
                    await self._write(first)
        except TimeoutError as error:
            raise BusUnavailableError(
                f"{self._name}: records were not acknowledged in time; nothing is committed{self._why}"
            ) from error
        try:
            with anyio.CancelScope(shield=True), self.patience.limit(within):
                await self._commit_written()
        except TimeoutError as error:
            raise CommitUnknownError(f"{self._name}: no answer to the request to commit{self._why}") from error
        self._is_open = False

    async def _commit_written(self) -> None:
        """Ask for the commit until an answer settles it. A refusal is certain as the first answer. Later it may come
        because an earlier copy of the request has committed, and then somebody took the id."""
        backoff = Backoff(*_PAUSE_S)
        is_doubtful = False
        while True:
            try:
                reply = await self._attempt(Step.END, self._ending(commit=True))
                if reply.known is Known.DONE:
                    self._become(reply)
                    self._marked_at = anyio.current_time() + MARKED_AFTER_S
                    return
                self._refuse(reply)
            except BusError as error:
                if is_doubtful and not isinstance(error, _EndedError):
                    raise CommitUnknownError(f"{self._name}: asked again to commit: {error}") from error
                raise
            is_doubtful |= reply.known is Known.DOUBT
            await anyio.sleep(backoff.next_delay())

    def _ending(self, *, commit: bool) -> Any:
        kind = EpochEndTxnRequest if self.version == 2 else EndTxnRequest
        return kind(self._identity, *self.holder, commit)

    async def _add(self, topics: Collection[str]) -> None:
        """Add the partition of each topic to the transaction (version 1)."""
        partitions = [(topic, [self._partition]) for topic in topics]
        request = AddPartitionsToTxnRequest(self._identity, *self.holder, partitions)
        backoff = Backoff(*_PAUSE_S)
        while (reply := await self._attempt(Step.ADD, request)).known is not Known.DONE:
            self._refuse(reply)
            await anyio.sleep(backoff.next_delay())
            if reply.code == UNKNOWN_TOPIC:
                await self._look_up(topics)

    async def _write(self, batches: Sequence[Batch]) -> None:
        """Write these batches, of different topics, until all are acknowledged: a commit would succeed without one."""
        for batch in batches:
            batch.encode(*self.holder, self._sequences[batch.topic])
            self._sequences[batch.topic] += batch.count
        backoff = Backoff(*_PAUSE_S)
        while batches := await self._unwritten(batches):
            await anyio.sleep(backoff.next_delay())
            await self._look_up([batch.topic for batch in batches])

    async def _unwritten(self, batches: Sequence[Batch]) -> list[Batch]:
        """Send these batches to their leaders, side by side. Returns those to be sent again."""
        codes: dict[str, int] = {}
        by_leader: defaultdict[Node, list[Batch]] = defaultdict(list)
        for batch in batches:
            if (leader := await self._leader(batch.topic)) is not None:
                by_leader[leader].append(batch)
        async with side_by_side() as tasks:
            for leader, some in by_leader.items():
                tasks.start_soon(self._send, leader, some, codes)
        left: list[Batch] = []
        for batch in batches:
            reply = self._reply(Step.WRITE, codes.get(batch.topic))
            self._refuse(reply, topic=batch.topic, size=len(batch.data))
            if reply.known is not Known.DONE:
                left.append(batch)
        return left

    async def _send(self, leader: Node, batches: Sequence[Batch], codes: dict[str, int]) -> None:
        """Send these batches to their leader, and note the code for each topic if there is an answer."""
        timeout_ms = int(REQUEST_TIMEOUT * 1000)
        request: Any
        if self.version == 2:
            written = [(batch.topic, self._partition, batch.data) for batch in batches]
            request = JoiningProduceRequest(self._identity, timeout_ms, written)
        else:
            topics = [(batch.topic, [(self._partition, batch.data)]) for batch in batches]
            request = ProduceRequest(self._identity, -1, timeout_ms, topics)
        try:
            answer = await self._leaders.send(leader, request)
        except BusUnavailableError as error:
            self._note(error)
            return
        codes.update((topic, code) for topic, [(_, code, *_)], *_ in answer.topics)

    async def _leader(self, topic: str) -> Node | None:
        """The leader, as far as is known."""
        try:
            leader = await self._leaders.leader(topic, self._partition)
        except BusUnavailableError as error:
            self._note(error)
            return None
        except BusAuthorizationError as error:  # it may not even see the topic
            raise self._refusal(TOPIC_AUTHORIZATION_FAILED, topic=topic) from error
        if leader is None:
            self.trouble = f"{topic}/{self._partition} has no leader now"
        return leader

    async def _look_up(self, topics: Collection[str]) -> None:
        """Look up the topics' leaders again. Raises an error that names a topic that is gone."""
        for topic in topics:
            try:
                await self._leaders.topic(topic, fresh=True)
            except BusUnavailableError as error:
                self._note(error)

    # --- requests to the coordinator ---

    async def _repeated(self, step: Step, request: Any, *, first: Callable[[], Awaitable[None]] | None = None) -> Reply:
        """Send a request until it is done. `first` comes before each attempt.

        Raises:
            BusError: it is refused.
        """
        backoff = Backoff(*_PAUSE_S)
        while True:
            if first is not None:
                await first()
            reply = await self._attempt(step, request)
            if reply.known is Known.DONE:
                return reply
            self._refuse(reply)
            await anyio.sleep(backoff.next_delay())

    async def _attempt(self, step: Step, request: Any) -> Reply:
        """Send a request to the coordinator, once."""
        reply = Reply(Known.ELSEWHERE, NO_ANSWER, None)  # it was not sent
        is_found = False
        try:
            coordinator = await self._found_coordinator()
            is_found = True
            answer = await self._coordination.send(coordinator, request)
        except BusUnavailableError as error:
            self._note(error)
            if is_found and isinstance(error, UnansweredError):
                self.may_act_late |= isinstance(request, AddPartitionsToTxnRequest | EndTxnRequest)
                reply = self._reply(step, NO_ANSWER)
        else:
            reply = self._reply(step, _code_in(step, answer), answer)
        if reply.known in (Known.ELSEWHERE, Known.DOUBT):
            self._coordinator = None
        return reply

    async def _found_coordinator(self) -> Node:
        """The coordinator. Waits until there is one."""
        backoff = Backoff(*_PAUSE_S)
        while self._coordinator is None:
            found = await self._coordination.send(None, coordinator_of("transactional-id", self._identity))
            if found.error_code == OK:
                self._coordinator = Node(found.host, found.port)
            elif found.error_code == TRANSACTIONAL_ID_DENIED:
                raise self._refusal(found.error_code)
            else:
                self.trouble = self._in_words(found.error_code, "FindCoordinator")
                await anyio.sleep(backoff.next_delay())
        return self._coordinator

    def _become(self, reply: Reply) -> None:
        """Be the holder that an answer tells of, if it does. Its sequences begin anew."""
        if reply.known is Known.DONE and hasattr(reply.answer, "producer_id"):
            self.holder = Holder(reply.answer.producer_id, reply.answer.producer_epoch)
            self._sequences.clear()

    # --- errors ---

    def _reply(self, step: Step, code: int | None, answer: Any = None) -> Reply:
        if code not in (OK, NO_ANSWER):
            self.trouble = self._in_words(code, step)
        return Reply(known(step, code), code, answer)

    def _refuse(self, reply: Reply, *, topic: str | None = None, size: int | None = None) -> None:
        """Raise the error of a request that shall not be repeated."""
        match reply.known:
            case Known.FENCED:
                self._is_open = False
                raise FencedError(f"{self._name} was taken over, or its transaction was open for too long")
            case Known.ENDED:
                self._is_open = False
                raise _EndedError(
                    f"{self._name}: nothing is committed: the brokers have ended its transaction, which may take "
                    f"{self._timeout_s:g} s"
                )
            case Known.REFUSED:
                raise self._refusal(reply.code, topic=topic or _refused_topic(reply.answer), size=size)

    def _refusal(self, code: int | None, *, topic: str | None = None, size: int | None = None) -> BusError:
        name = self._identity
        return refusal(self._login, code or OK, topic=topic, operation="Write", name=name, size=size)

    def _in_words(self, code: int, request: str) -> str:
        return error_in_words(code, request, kind="transactional-id", brokers=len(self._directory.brokers()))

    def _note(self, error: BusError) -> None:
        self.trouble = str(error).removeprefix(f"{self._login.url}: ")

    @property
    def _why(self) -> str:
        """What is known of the cause of a missing answer."""
        return f" ({self.trouble})" if self.trouble is not None else ""


class _EndedError(BusUnavailableError):
    """The transaction has ended without a commit, whatever was asked before."""


def _code_in(step: Step, answer: Any) -> int:
    """The error code in a coordinator's answer."""
    if step is Step.DESCRIBE:
        return int(answer.transaction_states[0][0])
    if step is Step.ADD:
        codes = [code for _, partitions in answer.errors for _, code in partitions if code != OK]
        return next((code for code in codes if code != _NOT_TRIED), codes[0] if codes else OK)
    return int(answer.error_code)


def _refused_topic(answer: Any) -> str | None:
    """The topic that a coordinator refuses to add, if the answer is about that."""
    rows = getattr(answer, "errors", ())
    return next((topic for topic, partitions in rows for _, code in partitions if code not in (OK, _NOT_TRIED)), None)


def _first_of_each_topic(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """The first batch of each topic, because a request takes one of each, and the others."""
    first: dict[str, Batch] = {}
    others = [batch for batch in batches if first.setdefault(batch.topic, batch) is not batch]
    return list(first.values()), others

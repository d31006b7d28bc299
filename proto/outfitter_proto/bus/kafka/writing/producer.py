"""aiokafka's transactional producer, adapted for a ledger. All private names used for writing are here.

- It marks a transactional request that failed inside the client. aiokafka repeats the request silently. A lost copy
  may arrive late and end a later transaction of the same epoch.
- It waits 2 ms, not 20, for the end of the last transaction before it begins the next one.
- It can complete the last transaction of its transactional id in a partition. In Kafka 4.3 a partition may have no
  leader while the coordinator decides the transaction (a restarted broker, before it is unfenced). The coordinator then
  treats the partition as deleted, writes no marker there and counts the transaction as complete (KAFKA-20734). Its
  records hide all later ones until this producer id's next marker decides them, perhaps differently.
- Its connections come from our `Connector`, which explains failures.
- It can be disposed of while the brokers are away, which `stop()` cannot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import anyio
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka import errors as kafka_errors
from aiokafka.producer import sender as aiokafka_sender
from aiokafka.producer.sender import AddPartitionsToTxnHandler, BaseHandler, Sender
from aiokafka.producer.transaction_manager import TransactionState
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest

from outfitter_proto.bus.kafka.connecting.connection import Connector
from outfitter_proto.bus.kafka.connecting.last_answers import LastAnswers
from outfitter_proto.bus.kafka.connecting.protocol import OK, DescribeTransactionsRequest
from outfitter_proto.bus.kafka.reading import batches
from outfitter_proto.bus.patience import Patience
from outfitter_proto.bus.port import Entry

log = logging.getLogger(__name__)

NEXT_TRANSACTION_WAIT = 0.002
"""Seconds. The coordinator answers a commit before it writes the markers, and refuses the next transaction until they
are written. With aiokafka's 20 ms one partition reaches 63 transactions a second, with 2 ms 221."""
RETRY_BACKOFF_MS = 20
BUILDER_BYTES = 1_000_000
"""Limit of a record batch: below Kafka's default of max.message.bytes, 1,048,588."""
WORTH_PACKING = 4096
"""Bytes of a record batch from which on it is compressed."""
_TRANSACTIONAL_ID_NOT_FOUND = 105
_NO_HEADERS: list[Any] = []


def pack(batch: Any, codec: int, level: int) -> None:
    """Make aiokafka compress a batch's records with our codec when it sends them. Its own gzip takes a thousand times
    as long and saves a tenth more."""
    if batch.size() < WORTH_PACKING:
        return
    build = batch._build

    def finish() -> bytearray:
        if batch._buffer is None:
            batch._buffer = batches.packed(build(), codec, level)
        packed: bytearray = batch._buffer
        return packed

    batch._build = finish


def sent_bytes(batch: Any) -> int:
    """The bytes of a batch as it was sent: compressed, if it was compressed."""
    return len(batch._buffer) if batch._buffer is not None else int(batch.size())


class LastTransaction(NamedTuple):
    """A transactional id's last transaction."""

    state: str
    """By Kafka's names."""
    producer_id: int = -1
    """The id's holder's. -1: unknown."""
    epoch: int = -1
    """The id's holder's. -1: unknown."""

    @property
    def is_none(self) -> bool:
        """Whether the coordinator knows no holder, so that no transaction can be open."""
        return not self.state

    @property
    def committed(self) -> bool:
        """Whether the decision is to commit. The next holder aborts an undecided transaction."""
        return self.state in ("PrepareCommit", "CompleteCommit")

    @property
    def is_committing(self) -> bool:
        """Whether some partitions do not show the commit yet."""
        return self.state == "PrepareCommit"

    def then(self, seen: LastTransaction) -> LastTransaction:
        """Combine this state with the later state `seen`. Taking the id raises its epoch by one and makes the
        coordinator forget the state. Then the earlier state counts, unless another producer took the id."""
        forgotten = seen.state == "Empty" and seen.producer_id == self.producer_id and seen.epoch <= self.epoch + 1
        return self._replace(epoch=seen.epoch) if forgotten else seen


class _QuickAddPartitions(AddPartitionsToTxnHandler):  # type: ignore[misc]  # aiokafka has no types
    def handle_response(self, response: Any) -> float | None:
        wait: float | None = super().handle_response(response)
        return NEXT_TRANSACTION_WAIT if wait == aiokafka_sender.BACKOFF_OVERRIDE else wait


class _Describe(BaseHandler):  # type: ignore[misc]  # aiokafka has no types
    """Asks the coordinator for the state of the last transaction, before the transactional id is taken."""

    def create_request(self) -> DescribeTransactionsRequest:
        return DescribeTransactionsRequest(self._sender._txn_manager.transactional_id)

    def handle_response(self, response: Any) -> float | None:
        [(code, _, state, _, _, producer_id, epoch, *_)] = response.transaction_states
        if code in (OK, _TRANSACTIONAL_ID_NOT_FOUND):
            self._sender.see(LastTransaction(state, producer_id, epoch) if code == OK else LastTransaction(""))
            return None
        error_type = kafka_errors.for_code(code)
        if error_type in (kafka_errors.CoordinatorNotAvailableError, kafka_errors.NotCoordinatorError):
            return float(self.handle_error())
        if error_type is kafka_errors.CoordinatorLoadInProgressError:
            return float(self._default_backoff)
        raise error_type(self._sender._txn_manager.transactional_id)

    def handle_error(self) -> float:
        self._sender._coordinator_dead(aiokafka_sender.CoordinationType.TRANSACTION)
        return float(self._default_backoff)


class _Sender(Sender):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's background sender. It keeps its tasks, so that they can be ended. Before each attempt to take the
    transactional id it asks for the state of the last transaction: `last`, None until then."""

    def __init__(self, *args: Any, last: LastTransaction | None, **options: Any) -> None:
        """`last`: the state of the last transaction, if an earlier attempt to take the id has read it."""
        super().__init__(*args, **options)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.last = last

    def forget_last(self) -> None:
        """Note that the last transaction is finished."""
        self.last = None

    def see(self, seen: LastTransaction) -> None:
        self.last = self.last.then(seen) if self.last is not None else seen

    async def _do_init_pid(self, node_id: Any) -> Any:
        try:
            if not await _Describe(self).do(node_id):
                return False
        except kafka_errors.IncompatibleBrokerVersion:
            self.see(LastTransaction("Unknown"))
        return await super()._do_init_pid(node_id)

    async def _do_add_partitions_to_txn(self, partitions: Any) -> Any:
        self._register()
        coordinator = await self._find_coordinator(
            aiokafka_sender.CoordinationType.TRANSACTION, self._txn_manager.transactional_id
        )
        return await _QuickAddPartitions(self, partitions).do(coordinator)

    async def _do_txn_commit(self, result: Any) -> None:
        self._register()
        await super()._do_txn_commit(result)

    async def _send_produce_req(self, node: Any, batches: Any) -> None:
        self._register()
        await super()._send_produce_req(node, batches)

    def _register(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)


class TransactionalProducer(AIOKafkaProducer):  # type: ignore[misc]  # aiokafka has no types
    """A holder of a transactional id. `start` fences the previous holder and decides its open transaction.

    `may_act_late`: a transactional request has failed inside the client, so a late copy of it may still take effect.
    `patience`: for time limits of its work, which do not count throttled time.
    """

    def __init__(
        self,
        connector: Connector,
        identity: str,
        *,
        last: LastTransaction | None = None,
        request_timeout: float,
        transaction_timeout: float,
    ) -> None:
        """`identity`: the transactional id. `last`: its last transaction, as read by an earlier attempt to take the id.
        The time limits of a request and of a transaction are in seconds."""
        super().__init__(
            bootstrap_servers=[str(node) for node in connector.login.nodes],
            client_id=identity,
            transactional_id=identity,
            transaction_timeout_ms=int(transaction_timeout * 1000),
            request_timeout_ms=int(request_timeout * 1000),
            retry_backoff_ms=RETRY_BACKOFF_MS,
            max_batch_size=BUILDER_BYTES,
        )
        self.patience = Patience(connector.patience)
        connector.attach(self.client, self.patience)
        self.connector = connector
        self.answers = LastAnswers(connector, self.client, "transactional-id")
        self.may_act_late = False
        self._sender = _Sender(
            self.client,
            last=last,
            acks=-1,
            txn_manager=self._txn_manager,
            message_accumulator=self._message_accumulator,
            retry_backoff_ms=RETRY_BACKOFF_MS,
            request_timeout_ms=self._request_timeout_ms,
        )
        self.client.send = self._marking(self.client.send)

    @property
    def tenure(self) -> str:
        """Its producer id and epoch, as in `open_transactions.holder`. Both stay until another producer takes the
        transactional id or a transaction of it expires."""
        return f"{self._txn_manager.producer_id}/{self._txn_manager.producer_epoch}"

    @property
    def last(self) -> LastTransaction | None:
        """The state of the last transaction when this producer took the transactional id. None: unknown or finished."""
        last: LastTransaction | None = self._sender.last
        return last

    async def finish(self, topics: Iterable[str], partition: int) -> None:
        """Complete the `last` transaction in this partition of these topics, by an empty transaction with the same end.
        Its marker decides everything that the producer id has open in a partition. Afterwards `last` is None."""
        await self.begin_transaction()
        self.announce(topics, partition)
        await (self.commit_transaction() if self.last and self.last.committed else self.abort_transaction())
        self._sender.forget_last()

    def pack(self, entries: Sequence[Entry]) -> list[Any]:
        """Record batches with these records in order and one timestamp. A batch accepts a first record of any size.
        Appending one by one with aiokafka's public method takes three times as long."""
        now_ms = int(time.time() * 1000)
        packed: list[Any] = []
        done = 0
        while done < len(entries):
            batch = self.create_batch()
            append, count = batch._builder.append, 0
            for entry in entries[done:]:
                if append(count, now_ms, entry.key, entry.value, _NO_HEADERS) is None:
                    batch.close()
                    break
                count += 1
            batch._relative_offset = count
            packed.append(batch)
            done += count
        return packed

    def announce(self, topics: Iterable[str], partition: int) -> None:
        """Add all partitions to the transaction at once, which saves a request for each topic but the first."""
        for topic in topics:
            self._txn_manager.maybe_add_partition_to_txn(TopicPartition(topic, partition))

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open: neither committed nor aborted."""
        return self._txn_manager.state in (TransactionState.IN_TRANSACTION, TransactionState.ABORTABLE_ERROR)

    @property
    def failure(self) -> BaseException | None:
        """The error after which the open transaction can only be aborted, if any."""
        waiter = self._txn_manager.wait_for_transaction_end()
        if waiter is None or not waiter.done() or waiter.cancelled():
            return None
        failure: BaseException | None = waiter.exception()
        return failure

    async def dispose(self, within: float) -> None:
        """Abort the open transaction, stop, and in any case end all tasks within about `within` + 2 seconds."""
        with anyio.CancelScope(shield=True):
            stopped = False
            try:
                with anyio.move_on_after(within):
                    self._collect_failures()  # aborting drops them
                    if self.is_open:
                        await self.abort_transaction()
                    await self.stop()
                    stopped = True
            except (kafka_errors.KafkaError, kafka_errors.IllegalOperation, AssertionError, OSError) as error:
                log.debug("cannot stop a producer in an orderly way: %r", error)
            finally:
                if not stopped:
                    await self._kill()
        self._collect_failures()

    async def _kill(self) -> None:
        """End every task and connection in any state."""
        self._closed = True
        tasks = [task for task in (self._sender.sender_task, *self._sender.tasks) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)
        # as a task: both calls await the same futures, so this one raises CancelledError if the first was cancelled
        closing = asyncio.ensure_future(self.client.close())
        await asyncio.wait([closing], timeout=1)
        if not closing.done():
            closing.cancel()
        elif not closing.cancelled() and closing.exception() is not None:
            log.debug("cannot close a producer's connections: %r", closing.exception())

    def _collect_failures(self) -> None:
        """Collect the errors of all futures, so that asyncio does not log them as never retrieved."""
        queued = [batch for queue in self._message_accumulator._batches.values() for batch in queue]
        batches = [*queued, *self._message_accumulator._pending_batches]
        futures = [self._txn_manager.wait_for_transaction_end()]
        futures += [future for batch in batches for future in (batch.future, batch._drain_waiter)]
        for future in futures:
            if future is not None and future.done() and not future.cancelled():
                future.exception()

    def _marking(self, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def marking_send(node: Any, request: Any, **options: Any) -> Any:
            try:
                return await send(node, request, **options)
            except BaseException:
                if isinstance(request, AddPartitionsToTxnRequest | EndTxnRequest):
                    self.may_act_late = True
                raise

        return marking_send

"""The bus port on the model broker: what the Kafka adapter and the client library under it do, step by step.

Requests are repeated within the client as aiokafka repeats them, silently, and with the adapter's watchdogs around
them. Methods that planted bugs replace are small and say what they are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import anyio

from outfitter_proto.bus import (
    Bus,
    BusUnavailableError,
    CommitUnknownError,
    Entry,
    FencedError,
    Membership,
    Message,
    OffsetOutOfRangeError,
    Reader,
    TooLargeError,
    TopicInfo,
    TopicSpec,
    UnknownTopicError,
    Writer,
)
from outfitter_proto.bus.kafka.reading.reader import LATE_S
from simulation.bulk import batch_bytes
from simulation.model import errors
from simulation.model.broker import LONG_POLL_S, Broker, Producer
from simulation.model.errors import OutOfRangeError, RefusedError
from simulation.model.group import Group
from simulation.model.log import Log
from simulation.model.membership import ModelMembership
from simulation.model.network import REQUEST_TIMEOUT_S, Link, LostError

WATCHDOG_S = REQUEST_TIMEOUT_S + 1.0
ANSWER_WITHIN_S = 2 * REQUEST_TIMEOUT_S
TAKE_WITHIN_S = 3 * REQUEST_TIMEOUT_S
BACKOFF_S = 0.02
NEXT_TRANSACTION_S = 0.002
STABLE_POLL_S = 0.01
SLOWEST_POLL_S = 0.1
"""Questions that are asked until the answer is another one are asked less and less often: they cost steps."""
STABLE_WITHIN_S = 120.0
MAX_BATCH_BYTES = 768 * 1024


class ModelBus(Bus):
    """One process's bus."""

    url = "kafka://broker:9092"
    writer: type[ModelWriter]

    def __init__(
        self,
        broker: Broker,
        link: Link,
        *,
        transaction_timeout_s: float = 5.0,
        takes_bytes: int = MAX_BATCH_BYTES,
        gives_records: int = 1000,
    ) -> None:
        """`takes_bytes`: larger ledger parts are refused. `gives_records`: no fetch is
        answered with more, as where records are large."""
        self._broker = broker
        self._takes_bytes = takes_bytes
        self._gives_records = gives_records
        self.link = link
        self._transaction_timeout_s = transaction_timeout_s

    async def start(self) -> None:
        """There is nothing to connect."""

    async def aclose(self) -> None:
        """There is nothing to close."""

    async def topic(self, name: str) -> TopicInfo:
        found: TopicInfo = await self._ask("Metadata", lambda: self._broker.topic(name))
        return found

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """All topics are there."""
        return []

    async def publish(self, topic: str, partition: int, entry: Entry) -> int:
        offset: int = await self._ask("Produce", lambda: self._broker.publish(self.log(topic, partition), entry))
        return offset

    async def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        found: tuple[int, int] = await self._ask(
            "ListOffsets", lambda: self._broker.offset(self.log(topic, partition), committed=False)
        )
        return found

    async def offset_at(self, topic: str, partition: int, moment_ms: int) -> int:
        found: int = await self._ask("ListOffsets", lambda: self.log(topic, partition).first_since(moment_ms))
        return found

    async def join(
        self,
        group: str,
        topic: str,
        *,
        replica: str | None = None,
        session_timeout: float = 10.0,
        heartbeat_interval: float = 1.0,
    ) -> Membership:
        found = self._broker.groups.setdefault(group, Group(self._broker.partitions, self._broker.now))
        return ModelMembership(
            self.link, found, replica=replica, session_timeout=session_timeout, heartbeat_interval=heartbeat_interval
        )

    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        del lenient  # the model's batches can be decoded
        log = self.log(topic, partition)
        if start is None:
            start, _ = await self._ask("ListOffsets", lambda: self._broker.offset(log, committed=False))
        return ModelReader(self, log, start, committed=committed)

    async def open_writer(self, identity: str, partition: int, *, topics: Collection[str] = ()) -> Writer:
        del topics  # the model's coordinator forgets no marker
        writer = self.writer(self, identity, partition)
        await writer.take()
        return writer

    async def tenure(self, identity: str) -> str | None:
        def describe() -> str | None:
            own = self._broker.transactions.get(identity)
            return f"{own.id}/{own.epoch}" if own is not None else None

        found: str | None = await self._ask("DescribeTransactions", describe)
        return found

    async def has_committed(self, identity: str) -> bool:
        pause = STABLE_POLL_S
        with anyio.move_on_after(STABLE_WITHIN_S):
            while True:
                is_committing, has_committed = await self._ask(
                    "DescribeTransactions",
                    lambda: (self._broker.is_committing(identity), self._broker.has_committed(identity)),
                )
                if not is_committing:
                    return bool(has_committed)
                await anyio.sleep(pause)
                pause = min(2 * pause, SLOWEST_POLL_S)
        raise BusUnavailableError(f"a commit of {identity} has not been complete for {STABLE_WITHIN_S:g} s")

    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:
        def ends(*, committed: bool) -> tuple[int, int]:
            return self._broker.offset(self.log(topic, partition), committed=committed)

        _, end = await self._ask("ListOffsets", lambda: ends(committed=False))
        pause = STABLE_POLL_S
        with anyio.move_on_after(STABLE_WITHIN_S):
            while (stable := (await self._ask("ListOffsets", lambda: ends(committed=True)))[1]) < end:
                if taking is not None and await self._belongs_to(taking, self.log(topic, partition)):
                    return int(stable)
                await anyio.sleep(pause)
                pause = min(2 * pause, SLOWEST_POLL_S)
            found: int = end
            return found
        raise BusUnavailableError(f"a transaction in {topic}/{partition} has been open for {STABLE_WITHIN_S:g} s")

    async def _belongs_to(self, identity: str, log: Log) -> bool:
        """Whether all transactions that are open there are this identity's."""
        open_there = await self._ask("DescribeProducers", lambda: set(log.open))
        own = await self._ask("DescribeTransactions", lambda: self._broker.transactions.get(identity))
        return own is not None and open_there == {own.id}

    # --- for readers and writers ---

    def log(self, topic: str, partition: int) -> Log:
        found = self._broker.logs.get((topic, partition))
        if found is None:
            raise UnknownTopicError(f"there is no {topic}/{partition}")
        return found

    async def _ask(self, what: str, answer: Callable[[], Any]) -> Any:
        """A request that one repetition may save, and that changes nothing when it is done twice (or whose sender
        bears that: a published record)."""
        for _ in range(2):
            try:
                return await self.link.ask(what, answer)
            except (LostError, RefusedError):
                await anyio.sleep(BACKOFF_S)
        raise BusUnavailableError(f"{what}: no answer")


class ModelReader(Reader):
    """A cursor. A fetch goes on while nobody waits for it, as the adapter's does: silence comes to be noticed."""

    def __init__(self, bus: ModelBus, log: Log, start: int, *, committed: bool) -> None:
        self._bus = bus
        self._place = log.place
        self._committed = committed
        self._asking: asyncio.Task[tuple[list[Message], int]] | None = None
        self._asked_at = 0.0
        self.position = start

    @property
    def _log(self) -> Log:
        """What is there now under that name."""
        return self._bus.log(*self._place)

    async def fetch(self, *, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
        topic, partition = self._place
        deadline = anyio.current_time() + timeout
        while True:
            if self._asking is None:
                self._asking = asyncio.get_running_loop().create_task(self._ask(self.position, max_records))
            await asyncio.wait([self._asking], timeout=max(0.0, deadline - anyio.current_time()))
            if not self._asking.done():
                owed = anyio.current_time() - self._asked_at - LONG_POLL_S
                self.late_s = owed if owed > LATE_S else 0.0
                return []
            asked, self._asking = self._asking, None
            self.late_s = 0.0
            try:
                messages, after = asked.result()
            except (LostError, RefusedError) as error:
                raise BusUnavailableError(f"{topic}/{partition}: no answer to a fetch") from error
            except OutOfRangeError as error:
                raise OffsetOutOfRangeError(
                    f"{topic}/{partition} has the offsets {error.start} to {error.end}, not {self.position}",
                    start=error.start,
                    end=error.end,
                ) from error
            moved = after > self.position
            self.position = after
            if messages or moved:
                return messages

    async def _ask(self, position: int, most: int) -> tuple[list[Message], int]:
        """Fetch, again and again while no answer comes, as the adapter does."""
        broker = self._bus._broker
        self._asked_at = began = anyio.current_time()
        while True:
            try:
                found: tuple[list[Message], int] = await self._bus.link.ask(
                    "Fetch",
                    lambda: broker.fetch(
                        self._log, position, min(most, self._bus._gives_records), committed=self._committed
                    ),
                )
            except LostError:
                if anyio.current_time() > began + ANSWER_WITHIN_S:
                    raise
                await anyio.sleep(BACKOFF_S)
            else:
                return found

    async def seek(self, offset: int) -> None:
        await self.aclose()
        self.position = offset

    async def aclose(self) -> None:
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.add_done_callback(_look)
            asking.cancel()


def _look(task: asyncio.Task[Any]) -> None:
    """Nobody asks any more what became of it."""
    if not task.cancelled():
        task.exception()


class ModelWriter(Writer):
    """A transactional producer with the adapter around it."""

    def __init__(self, bus: ModelBus, identity: str, partition: int) -> None:
        self.partition = partition
        self.identity = identity
        self._bus = bus
        self._broker = bus._broker
        self._producer: Producer | None = None
        self._sequences: dict[tuple[str, int], int] = {}
        self._may_act_late = False
        self._unusable = False
        self._closed = False
        self._begun = False
        self._ending = False

    @property
    def must_reopen(self) -> bool:
        return self._unusable or self._may_act_late

    @property
    def max_part_bytes(self) -> int:
        return MAX_BATCH_BYTES

    @property
    def tenure(self) -> str:
        return f"{self._held.id}/{self._held.epoch}"

    async def take(self) -> None:
        """InitProducerId, until it is answered or time is up."""
        timeout = self._bus._transaction_timeout_s
        try:
            with anyio.fail_after(TAKE_WITHIN_S):
                self._producer = await self._repeated(
                    "InitProducerId", lambda: self._broker.init_producer(self.identity, timeout), fatal=True
                )
        except TimeoutError as error:
            raise BusUnavailableError(f"could not take {self.identity!r}") from error
        except RefusedError as error:
            raise BusUnavailableError(f"could not take {self.identity!r}: {error}") from error

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        if self._unusable or self._closed:
            raise BusUnavailableError(f"writer {self.identity!r} must be opened again")
        groups = [(self._bus.log(topic, self.partition), entries) for topic, entries in parts if entries]
        if not groups:
            return
        size = batch_bytes(groups[-1][1])
        if size > self._bus._takes_bytes:
            self._broker.too_large.append(f"{self.identity}: {size} bytes")
            raise TooLargeError(f"{size} bytes are more than {self._bus._takes_bytes}")
        self._refuse_too_large(groups)
        finished = False
        try:
            await self._send(groups)
            await self._end()
            finished = True
        finally:
            self._unusable = not finished

    def _refuse_too_large(self, groups: Sequence[tuple[Log, Sequence[Entry]]]) -> None:
        """A limit that was lowered meanwhile is the broker's to know: its refusal uses the writer up."""
        lowered_to = self._broker.lowered_to
        for log, entries in groups if lowered_to is not None else ():
            size = batch_bytes(entries)
            if lowered_to is not None and size > lowered_to:
                self._unusable = True
                raise TooLargeError(f"{size} bytes are more than {lowered_to}", topic=log.topic, size=size)

    async def _send(self, groups: Sequence[tuple[Log, Sequence[Entry]]]) -> None:
        """Everything but the commit; the parts are under way together, in an order that the network chooses."""
        producer = self._held
        try:
            with anyio.fail_after(WATCHDOG_S * len(groups)):
                logs = [log for log, _ in groups]
                self._begun = True
                await self._repeated(
                    "AddPartitionsToTxn", lambda: self._broker.add_partitions(producer, logs), late=True
                )
                await self._produce_all(producer, groups)
        except TimeoutError as error:
            raise BusUnavailableError(f"writer {self.identity!r}: not acknowledged in time") from error
        except RefusedError as error:
            if error.code in errors.FENCED:
                raise FencedError(f"writer {self.identity!r} was taken over") from error
            raise BusUnavailableError(f"writer {self.identity!r}: {error}") from error

    async def _produce_all(self, producer: Producer, groups: Sequence[tuple[Log, Sequence[Entry]]]) -> None:
        """Those of one log one after the other, as aiokafka does."""
        refusals: list[RefusedError] = []

        async def produce(log: Log) -> None:
            try:
                for batch in [entries for one, entries in groups if one is log]:
                    await self._produce(producer, log, batch)
            except RefusedError as error:
                refusals.append(error)

        async with anyio.create_task_group() as under_way:
            for log in dict.fromkeys(log for log, _ in groups):
                under_way.start_soon(produce, log)
        if refusals:
            raise refusals[0]

    async def _produce(self, producer: Producer, log: Log, entries: Sequence[Entry]) -> None:
        place = log.place
        sequence = self._sequences.get(place, 0)
        await self._repeated(
            "Produce", lambda: self._broker.produce(producer, self._bus.log(*place), sequence, entries), fatal=True
        )
        self._sequences[place] = sequence + len(entries)

    async def _end(self) -> None:
        """Ask for the commit, and say what became of it."""
        self._ending = True
        try:
            with anyio.CancelScope(shield=True), anyio.fail_after(WATCHDOG_S):
                await self._end_transaction(commit=True)
        except TimeoutError as error:
            raise CommitUnknownError(f"writer {self.identity!r}: no answer to the request to commit") from error
        except RefusedError as error:
            if error.code in errors.FENCED and not self._may_act_late:
                raise FencedError(f"writer {self.identity!r} was taken over") from error
            raise CommitUnknownError(f"writer {self.identity!r}: {error}") from error
        self._ending = self._begun = False

    async def _end_transaction(self, *, commit: bool) -> None:
        producer = self._held
        await self._repeated("EndTxn", lambda: self._broker.end(producer, commit=commit), fatal=True, late=True)

    async def _repeated(self, what: str, answer: Callable[[], Any], *, fatal: bool = False, late: bool = False) -> Any:
        """Ask until there is an answer. `fatal`: an error of the broker's that it may recover from ends the producer.
        `late`: a copy that arrives late could still act."""
        pause = NEXT_TRANSACTION_S
        while True:
            try:
                return await self._bus.link.ask(what, answer)
            except LostError:
                self._may_act_late |= late
                await anyio.sleep(BACKOFF_S)
            except RefusedError as error:
                if error.code == errors.CONCURRENT_TRANSACTIONS:
                    await anyio.sleep(pause)
                    pause = min(2 * pause, SLOWEST_POLL_S)
                elif fatal or error.code != errors.REQUEST_TIMED_OUT:
                    raise
                else:
                    await anyio.sleep(BACKOFF_S)

    @property
    def _held(self) -> Producer:
        if self._producer is None:
            raise BusUnavailableError(f"writer {self.identity!r} was not taken")
        return self._producer

    async def aclose(self) -> None:
        """Close it. What a producer in trouble was about goes on in the background for a while, as aiokafka's does."""
        if self._closed:
            return
        self._closed = True
        if self._begun and self._producer is not None:
            self._leftover = asyncio.get_running_loop().create_task(self._finish(commit=self._ending))

    async def _finish(self, *, commit: bool) -> None:
        with anyio.move_on_after(2 * REQUEST_TIMEOUT_S):
            try:
                await self._end_transaction(commit=commit)
            except (RefusedError, BusUnavailableError):
                return  # nobody waits for it any more


ModelBus.writer = ModelWriter

"""Sends messages on behalf of a worker and reads the answers: its record, or a dead letter.

It starts to read before it sends, so that it misses no answer. A manager may decide a message without an answer. The
manager's checkpoint, the last record of each commit, shows that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio

from outfitter.session import choosing
from outfitter.session.manager_lookup import ManagerLookup
from outfitter_proto import bus as buses
from outfitter_proto import codec, keys, names
from outfitter_proto.bus import Bus, BusAccessError, Create, Entry, Message, Reader
from outfitter_proto.bus.reading import read_on, read_to
from outfitter_proto.records import Allocation, Checkpoint, DeadLetter, Register, Registration
from outfitter_proto.support.causes import side_by_side
from outfitter_service.config import BusConnection
from outfitter_service.query import ledger_view


class Conversation:
    """One worker's messages and their answers."""

    def __init__(
        self, bus: Bus, where: BusConnection, worker: str, partition: int, answers: Reader, letters: Reader | None
    ) -> None:
        self.records: dict[keys.AllocationKey, ledger_view.StoredAllocation] = {}
        """The newest record by key."""
        self.letters: dict[int, DeadLetter] = {}
        """The dead letters by their messages' offsets."""
        self.decided = 0
        """All messages of the host before this offset are decided."""
        self._bus = bus
        self._where = where
        self._worker = worker
        self._partition = partition
        self._answers = answers
        self._letters = letters
        self._topics = names.topics(where.cluster)
        self._writers = {keys.host_writer(where.host), keys.partition_writer(partition)}
        self._news = anyio.Event()

    async def publish(self, message: Registration) -> int:
        """Publish a message; return its offset."""
        entry = Entry(message.host.encode(), codec.encode(message))
        return await self._bus.publish(self._topics.registrations, self._partition, entry)

    async def wait_for(self, enough: Callable[[], bool], within: float) -> bool:
        """Read answers until `enough()` is true, for at most `within` seconds. Seconds for which the bus
        holds us back do not count. Return whether it is true."""
        with suppress(TimeoutError), self._bus.patience.limit(within):
            async with side_by_side() as tasks:
                tasks.start_soon(self._listen, self._answers, self._take_record)
                tasks.start_soon(self._listen_for_letters)
                while not enough():
                    await self._news.wait()
                    self._news = anyio.Event()
                tasks.cancel_scope.cancel()
        return enough()

    async def check_manager(self, message: Register) -> None:
        """Return if the host's manager obeys what a registration says, or is not known.

        Raises:
            ChoiceIgnoredError: it would grant any device.
        """
        count = (await self._bus.topic(self._topics.allocations)).partitions
        await choosing.check_manager(self._bus, self._where.cluster, message, count)

    async def read_ledger(self) -> ledger_view.LedgerView:
        """The current committed ledger of the host."""
        return await ledger_view.read(self._bus, self._where.cluster, self._where.host)

    async def letter(self, offset: int) -> DeadLetter | None:
        """The dead letter of the message at `offset`; None if there is none yet."""
        if self._letters is not None and offset not in self.letters:
            end = await self._bus.stable_end(self._topics.dead_letters, self._partition)
            async for messages in read_to(self._letters, end):
                for message in messages:
                    self._take_letter(message)
        return self.letters.get(offset)

    async def no_manager_text(self) -> str:
        """The text of the error that no manager answered."""
        count = (await self._bus.topic(self._topics.allocations)).partitions
        lookup = ManagerLookup(self._bus, self._where.cluster, self._where.host)
        await lookup.run(count)
        return str(lookup.error())

    async def _listen_for_letters(self) -> None:
        try:
            if self._letters is not None:
                await self._listen(self._letters, self._take_letter)
        except BusAccessError:
            self._letters = None  # we may describe the topic, but not read it

    async def _listen(self, reader: Reader, take: Callable[[Message], None]) -> None:
        async for messages in read_on(reader):
            for message in messages:
                take(message)
            self._news.set()

    def _take_record(self, message: Message) -> None:
        record = ledger_view.decode(message).record
        if isinstance(record, Allocation):
            if (record.host, record.worker) == (self._where.host, self._worker):
                self.records[record.key] = ledger_view.StoredAllocation(record, message.value or b"")
        elif isinstance(record, Checkpoint) and record.writer in self._writers:
            ahead = record.input.ahead or {}
            self.decided = max(self.decided, record.input.to, ahead.get(self._where.host, 0))

    def _take_letter(self, message: Message) -> None:
        try:
            letter = codec.decode_dead_letter(message.value or b"")
        except codec.WireError:
            return  # of a later version
        if letter.source.topic == self._topics.registrations and letter.source.partition == self._partition:
            self.letters[letter.source.offset] = letter


@asynccontextmanager
async def conversing(where: BusConnection, worker: str) -> AsyncIterator[Conversation]:
    """Connect, and begin to read before the first message.

    Without the right to read dead letters, the conversation has only records.
    """
    topics = names.topics(where.cluster)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(buses.connect(where.bus, where.login, create=Create.NOTHING))
        (partition,) = await ledger_view.partitions(bus, where.cluster, where.host)
        answers = await _from_now_on(stack, bus, topics.allocations, partition)
        try:
            letters = await _from_now_on(stack, bus, topics.dead_letters, partition)
        except BusAccessError:
            letters = None
        yield Conversation(bus, where, worker, partition, answers, letters)


async def _from_now_on(stack: AsyncExitStack, bus: Bus, topic: str, partition: int) -> Reader:
    _, end = await bus.offsets(topic, partition)
    return await stack.enter_async_context(await bus.open_reader(topic, partition, start=end, committed=True))

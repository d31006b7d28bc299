"""The input of a partition, read ahead in the background up to a bound, so that a batch is what piled up.

Keeps reading through outages of the bus. It decodes nothing and decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import anyio
import structlog

from outfitter_proto.bus import Bus, BusConfigurationError, BusError, Message, OffsetOutOfRangeError, Reader

log = structlog.get_logger("outfitter.input")

READ_AHEAD = 5000
READ_AHEAD_BYTES = 16 * 1024 * 1024
"""Records and bytes that may lie unread before fetching pauses: bounds the memory that a flood takes."""

RETRY_S = 0.5
MEASURE_S = 5.0
"""How often the input's end is looked up: what is read ahead is bounded, so only the bus knows how far behind it is."""


class Intake:
    """Messages fetched and not yet decided. `position` is the offset after the last fetched one, holes included;
    `obstacle` why nothing can be fetched now; `end` the input's end when it was last looked up."""

    def __init__(
        self, bus: Bus, topic: str, partition: int, *, wake: Callable[[], None], healed: Callable[[], None]
    ) -> None:
        """`wake` is called when there is news, `healed` when the bus is heard again after an outage."""
        self._bus = bus
        self._topic = topic
        self._partition = partition
        self._wake = wake
        self._healed = healed
        self._drained: anyio.Event | None = None
        self._resumed = anyio.Event()
        self.messages: deque[Message] = deque()
        self.bytes = 0
        self.position = 0
        self.end = 0
        self.obstacle: str | None = None
        self.lost: OffsetOutOfRangeError | None = None
        self.trouble: BusConfigurationError | None = None

    def reset(self, start: int) -> None:
        """Forget what was fetched; `run` goes on at `start`."""
        self.messages.clear()
        self.bytes = 0
        self.position = self.end = start
        self.obstacle = None
        self.lost = None
        self.trouble = None
        self._resumed.set()

    async def run(self) -> None:
        """Fetch from `position` until cancelled. Where that is out of range, `lost` says so until `reset`."""
        while True:
            try:
                async with await self._bus.open_reader(
                    self._topic, self._partition, start=self.position, committed=False
                ) as reader:
                    await self._fetch(reader)
            except OffsetOutOfRangeError as error:
                log.error("input position is out of range", wanted=self.position, start=error.start, end=error.end)
                self._resumed = anyio.Event()
                self.lost = error
                self._wake()
                await self._resumed.wait()
            except BusError as error:
                if self._bus.local and isinstance(error, BusConfigurationError):
                    self.trouble = error  # the file is another one: trying again cannot mend it
                    self._wake()
                    return
                if self.hearing:
                    log.warning("cannot read registrations, trying again until it works", error=str(error))
                    self._wake()
                self.obstacle = str(error)
                await anyio.sleep(RETRY_S)

    async def _fetch(self, reader: Reader) -> None:
        while True:
            if self._full:
                self._drained = anyio.Event()
                await self._drained.wait()
            messages = await reader.fetch(max_records=READ_AHEAD, timeout=1.0)
            self.position = reader.position
            if not self.hearing and reader.heard:
                log.info("registrations are read again")
                self.obstacle = None
                self._healed()
                self._wake()
            if messages:
                self.messages.extend(messages)
                self.bytes += sum(len(message.value or b"") for message in messages)
                self._wake()

    async def measure(self) -> None:
        """Keep `end` up to date, as far as the bus answers, until cancelled."""
        while True:
            try:
                _, self.end = await self._bus.offsets(self._topic, self._partition)
            except BusError as error:
                log.debug("cannot tell how far the input reaches", error=str(error))
            await anyio.sleep(MEASURE_S)

    def lag(self, position: int) -> int:
        """How many records, of whomever, are known from `position` on."""
        return max(self.end, self.position) - position

    @property
    def hearing(self) -> bool:
        """Whether the bus can be read, as far as is known; else `obstacle` says why not."""
        return self.obstacle is None

    @property
    def _full(self) -> bool:
        return len(self.messages) >= READ_AHEAD or self.bytes >= READ_AHEAD_BYTES

    def take(self) -> Message:
        """Hand out the next message. It is read again only after `reset`, or comes back by `give_back`."""
        message = self.messages.popleft()
        self.bytes -= len(message.value or b"")
        if self._drained is not None and not self._full:
            self._drained.set()
            self._drained = None
        return message

    def give_back(self, messages: Sequence[Message]) -> None:
        """What was taken comes first again: its commit failed."""
        self.messages.extendleft(reversed(messages))
        self.bytes += sum(len(message.value or b"") for message in messages)

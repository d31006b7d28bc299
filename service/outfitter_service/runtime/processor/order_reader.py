"""Reads operators' orders for one processor, and queues those of its hosts as events.

An order is a level: each tenure reads the whole topic again, the last record of each order. The rules decide what that
changes. If the topic cannot be read (it is missing, or a right is), what the ledger has of orders goes on counting, and
nothing else waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import structlog
from msgspec import UNSET, UnsetType

from outfitter_proto.bus import BusError, BusUnavailableError, Message, Reader
from outfitter_proto.bus.reading import MARKERS_WAIT_S
from outfitter_proto.codec import WireError, decode_order
from outfitter_proto.keys import host_key
from outfitter_proto.names import control_topic
from outfitter_proto.records import CordonOrder, OrdersPosition
from outfitter_proto.support.backoff import Backoff
from outfitter_service.core import model as m
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.instruments import Instruments

log = structlog.get_logger("outfitter.orders")

FIRST_WITHIN_S = 5.0
"""How long a tenure waits at most for what operators have ordered before."""
LOOK_S = 10.0
"""Seconds between two looks whether the topic was created again, which its readers do not notice."""
BACKOFF_S = (0.5, 10.0)
PATIENT_TRIES = 3
"""After so many failures in a row something else than an outage of the whole bus is to blame, or that has a line."""
LOGGED = 20
"""Most unreadable orders of one reading that get a log line each."""


class OrderReader:
    """Reads the control topic for one processor, in all its tenures."""

    def __init__(
        self,
        assignment: Assignment,
        instruments: Instruments,
        *,
        queue: Callable[[Sequence[m.OrderRead]], None],
        wake: Callable[[], None],
    ) -> None:
        """`queue`: takes the events of orders that were read. `wake`: called when `trouble` changes."""
        self._assignment = assignment
        self._instruments = instruments
        self._queue = queue
        self._wake = wake
        self._orders: dict[str, dict[str, CordonOrder]] = {}
        self._unreadable: dict[bytes, None] = {}
        self._looked = anyio.Event()
        self.position: OrdersPosition | UnsetType = UNSET
        """All orders before it were queued."""
        self.trouble: str | UnsetType = UNSET
        """Why orders cannot be read now."""
        self._failures = 0
        self._has_warned = False

    def of(self, host: str) -> list[CordonOrder]:
        """All orders about a host that were read, ended ones included."""
        return list(self._orders.get(host, {}).values())

    def begin(self) -> None:
        """A tenure begins: it reads all orders again. What was queued before may never have been decided."""
        self._looked = anyio.Event()
        self.position = UNSET

    async def first_look(self) -> None:
        """Wait until all orders of now are queued, or cannot be read; at most `FIRST_WITHIN_S`."""
        with anyio.move_on_after(FIRST_WITHIN_S):
            await self._looked.wait()

    async def run(self) -> None:
        """Read orders until cancelled, from the first one on."""
        backoff = Backoff(*BACKOFF_S)
        topic = control_topic(self._assignment.identity.cluster)
        while True:
            try:
                topic_id = (await self._assignment.bus.topic(topic)).id
                async with await self._assignment.bus.open_reader(topic, 0, start=None, committed=False) as reader:
                    await self._follow(reader, topic, topic_id)
                backoff.reset()
                continue
            except BusError as error:
                self._has_failed(error)
            self._looked.set()
            await anyio.sleep(backoff.next_delay())

    async def _follow(self, reader: Reader, topic: str, topic_id: str) -> None:
        """Read the topic until it is created again."""
        bus = self._assignment.bus
        _, end = await bus.offsets(topic, 0)
        self._orders, self._unreadable = {}, {}
        messages: list[Message] = []
        while (await bus.topic(topic)).id == topic_id:  # else another one was read, which may never reach that end
            if reader.position >= end:
                break
            messages += await reader.fetch(timeout=MARKERS_WAIT_S)
        else:
            return
        self._take(messages, topic_id, reader.position)
        self._looked.set()
        while (await bus.topic(topic)).id == topic_id:
            look_at = self._instruments.clock.monotonic() + LOOK_S
            while (left := look_at - self._instruments.clock.monotonic()) > 0:
                # out of range means that it was created again: nothing deletes what is not superseded
                self._take(await reader.fetch(timeout=left), topic_id, reader.position)

    def _take(self, messages: Sequence[Message], topic_id: str, position: int) -> None:
        """Queue the last version of each order among these messages."""
        read = [self._read(message) for message in messages if message.value is not None]
        last = {order.id: order for order in read if order is not None}
        for order in last.values():
            self._orders.setdefault(order.host, {})[order.id] = order
        if last:
            self._queue([m.OrderRead(order=order) for order in last.values()])
        self.position = OrdersPosition(topic_id=topic_id, to=position)
        partition = str(self._assignment.partition)
        self._instruments.metrics.orders_unread.labels(partition).set(0)
        self._instruments.metrics.orders_unreadable.labels(partition).set(len(self._unreadable))
        self._failures = 0
        if self.trouble is not UNSET:
            self.trouble = UNSET
            if self._has_warned:
                self._has_warned = False
                log.info("operators' orders can be read again", partition=self._assignment.partition)
            self._wake()

    def _read(self, message: Message) -> CordonOrder | None:
        """The order of a message, if it is about a host of this processor."""
        key = message.key or b""
        try:
            order = decode_order(message.value or b"", key=key)
        except WireError as error:
            if key not in self._unreadable and len(self._unreadable) < LOGGED:
                log.warning("an order cannot be understood", order=key.decode("utf-8", "replace"), error=str(error))
            self._unreadable[key] = None
            return None
        self._unreadable.pop(key, None)
        return order if self._assignment.scope.owns(host_key(order.host).encode()) else None

    def _has_failed(self, error: BusError) -> None:
        self._failures += 1
        if str(error) != self.trouble:
            self.trouble = str(error)
            self._wake()
        is_away = isinstance(error, BusUnavailableError)
        if not self._has_warned and not (is_away and (self._failures < PATIENT_TRIES or self._instruments.outage.on)):
            self._has_warned = True
            log.warning("operators' orders cannot be read, those in effect stay", error=str(error))
        self._instruments.metrics.orders_unread.labels(str(self._assignment.partition)).set(1)

"""Operators' orders: reads them, gives and ends them, and says which of them are in effect.

Orders are what operators want, and stand in the topic `control`. What is in effect stands in the ledger, under
`@cordon/<host>/<order>`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from outfitter_proto import codec, names
from outfitter_proto.bus import Bus, BusUnavailableError, Entry, Reader
from outfitter_proto.bus.reading import read_on
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import MAX_REASON, Checkpoint, Cordon, CordonOrder
from outfitter_proto.signs_of_life import responsible
from outfitter_service.query import known, ledger_view
from outfitter_service.query.device_lines import DeviceEntry, entries_of, left_out
from outfitter_service.query.errors import OutfitterCliError
from outfitter_service.query.ledger_view import LedgerView

KEPT = timedelta(days=30)
"""How long an order stays in the topic after its end."""

PARTITION = 0
"""The only partition of the topic."""

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Of ids. Their order is that of their codes, so that ids sort by time."""
_TIME_DIGITS, _RANDOM_DIGITS = 7, 4


class OrderState(StrEnum):
    """What has become of an order."""

    NOT_TAKEN = "not-taken"
    """It stands, and no manager has taken it yet."""
    IN_EFFECT = "in-effect"
    LOST = "lost"
    """It is in effect, and the topic does not have it any more. It can be ended as any other."""
    ENDING = "ending"
    """It has ended, and is in effect until the manager has taken that."""
    ENDED = "ended"


STANDING = (OrderState.NOT_TAKEN, OrderState.IN_EFFECT, OrderState.LOST)
"""The states of orders that nobody has ended."""


class Orders(NamedTuple):
    """The orders in the topic by id, also ended ones. `unreadable`: how many records there cannot be understood."""

    by_id: dict[str, CordonOrder]
    unreadable: int


class OrderLine(Struct, frozen=True, kw_only=True):
    """An order as it is shown. `since`: since when it is in effect."""

    id: str
    host: str
    resource: str | None
    device: str | None
    author: str
    reason: str
    at: datetime
    until: datetime | None
    ended_at: datetime | None
    ended_by: str | None
    since: datetime | None
    state: OrderState

    @property
    def stands(self) -> bool:
        """Whether nobody has ended it."""
        return self.state in STANDING

    @property
    def what(self) -> str:
        """What it takes out, in words."""
        return " ".join(filter(None, (self.resource, self.device))) or "all devices"

    def ended(self, by: str, at: datetime) -> CordonOrder:
        """The record that ends it, with no more words than a manager keeps."""
        author, reason = self.author[:MAX_REASON], self.reason[:MAX_REASON]
        return CordonOrder(
            id=self.id, host=self.host, author=author, reason=reason, at=self.at, resource=self.resource,
            device=self.device, until=self.until, ended_at=at, ended_by=by,
        )  # fmt: skip


class Selection(NamedTuple):
    """What somebody names: a host, or a resource or a device there. `devices`: all names of the devices that are meant,
    and `resources` those that show them. None: all."""

    host: str
    resource: str | None = None
    device: str | None = None
    devices: frozenset[str] | None = None
    resources: frozenset[str] | None = None

    def has(self, line: OrderLine) -> bool:
        """Whether an order is about this, or a part of it."""
        if line.host != self.host or self.devices is None:
            return line.host == self.host
        return line.device in self.devices or (self.device is None and line.resource == self.resource)

    def is_all_of(self, line: OrderLine) -> bool:
        """Whether an order is about this, and not about a part of it."""
        if self.device is not None:
            return self.has(line)
        return line.host == self.host and line.device is None and line.resource == self.resource

    def meets(self, line: OrderLine) -> bool:
        """Whether an order is about some of this."""
        if line.host != self.host:
            return False
        if line.device is not None and self.devices is not None:
            return line.device in self.devices
        return line.resource is None or self.resources is None or line.resource in self.resources


# --- what there is ------------------------------------------------------------------------------------------


async def read(bus: Bus, cluster: str, now: datetime) -> Orders:
    """All orders in the topic, as managers read it: without regard to transactions. A record that cannot be understood
    changes nothing, and neither does a tombstone under an order that stands.

    Raises:
        BusError: see the bus port; UnknownTopicError if there is no such topic.
        OutfitterCliError: see `ledger_view.messages_of`.
    """
    topic, found, unreadable = names.control_topic(cluster), dict[str, CordonOrder](), set[bytes]()
    async for message in ledger_view.messages_of(bus, topic, PARTITION, committed=False):
        key = message.key or b""
        unreadable.discard(key)
        if message.value is None:
            before = found.get(key.decode("utf-8", "replace"))
            if before is not None and not before.stands(now):
                del found[before.id]
            continue
        try:
            if message.unreadable is not None:
                raise codec.WireError("operator's order", message.unreadable)
            order = codec.decode_order(message.value, key=key)
        except codec.WireError:
            unreadable.add(key)
        else:
            found[order.id] = order
    return Orders(found, len(unreadable))


def lines_of(orders: Orders, ledger: LedgerView, now: datetime, host: str | None = None) -> list[OrderLine]:
    """The orders of the topic and those in the ledger, of all hosts or of one, in the order of their times. `ledger`:
    of the same hosts."""
    in_effect = {(cordon.host, cordon.order): cordon for cordon in ledger.of(Cordon, host)}
    lines = [
        _line(order, in_effect.pop((order.host, order.id), None), now)
        for order in orders.by_id.values()
        if host in {None, order.host}
    ]
    lines += [_lost(cordon) for cordon in in_effect.values()]
    return sorted(lines, key=lambda line: (line.at, line.id))


def _line(order: CordonOrder, cordon: Cordon | None, now: datetime) -> OrderLine:
    if order.stands(now):
        state = OrderState.NOT_TAKEN if cordon is None else OrderState.IN_EFFECT
    else:
        state = OrderState.ENDED if cordon is None else OrderState.ENDING
    return OrderLine(
        id=order.id, host=order.host, resource=order.resource or None, device=order.device or None,
        author=order.author, reason=order.reason, at=order.at, until=order.until or None,
        ended_at=order.ended_at or None, ended_by=order.ended_by or None,
        since=None if cordon is None else cordon.since, state=state,
    )  # fmt: skip


def _lost(cordon: Cordon) -> OrderLine:
    return OrderLine(
        id=cordon.order, host=cordon.host, resource=cordon.resource or None, device=cordon.device or None,
        author=cordon.author, reason=cordon.reason, at=cordon.since, until=cordon.until or None,
        ended_at=None, ended_by=None, since=cordon.since, state=OrderState.LOST,
    )  # fmt: skip


# --- what is meant ------------------------------------------------------------------------------------------


def selected(ledger: LedgerView, host: str, resource: str | None, device: str | None) -> Selection:
    """What these names mean in the ledger of a host. What it does not know means itself."""
    if resource is None and device is None:
        return Selection(host)
    devices, resources = {device} - {None}, {resource} - {None}
    for entry in _entries(ledger, host):
        if device in entry.all_names or (device is None and entry.resource == resource):
            devices |= {*entry.all_names, *([] if device is not None else [entry.part_of])}
            resources.add(entry.resource)
        elif device is not None and entry.part_of == device:
            resources.add(entry.resource)
    return Selection(
        host, resource, device, frozenset(filter(None, devices)), frozenset(filter(None, resources)) or None
    )


def what_is_missing(ledger: LedgerView, host: str, resource: str | None, device: str | None) -> str | None:
    """That a host, of which this ledger has the record, lacks this resource or device, and what it has. None: it has
    them, or its record has no room for all of its devices."""
    record = ledger.hosts[host]
    if resource is not None and (missing := known.unknown_resource(ledger, resource)) is not None:
        return missing
    if device is None or any(entry.is_meant_by(device) for entry in _entries(ledger, host, resource)):
        return None
    asked = [inventory for name, inventory in record.resources.items() if resource in {None, name}]
    return None if device and any(map(left_out, asked)) else known.unknown_device(ledger, host, device, resource)


def covered(ledger: LedgerView, selection: Selection) -> list[DeviceEntry]:
    """The devices that an order for a selection takes out, once each resource."""
    return [
        entry
        for entry in _entries(ledger, selection.host)
        if selection.devices is None or any(map(entry.is_meant_by, selection.devices))
    ]


def _entries(ledger: LedgerView, host: str, resource: str | None = None) -> list[DeviceEntry]:
    record = ledger.hosts_record(host)
    found = [] if record is None else entries_of(ledger, record)
    return [entry for entry in found if resource in {None, entry.resource}]


# --- giving and ending --------------------------------------------------------------------------------------


def new_id(now: datetime, taken: Iterable[str] = ()) -> str:
    """A new id: short, and later ones sort behind it. `taken`: ids that exist."""
    existing = set(taken)
    while True:
        found = f"{_in_digits(int(now.timestamp()), _TIME_DIGITS)}-{_random()}"
        if found not in existing:
            return found


def _in_digits(number: int, digits: int) -> str:
    return "".join(_DIGITS[number >> 5 * place & 31] for place in reversed(range(digits)))


def _random() -> str:
    return _in_digits(secrets.randbits(5 * _RANDOM_DIGITS), _RANDOM_DIGITS)


async def publish(bus: Bus, cluster: str, order: CordonOrder) -> None:
    """Write an order, or its end.

    Raises:
        BusError: it is not written; see the bus port.
        OutfitterCliError: it may be written.
    """
    try:
        await bus.publish(names.control_topic(cluster), PARTITION, Entry(order.key.encode(), codec.encode(order)))
    except BusUnavailableError as error:
        what = "the end of order" if order.ended_at else "order"
        raise OutfitterCliError(
            f"it is not known whether {what} {order.id} was written: {error}; `outfitter orders {order.host}` shows it"
        ) from error


async def delete_old(bus: Bus, cluster: str, orders: Orders, now: datetime) -> list[str]:
    """Delete the orders that ended long ago, but for those that the ledger still has in effect; give their ids.

    Raises:
        BusError: the bus did not answer.
        OutfitterCliError: see `ledger_view.read`.
    """
    old = [
        order
        for order in orders.by_id.values()
        if not order.stands(now) and (end := order.ended_at or order.until) and end < now - KEPT
    ]
    deleted: list[str] = []
    for host in sorted({order.host for order in old}):
        in_effect = {cordon.order for cordon in (await ledger_view.read(bus, cluster, host)).of(Cordon, host)}
        deleted += [order.id for order in old if order.host == host and order.id not in in_effect]
    for key in deleted:
        await bus.publish(names.control_topic(cluster), PARTITION, Entry(key.encode(), None))
    return deleted


# --- whether a manager has taken them -----------------------------------------------------------------------


class FollowedHost:
    """The ledger of one host: as it is, and as it changes while somebody waits."""

    def __init__(self, bus: Bus, ledger: LedgerView, reader: Reader, partitions: int, host: str) -> None:
        self.ledger = ledger
        self.host = host
        self._bus = bus
        self._reader = reader
        self._partitions = partitions

    @property
    def in_effect(self) -> dict[str, Cordon]:
        """The orders in effect there, by id."""
        return {cordon.order: cordon for cordon in self.ledger.of(Cordon, self.host)}

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The last checkpoint of its manager, which says how far that has read the orders."""
        return responsible(self.ledger.checkpoints, self.host, self._partitions)

    async def wait_for(self, enough: Callable[[], bool], within: float) -> bool:
        """Read changes until `enough()` is true, for at most `within` seconds. Seconds for which the bus holds us back
        do not count. Return whether it is true.

        Raises:
            BusError: the bus did not answer.
        """
        with suppress(TimeoutError), self._bus.patience.limit(within):
            if not enough():
                async for messages in read_on(self._reader):
                    for change in map(ledger_view.decode, messages):
                        if ledger_view.is_about(change, self.host) or isinstance(change.record, Checkpoint):
                            self.ledger.put(change)
                    if enough():
                        break
        return enough()


@asynccontextmanager
async def following(bus: Bus, cluster: str, host: str) -> AsyncIterator[FollowedHost]:
    """The ledger of a host, of which no later change is missed.

    Raises:
        BusError: see the bus port; UnknownTopicError if the cluster does not exist.
        OutfitterCliError: see `ledger_view.read`.
    """
    topic = names.topics(cluster).allocations
    count = (await bus.topic(topic)).partitions
    partition = partition_of(host, count)
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=end, committed=True) as reader:
        yield FollowedHost(bus, await ledger_view.read(bus, cluster, host), reader, count, host)

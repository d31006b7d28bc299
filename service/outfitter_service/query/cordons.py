"""The operators' orders in effect on a host, and the devices that they keep from being lent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime

from msgspec import UNSET, Struct

from outfitter_proto.records import Cordon, Host
from outfitter_service.query.ledger_view import LedgerView


class OrderInEffect(Struct, frozen=True, kw_only=True):
    """An operator's order to which a manager keeps. `author`: who gave it, as that one says. `since`: when the manager
    took it. `until`: when it ends by itself, by the manager's clock. It is about the devices of `resource`, about one
    `device`, or about all of the host."""

    id: str
    author: str
    reason: str
    since: datetime
    until: datetime | None
    resource: str | None
    device: str | None

    @property
    def in_words(self) -> str:
        """`rebooted tonight (ada@ops-1, order k3v9-01)`, and until when, if it ends by itself."""
        until = "" if self.until is None else f", until {self.until:%Y-%m-%dT%H:%M:%SZ}"
        return f"{self.reason} ({self.author}, order {self.id}{until})"

    @property
    def about(self) -> str:
        """What it takes out, in words: `gpu`, `the device GPU-1`, or `all devices`."""
        if self.device is not None:
            return f"the device {self.device}"
        return "all devices" if self.resource is None else self.resource

    @property
    def is_of_host(self) -> bool:
        """Whether it is about all devices of the host."""
        return self.resource is None and self.device is None


def orders_on(ledger: LedgerView, host: str) -> list[OrderInEffect]:
    """The orders in effect on a host, the oldest first."""
    orders = [shown(cordon) for cordon in ledger.of(Cordon, host)]
    return sorted(orders, key=lambda order: (order.since, order.id))


def host_order(orders: Iterable[OrderInEffect], now: datetime) -> OrderInEffect | None:
    """The first order about a whole host whose time is not over; None: there is none. While no manager runs, an order
    stays in the ledger when its time is over."""
    return next((order for order in orders if order.is_of_host and (order.until is None or now < order.until)), None)


class HostCordons:
    """Which devices of one host the orders take out. `canonical`: one name for all names of a device."""

    def __init__(self, orders: Iterable[OrderInEffect], host: Host, canonical: Callable[[str], str]) -> None:
        self._canonical = canonical
        self._orders = {order.id: order for order in orders}
        self._of_device: defaultdict[str, list[str]] = defaultdict(list)
        """The ids of the orders that are about one device, also because a resource shows it."""
        self._of_resource: defaultdict[str, list[str]] = defaultdict(list)
        for order in self._orders.values():
            if order.device is not None:
                self._of_device[canonical(order.device)].append(order.id)
            elif order.resource is not None:
                self._of_resource[order.resource].append(order.id)
        self._of_host = [order.id for order in self._orders.values() if order.is_of_host]
        if self._of_resource:
            self._note_devices(host)

    def _note_devices(self, host: Host) -> None:
        """A device that a cordoned resource shows is cordoned in each other resource, too."""
        for resource, orders in self._of_resource.items():
            inventory = host.resources.get(resource)
            for device in [] if inventory is None else inventory.devices:
                self._of_device[self._canonical(device.id)] += orders

    def of(self, resource: str, names: Iterable[str], recorded: str | None = None) -> list[OrderInEffect]:
        """The orders about a device that a resource shows, the oldest first. `names`: all that the device has.
        `recorded`: the order that the host's record has of it, also while no resource that the order is about shows it.
        """
        if not self._orders:
            return []
        found = {recorded, *self._of_host, *self._of_resource.get(resource, ())}
        for name in names:
            found.update(self._of_device.get(self._canonical(name), ()))
        return [order for id_, order in self._orders.items() if id_ in found]


def shown(cordon: Cordon) -> OrderInEffect:
    """A record of an order, as views show it."""
    return OrderInEffect(
        id=cordon.order,
        author=cordon.author,
        reason=cordon.reason,
        since=cordon.since,
        until=None if cordon.until is UNSET else cordon.until,
        resource=None if cordon.resource is UNSET else cordon.resource,
        device=None if cordon.device is UNSET else cordon.device,
    )

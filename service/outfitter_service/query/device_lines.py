"""The devices of hosts with their health and their holders: what commands and the API show of them.

A device that resources, drivers or holders call differently has one line in each resource. `HostDevices` makes a line
when somebody asks for it, because a shared device may have thousands of holders.
"""

from __future__ import annotations

import math
from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import NamedTuple

from msgspec import UNSET, Struct, StructMeta

from outfitter_proto.records import Allocation, Device, Health, Host, InventoryDevice, ResourceInventory
from outfitter_service.core.state import lending, pools
from outfitter_service.core.state.device_names import CanonicalName, one_name_each, pairs, wholes_of
from outfitter_service.core.state.lending import Block, Use
from outfitter_service.query.cordons import HostCordons, OrderInEffect, orders_on
from outfitter_service.query.held_devices import HeldDevice, HeldDevices, Holding
from outfitter_service.query.ledger_view import LedgerView

NOT_REPORTED = "its driver does not report it"

MOST_HOLDERS = 20
"""Most holders that a line names."""
MOST_ORDERS = 20
"""Most orders that a line names."""

_POOL = CanonicalName("")
_MOST_DIGITS = 15
"""Most digits of a number in a driver's properties."""
_BEHIND_ALL = "\U0010ffff"
"""Behind any PCI address."""


class DeviceHolder(Struct, frozen=True, kw_only=True):
    """An allocation that holds a device. `since`: when it got into its state. `delayed_by`: why a releasing device is
    not free yet. `shared`: it may share the device with others. `labels`: its worker's."""

    worker: str
    incarnation: str
    state: str
    token: int | None
    since: datetime
    delayed_by: str | None = None
    shared: bool = False
    labels: dict[str, str] = {}


class _AbstractStruct(StructMeta, ABCMeta):
    """The type of structs with abstract methods."""


class HostDevice(Struct, frozen=True, kw_only=True, metaclass=_AbstractStruct):
    """One device of one host, and whether it is lent. `state`: its state apart from allocations (a quarantine), or
    None. `cordon`: the id of an operator's order that keeps it from being lent, or None. `orders`: all such orders, the
    oldest first. `used_by`: a process that keeps it from being lent, because it uses the device, and the device was not
    lent to it; or None. `listed`: the host's record has the device. Otherwise a worker holds it. `part_of`: the device
    that it is a part of, or None. `replicas`: to how many workers it is lent at once. `has_replica`: there is one more.
    `lent_twice`: its holders have more of it than there is."""

    host: str
    resource: str
    id: str
    health: str
    sharing: str
    reason: str | None = None
    state: str | None = None
    properties: dict[str, str] = {}
    cordon: str | None = None
    orders: list[OrderInEffect] = []
    used_by: str | None = None
    listed: bool = True
    part_of: str | None = None
    replicas: int = 1
    has_replica: bool = False
    lent_twice: bool = False

    @property
    def block(self) -> Block | None:
        """Why it is lent to nobody, or None."""
        return lending.block_of(
            self.health, self.reason, cordoned=self.cordon is not None, stranger=self.used_by is not None
        )

    @property
    def illness(self) -> Block | None:
        """Why its health keeps it from being lent, or None."""
        return lending.block_of(self.health, self.reason)

    @property
    def cordoned_because(self) -> str | None:
        """Why operators take it out, and who; None: nobody does. `rebooted tonight (ada@ops-1, order k3v9-01)`."""
        if self.cordon is None:
            return None
        return "; ".join(order.in_words for order in self.orders) or f"order {self.cordon}"

    @property
    def stranger(self) -> str | None:
        """Who uses it to whom it was not lent; None: nobody does, as far as is known."""
        return None if self.used_by is None else f"{self.used_by}, {lending.NOT_LENT_TO}"

    @property
    @abstractmethod
    def use(self) -> Use | None:
        """How it is held by those who hold it."""

    @property
    def not_lent(self) -> Block | Use | None:
        """Why its resource lends it to nobody more now; None: it would. A device that workers share is free, too."""
        return lending.not_lent(self.block, self.use, shares=self.sharing == "shared")

    @property
    def is_free(self) -> bool:
        """Whether its resource can lend it now."""
        return self.not_lent is None

    @property
    def model(self) -> str | None:
        """Its model, if the driver names one."""
        return self.properties.get("model") or None

    def fits(self, resource: str | None, model: str | None, health: str | None = None) -> bool:
        """Whether it is of that resource and health, and its model has the text `model` in its name, in upper or lower
        case. None: any."""
        return (
            resource in {None, self.resource}
            and health in {None, self.health}
            and (model is None or (self.model is not None and model.casefold() in self.model.casefold()))
        )

    @property
    def memory(self) -> str | None:
        """Its memory in words, if the driver names it: `79.6 GiB`. Never more than there is: people ask for as much."""
        size = self.properties.get("memory.total_bytes", "")
        if not (size.isascii() and size.isdigit()) or len(size) > _MOST_DIGITS:
            return None
        mebibytes = int(size) / 1024**2
        return f"{mebibytes:.0f} MiB" if mebibytes < 1024 else f"{int(mebibytes * 10 / 1024) / 10:g} GiB"

    @property
    def place(self) -> tuple[str, float, str]:
        """Its place in the machine: by the index that its driver names, or else by its PCI address. Where the driver
        names neither, devices have one place."""
        index, address = self.properties.get("index", ""), self.properties.get("pci.bus_id", _BEHIND_ALL)
        is_number = index.isascii() and index.isdigit() and len(index) <= _MOST_DIGITS
        return self.resource, int(index) if is_number else math.inf, address


class DeviceLine(HostDevice, frozen=True, kw_only=True):
    """A device with its holders. `aliases`: its other names. `holders`: at most `MOST_HOLDERS` of them, who has it
    alone first; `holder_count`: how many there are. `kept_by`: who holds parts of it, or what it is a part of, and so
    keeps it from others; at most `MOST_HOLDERS`. `orders`
    has at most `MOST_ORDERS`."""

    aliases: list[str] = []
    holders: list[DeviceHolder] = []
    holder_count: int = 0
    kept_by: list[DeviceHolder] = []

    @property
    def use(self) -> Use | None:
        return lending.use_of(
            alone=any(not holder.shared for holder in self.holders),
            shared=bool(self.holders),
            has_replica=self.has_replica,
            overlaps=bool(self.kept_by),
        )

    @property
    def names(self) -> set[str]:
        """All its names."""
        return {self.id, *self.aliases}


class DeviceEntry(HostDevice, frozen=True, kw_only=True):
    """A device of which a line can be made. `names`: those that the host's record connects. `held_as`: the same
    device, as its holders' records name it. `kept_by`: as `DeviceLine` has it, all of them."""

    names: Sequence[str]
    held_as: Sequence[HeldDevice]
    kept_by: Sequence[Allocation] = ()

    @property
    def use(self) -> Use | None:
        if not self.held_as and not self.kept_by:
            return None
        return lending.use_of(
            alone=any(device.alone for device in self.held_as),
            shared=any(device.sharing for device in self.held_as),
            has_replica=self.has_replica,
            overlaps=bool(self.kept_by),
        )

    @property
    def holders(self) -> Iterator[Allocation]:
        """All its holders, who has it alone first."""
        return (holding.record for holding in _holdings(self.held_as))

    @property
    def all_names(self) -> set[str]:
        """Those and its holders', too."""
        return {self.id, *self.names, *chain.from_iterable(device.names for device in self.held_as)}

    def is_meant_by(self, name: str) -> bool:
        """Whether a name is one of its own, or of what it is a part of, which may be no device to others."""
        return name in self.all_names or name == self.part_of

    def line(self) -> DeviceLine:
        return DeviceLine(
            **{field: getattr(self, field) for field in HostDevice.__struct_fields__ if field != "orders"},
            orders=self.orders[:MOST_ORDERS],
            aliases=sorted(self.all_names - {self.id}),
            holders=[
                _holder(holding.record, is_shared=holding.is_shared)
                for holding in islice(_holdings(self.held_as), MOST_HOLDERS)
            ],
            holder_count=sum(len(device.alone) + len(device.sharing) for device in self.held_as),
            kept_by=[_holder(record, is_shared=False) for record in self.kept_by[:MOST_HOLDERS]],
        )


def lines_of(ledger: LedgerView, host: Host) -> list[DeviceLine]:
    """The devices that a host's record lists, and the held ones that it does not list."""
    return [entry.line() for entry in entries_of(ledger, host)]


def entries_of(ledger: LedgerView, host: Host) -> list[DeviceEntry]:
    """The devices of `lines_of`, by resource and in the order of the machine. This costs as much as the host has
    devices, whoever holds them."""
    names, held = _Names(host), ledger.held(host.host)
    records = {device.id: device for device in ledger.of(Device, host.host)}
    cordons = HostCordons(orders_on(ledger, host.host), host, names.canonical)
    listed = [
        entry
        for resource, inventory in host.resources.items()
        for entry in _listed(host.host, resource, inventory, names, held, records, cordons)
    ]
    unlisted = _unlisted(host, names, held, {names.canonical(entry.id) for entry in listed}, cordons)
    return sorted([*listed, *unlisted], key=lambda entry: entry.place)


class _Names:
    """The names that mean one device, as a host's record has them."""

    def __init__(self, host: Host) -> None:
        groups = [names for inventory in host.resources.values() for names in inventory.names or ()]
        self._canonical, self._classes = one_name_each(groups)
        parts = [pair for inventory in host.resources.values() for pair in pairs(inventory.parts or {})]
        self._above = wholes_of(parts, self._canonical)
        self._direct = dict(parts)

    def part_of(self, device_id: str) -> str | None:
        """The device that it is a part of, as its driver calls that one."""
        return self._direct.get(device_id)

    def wholes(self, name: str) -> Sequence[str]:
        """The devices that it is a part of, directly or not, each by one name."""
        return self._above.get(CanonicalName(self.canonical(name)), ())

    def canonical(self, name: str) -> str:
        return self._canonical.get(name, name)

    def all_of(self, name: str) -> Sequence[str]:
        return self._classes.get(name, (name,))


def _listed(
    host: str,
    resource: str,
    inventory: ResourceInventory,
    names: _Names,
    held: HeldDevices,
    records: Mapping[str, Device],
    cordons: HostCordons,
) -> Iterator[DeviceEntry]:
    for device in _one_each(inventory.devices, names):
        record = records.get(device.id)
        all_names = names.all_of(device.id)
        orders = cordons.of(resource, all_names, device.cordon or None)
        lent = _lending(device.id, inventory, names, held)
        yield DeviceEntry(
            host=host,
            resource=resource,
            id=device.id,
            health=device.health,
            reason=device.reason or (record.reason if record else None),
            sharing=inventory.sharing,
            state=record.state if record else None,
            properties=device.properties,
            cordon=device.cordon or next((order.id for order in orders), None),
            orders=orders,
            used_by=device.used_by or None,
            names=all_names,
            held_as=held.with_any(all_names),
            part_of=names.part_of(device.id),
            replicas=inventory.replicas or 1,
            **lent._asdict(),
        )


class _Lending(NamedTuple):
    """What keeps a device from others besides its holders, who may have replicas of it."""

    kept_by: list[Allocation]
    has_replica: bool
    lent_twice: bool


def _lending(device_id: str, inventory: ResourceInventory, names: _Names, held: HeldDevices) -> _Lending:
    shares = inventory.sharing == "shared"
    own = pools.SEAT if shares else pools.replica(inventory.replicas or 1)
    part = pools.SHARED_PART if shares else pools.PART
    all_names = names.all_of(device_id)
    devices, users = held.with_any(all_names), held.users(all_names)
    used = pools.Pools()
    kept_by = []
    for key, (record, use) in users.items():
        if use != pools.SEAT:
            used.change(_POOL, use, 1)
        has_it = use == pools.SEAT or any(key in device.alone for device in devices)
        if not has_it and pools.may_exclude(use, own):
            kept_by.append(record)
    for whole in names.wholes(device_id):
        of_whole = held.users(names.all_of(whole)).values()
        kept_by += [record for record, use in of_whole if pools.may_exclude(use, part)]
    has_replica = bool(users) and pools.is_replica(own) and used.fits(_POOL, own)
    return _Lending(kept_by, has_replica, used.amount(_POOL) > pools.WHOLE)


def _one_each(devices: Iterable[InventoryDevice], names: _Names) -> Iterable[InventoryDevice]:
    """The devices of one resource. If another resource's driver says that two of them are one, the ill one counts."""
    found: dict[str, InventoryDevice] = {}
    for device in devices:
        canonical = names.canonical(device.id)
        if canonical not in found or found[canonical].health == Health.HEALTHY:
            found[canonical] = device
    return found.values()


def _unlisted(
    host: Host, names: _Names, held: HeldDevices, listed: set[str], cordons: HostCordons
) -> Iterator[DeviceEntry]:
    """The held devices of which no name is listed."""
    incomplete = {name for name, inventory in host.resources.items() if left_out(inventory)}
    missing = [device for device in held if listed.isdisjoint(map(names.canonical, device.names))]
    groups = [names.all_of(name) for device in missing for name in device.names]
    same, classes = one_name_each([*groups, *(device.names for device in missing)])
    one_device: dict[str, list[HeldDevice]] = {}
    for device in missing:
        first = device.names[0]
        one_device.setdefault(same.get(first, first), []).append(device)
    for canonical, held_as in one_device.items():
        holding = next(_holdings(held_as))
        health: str = Health.UNKNOWN
        reason: str | None = NOT_REPORTED
        if holding.resource in incomplete:  # its holder's record has the health of the driver's last report
            health, reason = holding.info.get("health", "healthy"), holding.info.get("health.reason")
        orders = cordons.of(holding.resource, (*classes.get(canonical, ()), *held_as[0].names))
        yield DeviceEntry(
            host=host.host,
            resource=holding.resource,
            id=holding.info["id"],
            health=health,
            reason=reason,
            sharing="shared" if holding.is_shared else "exclusive",
            state=None,
            properties=holding.info,
            cordon=next((order.id for order in orders), None),
            orders=orders,
            names=classes.get(canonical, (canonical,)),
            held_as=held_as,
            listed=False,
        )


def _holdings(held_as: Sequence[HeldDevice]) -> Iterator[Holding]:
    """The holders of a device, who has it alone first."""
    alone = chain.from_iterable(device.alone.values() for device in held_as)
    return chain(alone, chain.from_iterable(device.sharing.values() for device in held_as))


def _holder(record: Allocation, *, is_shared: bool) -> DeviceHolder:
    return DeviceHolder(
        worker=record.worker,
        incarnation=record.incarnation,
        state=record.state,
        token=record.token,
        since=record.since,
        delayed_by=record.delayed_by or None,
        shared=is_shared,
        labels=record.request.labels,
    )


def left_out(inventory: ResourceInventory) -> int:
    """The number of reported devices that the record does not list one by one."""
    return 0 if inventory.total is UNSET else inventory.total - len(inventory.devices)


class LeftOut(Struct, frozen=True, kw_only=True):
    """The devices of one resource of one host that its record counts and does not list one by one."""

    total: int
    healthy: int
    cordoned: int


def counted_only(inventory: ResourceInventory) -> LeftOut | None:
    """The devices that the record counts and does not list; None: it lists all."""
    total = left_out(inventory)
    if total <= 0:
        return None
    healthy = sum(device.health == Health.HEALTHY for device in inventory.devices)
    cordoned = sum(device.cordon is not UNSET for device in inventory.devices)
    return LeftOut(
        total=total,
        healthy=_within(total, (inventory.healthy or 0) - healthy),
        cordoned=_within(total, (inventory.cordoned or 0) - cordoned),
    )


def _within(most: int, number: int) -> int:
    return min(max(number, 0), most)

"""One host's part of the ledger in memory: its records, and the indexes that decisions look at.

The indexes are a function of the host's records and of its drivers' last reports, whatever the order in which
those came. Anybody may read a host state; only `Ledger` changes it. It decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate

from msgspec import UNSET, Struct, structs

from outfitter_proto.records import FINAL_STATES, HOLDING_STATES, Allocation, Health, Host, ReasonCode
from outfitter_service.core.model import DriverFailure, KnownDevice
from outfitter_service.core.state.infos import GrantInfos, grant_infos
from outfitter_service.core.state.matching import Viewers, counts
from outfitter_service.core.state.sizes import granted_bytes, info_bytes
from outfitter_service.core.states import PENDING


class Suspect(Struct, frozen=True):
    """The record under `key` holds device `id`, granted as `resource`, which is not reported any more."""

    key: str
    resource: str
    id: str

    def __str__(self) -> str:
        return f"{self.key} holds {self.id} of {self.resource}, which is not reported any more"


class Inventory(Struct, frozen=True, kw_only=True):
    """What a driver last said of one resource of one host.

    `reported`: it has said something at all. `asked` is the amount an on-demand driver was last asked for and
    `asking` the amount it is being asked for now (0: it is not); `least` is what the worker of its last question wants.
    `is_retry_due`: the delay after its failure has ended while it was being asked. `healthy` counts the healthy
    devices. `linked` are names that earlier reports connected, as long as the record of a holder does not have them
    all.

    `found` are the devices as the driver named them, `devices` the same as they can be lent: those whose ids are
    `held_back` are of unknown health, as long as `suspect` holds what may be one of them. `known` are then the names of
    devices that were known before; None: all are known. See `held_back_devices`.
    """

    devices: tuple[KnownDevice, ...] = ()
    found: tuple[KnownDevice, ...] = ()
    linked: tuple[tuple[str, ...], ...] = ()
    failure: DriverFailure | None = None
    reported: bool = False
    asked: int = 0
    asking: int = 0
    least: int = 0
    is_retry_due: bool = False
    healthy: int = 0
    known: tuple[str, ...] | None = None
    held_back: frozenset[str] = frozenset()
    suspect: Suspect | None = None

    @classmethod
    def of(cls, devices: tuple[KnownDevice, ...], *, asked: int = 0) -> Inventory:
        """The inventory that a driver's report amounts to; devices that share a name are one."""
        distinct = _distinct(devices)
        return cls(devices=distinct, found=distinct, reported=True, asked=asked, healthy=_count_healthy(distinct))

    def with_held_back(self, ids: frozenset[str], suspect: Suspect) -> Inventory:
        """The same with these devices held back because of `suspect`, and no others."""
        back = frozenset([one.id for one in self.found if one.id in ids and one.health == Health.HEALTHY])
        reason = f"held back: {suspect} and which may be this device"
        devices = tuple(
            [
                structs.replace(one, health=Health.UNKNOWN, reason=reason) if one.id in back else one
                for one in self.found
            ]
        )
        if devices == self.devices:
            devices = self.devices
        healthy = _count_healthy(devices)
        return structs.replace(self, devices=devices, healthy=healthy, held_back=back, suspect=suspect)

    def with_all_known(self) -> Inventory:
        """The same with no device held back."""
        healthy = _count_healthy(self.found)
        return structs.replace(
            self, devices=self.found, healthy=healthy, known=None, held_back=frozenset(), suspect=None
        )

    @property
    def names(self) -> list[tuple[str, ...]]:
        """The names of each device that has several: those in use, then those that are only `linked`."""
        named = [(device.id, *device.aliases) for device in self.devices if device.aliases]
        return [*named, *self.linked] if self.linked else named

    @property
    def names_of_all(self) -> tuple[str, ...]:
        """The names of all devices that are reported, and those that are only `linked` with them."""
        named = [name for device in self.found for name in (device.id, *device.aliases)]
        return (*named, *[name for names in self.linked for name in names])


def _count_healthy(devices: Iterable[KnownDevice]) -> int:
    well = Health.HEALTHY
    return sum(device.health == well for device in devices)


def _distinct(devices: tuple[KnownDevice, ...]) -> tuple[KnownDevice, ...]:
    """Devices of a report that share a name, directly or through others of it, are one: the first of them, by all their
    names, and ill if any of them is."""
    if len({device.id for device in devices}) == len(devices) and not any(device.aliases for device in devices):
        return devices
    _, classes = one_name_each((device.id, *device.aliases) for device in devices)
    alike: dict[tuple[str, ...], list[KnownDevice]] = {}
    for device in devices:
        alike.setdefault(classes.get(device.id, (device.id,)), []).append(device)
    return tuple([_merged(each) if len(each) > 1 else each[0] for each in alike.values()])


def _merged(devices: list[KnownDevice]) -> KnownDevice:
    first = devices[0]
    names = dict.fromkeys(name for device in devices for name in (device.id, *device.aliases))
    del names[first.id]
    told = next((device for device in devices if device.health != Health.HEALTHY), first)
    return structs.replace(first, aliases=tuple(names), health=told.health, reason=told.reason)


NOT_REPORTED = Inventory()
CLOCK_SLACK = timedelta(seconds=2)
"""A record that began later than this after now was written before the clock was set back."""

QueueEntry = tuple[int, int, str]
"""(-priority, offset of the first registration, allocation key): the queue's order."""

Classes = Mapping[str, tuple[str, ...]]
"""All names of one device, in order, by each of them; only of devices that have several."""

NO_CLASSES: Classes = {}

Run = tuple[int, str]
"""(offset of the first registration, allocation key) of one incarnation: the last in order is the newest."""

Ending = tuple[datetime, str]
"""(when it ended or failed, allocation key): the first in order is forgotten first."""


def queue_entry(record: Allocation) -> QueueEntry:
    return (-record.request.priority, record.source.offset, record.key)


def exclusive_ids(record: Allocation) -> list[str]:
    """The canonical ids of the devices that a record has to itself."""
    shared = record.shared
    ids = []
    for resource, infos in record.resources.items():
        if resource not in shared:
            for info in infos:
                ids.append(info["id"])  # noqa: PERF401 - a comprehension is a call, and this is done for each grant
    return ids


def shared_ids(record: Allocation) -> list[str]:
    """The canonical ids of the devices that a record has together with others."""
    return [info["id"] for resource in record.shared for info in record.resources.get(resource, ())]


class Tally(dict[str, int]):
    """Counts by name; what counts zero is not in here."""

    __slots__ = ()

    def add(self, name: str, count: int) -> int:
        total = self.get(name, 0) + count
        if total:
            self[name] = total
        else:
            self.pop(name, None)
        return total


class FreeList:
    """One resource's devices on one host: where each stands, and which of them are free.

    `free` holds negated positions in ascending order, so that the device a driver prefers is the last item. `names`
    are the devices' canonical names, `alone` the grant infos of each of them by itself. `repeats`: some of them are one
    and the same device. No device takes more than `largest` bytes of a grant.
    """

    __slots__ = (
        "_classes", "_least", "alone", "devices", "free", "largest", "names", "places", "repeats", "resource",
    )  # fmt: skip

    def __init__(self, resource: str, devices: tuple[KnownDevice, ...], host_state: HostState) -> None:
        self.resource = resource
        self.devices = devices
        self.names = [host_state.canonical(device.id) for device in devices]
        self._classes = host_state.classes
        self.alone = [grant_infos({resource: (device,)}, self._classes) for device in devices]
        self.largest = max(map(granted_bytes, self.alone), default=0)
        self._least = list(accumulate(sorted([info_bytes(told.infos[resource][0]) for told in self.alone]), initial=0))
        self.places: dict[str, list[int]] = {}
        self.free: list[int] = []
        healthy = Health.HEALTHY
        for position, (name, device) in enumerate(zip(self.names, devices, strict=True)):
            self.places.setdefault(name, []).append(position)
            if device.health == healthy and host_state.unused(name):
                self.free.append(-position)
        self.free.reverse()
        self.repeats = len(self.places) < len(devices)

    def serves(self, name: str) -> bool:
        """Whether the device of that name is healthy here."""
        return any(self.devices[position].health == Health.HEALTHY for position in self.places.get(name, ()))

    def least_bytes(self, amount: int) -> int:
        """What a grant of `amount` devices takes at least, as far as there are so many."""
        return self._least[min(amount, len(self.devices))]

    def offer(self, amount: int) -> tuple[GrantInfos, list[str]] | None:
        """The grant infos and the canonical names of the free devices that the driver prefers; None: too few."""
        free = self.free
        if amount > len(free):
            return None
        if amount == 1:
            position = -free[-1]
            return self.alone[position], [self.names[position]]
        return self._together(self._first(amount))

    def _together(self, positions: list[int]) -> tuple[GrantInfos, list[str]]:
        told = grant_infos({self.resource: [self.devices[position] for position in positions]}, self._classes)
        return told, [self.names[position] for position in positions]

    def _first(self, enough: int) -> list[int]:
        """The positions of the free devices that the driver prefers, at most `enough`."""
        return [-position for position in self.free[: -enough - 1 : -1]]

    def pop(self, amount: int) -> None:
        """Take the free devices that the driver prefers: those of `offer`."""
        del self.free[len(self.free) - amount :]  # -amount would be the whole of it where that is none

    def take(self, name: str) -> None:
        free = self.free
        for position in self.places[name]:
            if free and free[-1] == -position:  # nearly always: the preferred one
                free.pop()
                continue
            at = bisect_left(free, -position)
            if at < len(free) and free[at] == -position:
                del free[at]

    def put_back(self, name: str) -> None:
        free = self.free
        for position in self.places[name]:
            at = bisect_left(free, -position)
            if self.devices[position].health == Health.HEALTHY and free[at : at + 1] != [-position]:
                free.insert(at, -position)


class HostState:
    """One host's records and indexes.

    `shelves` are by resource, `shown` by device; `distinct`: no device is shown more than once, and `overlapping` are
    the resources of which that can not be said. `live` are the records that hold devices, `without` counts those of
    them that have none to themselves. `locks` and `sharers` count by canonical name how many live records have a device
    to themselves and together with others. `suspects` are the keys of those that have
    devices held back in some inventory.

    `queue` has every pending record in order, and `waiting` the same by each resource that they want. `claims` are
    those of them that were told that what they want is busy: whoever comes later has to leave it to them. `unanswered`
    are those that wait for a driver's answer. `scan_from` is the first of those who have not been looked at since a
    driver said something that may concern them (None: all have). `deadlines` is when those give up who do not wait for
    ever, nor for a driver's answer, and `waiting_since` since when those have waited that do not wait for ever.

    `incarnations` are all that are remembered of each worker, the newest last. `endings` are the records that are over,
    `past` the same by worker, those that ended first first, whatever the clock did meanwhile. `classes` says which
    names mean one device.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.record: Host | None = None
        self.inventories: dict[str, Inventory] = {}
        self.suspects: frozenset[str] = frozenset()
        self.shelves: dict[str, FreeList] = {}
        self.shown: dict[str, tuple[FreeList, ...]] = {}
        self.distinct = True
        self.overlapping: frozenset[str] = frozenset()
        self.live: dict[str, Allocation] = {}
        self.without = 0
        self.locks = Tally()
        self.sharers = Tally()
        self.queue: list[QueueEntry] = []
        self.waiting: dict[str, list[QueueEntry]] = {}
        self.claims: dict[str, list[QueueEntry]] = {}
        self.unanswered: dict[str, list[QueueEntry]] = {}
        self.scan_from: QueueEntry | None = None
        self.deadlines: list[tuple[datetime, str]] = []
        self.waiting_since: list[tuple[datetime, str]] = []
        self.incarnations: dict[str, list[Run]] = {}
        self.past: dict[str, list[Ending]] = {}
        self.endings: list[Ending] = []
        self.classes: Classes = NO_CLASSES
        self._same: dict[str, str] = {}
        self._counts: dict[bool, dict[Viewers, int]] = {}

    def inventory(self, resource: str) -> Inventory:
        return self.inventories.get(resource, NOT_REPORTED)

    def canonical(self, name: str) -> str:
        """One name for all under which a device is known in any of the host's inventories."""
        return self._same.get(name, name)

    @property
    def synonyms(self) -> Mapping[str, str]:
        """What `canonical` looks up: another object whenever it has changed."""
        return self._same

    @property
    def shows_what_is_held(self) -> bool:
        """Whether drivers report every device that some record holds."""
        shown = self.shown.keys()
        return self.locks.keys() <= shown and self.sharers.keys() <= shown

    def names(self, record: Allocation, ids: list[str]) -> list[str]:
        """The canonical names of a record's devices; several for one that no inventory connects (yet)."""
        same = self._same
        aliases = record.aliases
        if aliases is UNSET:
            if not same:
                return ids
            return [same.get(device_id, device_id) for device_id in ids]
        return [
            name
            for device_id in ids
            for name in {same.get(other, other) for other in (device_id, *aliases.get(device_id, ()))}
        ]

    def unused(self, name: str) -> bool:
        """Nobody has the device, alone or together with others. `name` is canonical."""
        return name not in self.locks and name not in self.sharers

    def has_due(self, *, now: datetime, over_before: datetime, max_over: int) -> bool:
        """Whether somebody has waited too long by `now`, is over since before `over_before`, or more than `max_over`
        are over."""
        if self.over > max_over or (self.deadlines and self.deadlines[0][0] <= now) or self.scan_from is not None:
            return True
        return (bool(self.endings) and self.endings[0][0] < over_before) or self.is_ahead(now)

    @property
    def over(self) -> int:
        """How many of the host's records are over."""
        return len(self.endings)

    def is_ahead(self, now: datetime) -> bool:
        """Whether something that time is counted from is said to have begun later than now: the clock was set back."""
        limit = now + CLOCK_SLACK
        return (
            (bool(self.endings) and self.endings[-1][0] > limit)
            or (bool(self.waiting_since) and self.waiting_since[-1][0] > limit)
            or (self.record is not None and self.record.since > limit)
        )

    def ahead(self, now: datetime, most: int) -> list[str]:
        """The keys of the records that are said to be over, or to wait, since later than now; at most `most`."""
        limit = now + CLOCK_SLACK
        keys: list[str] = []
        for known in (self.endings, self.waiting_since):
            for since, key in reversed(known):
                if since <= limit or len(keys) >= most:
                    break
                keys.append(key)
        return keys

    def is_idle(self, *, since: datetime) -> bool:
        """Whether nobody is remembered here, and nothing has been said of the host since then."""
        return not self.incarnations and self.record is not None and self.record.since < since

    # --- inventories ---

    def set_inventory(self, resource: str, inventory: Inventory) -> None:
        before, connected = self.inventory(resource), self.connected(resource)
        if inventory == NOT_REPORTED:
            self.inventories.pop(resource, None)
        else:
            self.inventories[resource] = inventory
        self.suspects = frozenset([one.suspect.key for one in self.inventories.values() if one.suspect is not None])
        if (
            inventory.devices is before.devices
            and inventory.linked == before.linked
            and (inventory.reported == before.reported)
        ):
            return
        if connected or self.connected(resource):
            self._rename()
            return
        if inventory.devices:
            self.shelves[resource] = FreeList(resource, inventory.devices, self)
        else:
            self.shelves.pop(resource, None)
        self._show()

    def connected(self, resource: str) -> Sequence[Sequence[str]]:
        """The names that mean one device according to one resource, device by device: what its driver says or, until
        it has said anything, what the host's record has of it."""
        inventory = self.inventory(resource)
        if inventory.reported or self.record is None:
            return inventory.names
        told = self.record.resources.get(resource)
        if told is None or told.names is UNSET:
            return inventory.linked
        return [*inventory.linked, *told.names]

    def set_record(self, record: Host | None) -> Host | None:
        """Put another record of the host; the one before is returned."""
        before, known = self.record, self._remembered()
        self.record = record
        if self._remembered() != known:
            self._rename()
        return before

    def _remembered(self) -> list[list[list[str]]]:
        """The names that the host's record has of resources whose drivers have not reported yet."""
        resources = self.record.resources if self.record is not None else {}
        return [
            told.names
            for resource, told in resources.items()
            if told.names is not UNSET and not self.inventory(resource).reported
        ]

    def _rename(self) -> None:
        """Aliases have changed, in whatever resource: work out anew which names mean one device."""
        resources = {**self.inventories, **(self.record.resources if self.record is not None else {})}
        groups = [names for resource in resources for names in self.connected(resource)]
        self._same, self.classes = one_name_each(groups)
        self.locks = Tally()
        self.sharers = Tally()
        for record in self.live.values():
            for name in self.names(record, exclusive_ids(record)):
                self.locks.add(name, 1)
            for name in self.names(record, shared_ids(record)):
                self.sharers.add(name, 1)
        self.shelves = {
            resource: FreeList(resource, inventory.devices, self)
            for resource, inventory in self.inventories.items()
            if inventory.devices
        }
        self._show()

    def _show(self) -> None:
        """Work out anew which free lists show a device: one for nearly all of them."""
        self.shown = {}
        for free_list in self.shelves.values():
            alone = (free_list,)
            for name in free_list.places:
                others = self.shown.get(name)
                self.shown[name] = (*others, free_list) if others else alone
        self.distinct = len(self.shown) == sum(len(free_list.devices) for free_list in self.shelves.values())
        self.overlapping = frozenset()
        self._counts = {}
        if not self.distinct:
            several = {
                free_list.resource for shelves in self.shown.values() if len(shelves) > 1 for free_list in shelves
            }
            self.overlapping = frozenset(
                several | {name for name, free_list in self.shelves.items() if free_list.repeats}
            )

    def device_counts(self, *, healthy: bool) -> Mapping[Viewers, int]:
        """How many devices there are that the same resources show, or show as healthy."""
        found = self._counts.get(healthy)
        if found is None:
            found = self._counts[healthy] = counts(
                tuple([free_list.resource for free_list in shelves if not healthy or free_list.serves(name)])
                for name, shelves in self.shown.items()
            )
        return found

    # --- records ---

    def newest(self, worker: str) -> str | None:
        """The key of a worker's newest incarnation, of those that are remembered."""
        incarnations = self.incarnations.get(worker)
        return incarnations[-1][1] if incarnations else None

    def index(self, key: str, record: Allocation) -> None:
        """Take in a record that is new or was taken out before."""
        run = (record.source.offset, key)
        known = self.incarnations.get(record.worker)
        if known is None:
            self.incarnations[record.worker] = [run]
        else:
            place = bisect_left(known, run)
            if place == len(known) or known[place] != run:
                known.insert(place, run)
        state = record.state
        if state in HOLDING_STATES:
            self.live[key] = record
            self._hold(record, 1)
        elif state == PENDING:
            entry = queue_entry(record)
            insort(self.queue, entry)
            for index in self._indexes_of(record):
                for resource in record.request.amounts:
                    insort(index.setdefault(resource, []), entry)
            if record.wait_until is not None:
                if record.reason_code != ReasonCode.NOT_REPORTED:
                    insort(self.deadlines, (record.wait_until, key))
                insort(self.waiting_since, (record.since, key))
        elif state in FINAL_STATES:
            ending = (record.since, key)
            insort(self.endings, ending)
            insort(self.past.setdefault(record.worker, []), ending)

    def grant(self, key: str, record: Allocation, names: list[str]) -> None:
        """Take in the first record of a worker, which has to itself what its resource's free list has offered.

        These are the devices `names`, a name more than once where it stands for several of them.
        """
        self.incarnations[record.worker] = [(record.source.offset, key)]
        self.live[key] = record
        if not names:
            self.without += 1
        locks, shown = self.locks, self.shown
        if self.distinct:
            # what is free is in no other index: to look there takes longer the more devices there are
            for name in names:
                locks[name] = 1
            for resource in record.resources:
                self.shelves[resource].pop(len(names))
            return
        for name in names:
            locks[name] = locks.get(name, 0) + 1
            for free_list in shown.get(name, ()):
                free_list.take(name)

    def unindex(self, key: str, record: Allocation) -> None:
        """Take out what `index` put in, but for the worker's incarnations: those stay until `forget`."""
        state = record.state
        if state in HOLDING_STATES:
            del self.live[key]
            self._hold(record, -1)
        elif state == PENDING:
            entry = queue_entry(record)
            del self.queue[bisect_left(self.queue, entry)]
            for index in self._indexes_of(record):
                for resource in record.request.amounts:
                    entries = index[resource]
                    del entries[bisect_left(entries, entry)]
                    if not entries:
                        del index[resource]
            if record.wait_until is not None:
                if record.reason_code != ReasonCode.NOT_REPORTED:
                    del self.deadlines[bisect_left(self.deadlines, (record.wait_until, key))]
                del self.waiting_since[bisect_left(self.waiting_since, (record.since, key))]
        elif state in FINAL_STATES:
            ending = (record.since, key)
            del self.endings[bisect_left(self.endings, ending)]
            past = self.past[record.worker]
            del past[bisect_left(past, ending)]
            if not past:
                del self.past[record.worker]

    def _indexes_of(self, record: Allocation) -> Iterable[dict[str, list[QueueEntry]]]:
        """The indexes by resource that a pending record is in."""
        if record.reason_code == ReasonCode.BUSY:
            return self.waiting, self.claims
        return (self.waiting, self.unanswered) if record.reason_code == ReasonCode.NOT_REPORTED else (self.waiting,)

    def forget(self, key: str, record: Allocation) -> None:
        """The record is gone altogether."""
        runs = self.incarnations[record.worker]
        del runs[bisect_left(runs, (record.source.offset, key))]
        if not runs:
            del self.incarnations[record.worker]

    def _hold(self, record: Allocation, count: int) -> None:
        """A record's devices are held from here on (1), or no longer (-1)."""
        alone = exclusive_ids(record)
        if alone:
            self._count(self.locks, self.names(record, alone), count)
        else:
            self.without += count
        if record.shared:
            self._count(self.sharers, self.names(record, shared_ids(record)), count)

    def _count(self, tally: Tally, names: list[str], count: int) -> None:
        for name in names:
            used = tally.add(name, count) or name in self.locks or name in self.sharers
            for free_list in self.shown.get(name, ()):
                if used:
                    free_list.take(name)
                else:
                    free_list.put_back(name)


def one_name_each(groups: Iterable[Sequence[str]]) -> tuple[dict[str, str], Classes]:
    """What names that share a group mean, directly or through others: the least of each class by all others of it,
    and the whole class by each of its names."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while (above := parent.setdefault(name, name)) != name:
            parent[name] = parent.setdefault(above, above)
            name = parent[name]
        return name

    for first, *others in groups:
        for other in others:
            one, two = sorted((root(first), root(other)))
            parent[two] = one
    members: dict[str, list[str]] = {}
    for name in sorted(parent):
        members.setdefault(root(name), []).append(name)
    same: dict[str, str] = {}
    classes: dict[str, tuple[str, ...]] = {}
    for top, names in members.items():
        if len(names) > 1:
            whole = tuple(names)
            for name in names:
                classes[name] = whole
                if name != top:
                    same[name] = top
    return same, classes

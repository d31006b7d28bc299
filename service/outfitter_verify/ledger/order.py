"""Promise 6 and the queue: granted devices were reported and healthy, and used by no process to which they were not
lent; no worker overtakes an earlier one that waits for the same resource, and no worker waits for free devices.

A commit writes a host's record at most once, with its drivers' devices. If it changed in the commit of a grant, the
record before or after must have the device, because states in between are invisible. A waiter counts if it is `busy`:
its request could be served if others held no devices. If its record is older than the devices' states, it proves
nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from outfitter_verify import wire
from outfitter_verify.ledger import choices
from outfitter_verify.ledger.devices import Holdings, Links
from outfitter_verify.ledger.writers import Commits, Written
from outfitter_verify.logs import Log
from outfitter_verify.report import Findings
from outfitter_verify.wire import Allocation, Checkpoint, HostInventory

QueueEntry = tuple[int, int, str]
"""(-priority, number of the first registration, key): the queue's order."""

SERVED_WITHIN = 5
"""Most commits from a free device until the first worker in the queue has it."""


@dataclass(slots=True)
class HostQueue:
    """One host at one prefix of the ledger."""

    inventories: Mapping[str, HostInventory] = field(default_factory=dict)
    """The resources in its newest record, which is at `offset`."""
    before: Mapping[str, HostInventory] | None = None
    """Those of the record before the current commit (None: the same), which is at `earlier`."""
    offset: int = -1
    earlier: int = -1
    waiting: dict[str, list[QueueEntry]] = field(default_factory=dict)
    """The busy waiters by resource, in the queue's order."""
    placed: dict[str, tuple[QueueEntry, tuple[str, ...]]] = field(default_factory=dict)
    """By a waiter's key, its entry and the resources in whose queues it stands."""
    changed: int = 0
    """The number of the last commit with a change."""

    def update(self, offset: int, inventories: Mapping[str, HostInventory]) -> None:
        """Set the record that the current commit has written."""
        self.before, self.inventories = self.inventories, inventories
        self.earlier, self.offset = self.offset, offset

    def end_commit(self, number: int) -> None:
        """End a commit that has changed this host."""
        self.changed, self.before = number, None

    def enqueue(self, entry: QueueEntry, resources: Collection[str]) -> None:
        """Add a busy waiter to the queues of these resources."""
        self.placed[entry[2]] = entry, tuple(resources)
        for resource in resources:
            insort(self.waiting.setdefault(resource, []), entry)

    def dequeue(self, key: str) -> None:
        """Remove a waiter, if it is there."""
        entry, resources = self.placed.pop(key, ((0, 0, ""), ()))
        for resource in resources:
            self.waiting[resource].remove(entry)

    def showing(self, device: str) -> list[str]:
        """The resources whose drivers report a device as healthy, under any of its names, or a part of it, or a device
        that it is a part of."""
        reported = {name: inventory for name, inventory in self.inventories.items() if inventory.state == "reported"}
        links = Links(reported.values())
        own = links.all_names(frozenset({device}))
        names = own | links.wholes(own) | links.parts(own)
        return [name for name, inventory in reported.items() if any(map(inventory.healthy.get, names))]

    def inventories_of(self, resource: str) -> list[HostInventory]:
        """A resource's inventories before and after the current commit."""
        inventories = [self.inventories.get(resource), (self.before or {}).get(resource)]
        return [inventory for inventory in inventories if inventory is not None]


class Order:
    """All hosts of one partition, commit by commit. Its methods take `now`, the newest record of each key."""

    def __init__(self, log: Log, commits: Commits, findings: Findings) -> None:
        self._log = log
        self._commits = commits
        self._findings = findings
        self._hosts: dict[str, HostQueue] = {}
        self._updated: list[HostQueue] = []

    def host(self, offset: int, name: str, inventories: Mapping[str, HostInventory]) -> None:
        """Add a host's record, of the commit whose checkpoint follows."""
        host = self._host(name)
        host.update(offset, inventories)
        self._updated.append(host)

    def commit(self, now: Mapping[str, Written], commit: Checkpoint, records: list[Written]) -> None:
        """Check a commit's allocation records. Moved records were granted elsewhere."""
        for written in records:
            was = written.before
            is_new = not written.repeat and (was is None or was.record.state == "pending")
            if not commit.moved and is_new and written.record.holds:
                self._granted(now, written)
        for written in records:
            if now.get(written.record.key) is not None:
                self._update_queue(written)
        for host in [*self._updated, *(self._host(written.record.host) for written in records if not written.repeat)]:
            host.end_commit(commit.commit)
        self._updated.clear()

    def delete(self, record: Allocation) -> None:
        """Remove a record."""
        self._host(record.host).dequeue(record.key)

    def _wrong(self, check: str, offset: int, what: str, *records: object) -> None:
        self._findings.wrong(check, self._log.place(offset), what, *records)

    def _host(self, name: str) -> HostQueue:
        return self._hosts.setdefault(name, HostQueue())

    def _update_queue(self, written: Written) -> None:
        """Add a record to its host's queue, or remove it from there."""
        record = written.record
        host = self._host(record.host)
        host.dequeue(record.key)
        if record.state != "pending" or record.reason_code != "busy":
            return
        amounts = record.request.amounts
        if any(inventory.on_demand for resource in amounts for inventory in host.inventories_of(resource)):
            return  # during the driver's call it is not busy, but its record does not show that
        entry = (-record.request.priority, record.source, record.key)
        exclusive = [name for name in amounts if all(inventory.exclusive for inventory in host.inventories_of(name))]
        host.enqueue(entry, exclusive)

    # --- at a grant ------------------------------------------------------------------------------------

    def _granted(self, now: Mapping[str, Written], written: Written) -> None:
        record = written.record
        host = self._host(record.host)
        granted = wire.devices(record.body)
        if not granted:
            return
        # host records come after grants in a commit
        record_before = host.offset if host.offset < written.offset else host.earlier
        if host.offset < 0 or not self._commits.in_the_open(record.writer, record_before, written.offset):
            self._findings.note_partial("inventory", "the host's record was compacted away, or is missing")
            return
        for resource, devices in granted.items():
            for device in devices:
                self._reported(written, host, resource, device)
        if host.before is None:
            self._findings.count("queue")
            for earlier, resource in self._overtaken(now, written, host, granted):
                what = f"{record.key} gets {resource}, but {earlier.record.key} waits for it and comes before"
                self._wrong("queue", written.offset, what, self._log.place(earlier.offset))

    def _reported(self, written: Written, host: HostQueue, resource: str, device: str) -> None:
        self._findings.count("inventory")
        inventories = host.inventories_of(resource)
        if any(inventory.healthy.get(device) and device not in inventory.used for inventory in inventories):
            return
        if host.before is not None:
            self._findings.note_partial("inventory", "the inventory changed in the commit of a grant")
        elif any(device not in inventory.healthy and not inventory.whole for inventory in inventories):
            self._findings.note_partial("inventory", "a host has more devices than its record lists")
        else:
            is_known = any(device in inventory.healthy for inventory in inventories)
            is_used = any(device in inventory.used for inventory in inventories)
            how = "a stranger uses" if is_used else "is not healthy" if is_known else "was not reported"
            what = f"{written.record.key} gets {device} of {resource}, which {how}"
            self._wrong("inventory", written.offset, what, self._log.place(host.offset))

    def _overtaken(
        self, now: Mapping[str, Written], written: Written, host: HostQueue, granted: Mapping[str, list[str]]
    ) -> Iterator[tuple[Written, str]]:
        """The first earlier waiter for a resource of this grant, or for another resource with one of its devices, that
        still waits."""
        record = written.record
        own = (-record.request.priority, record.source, record.key)
        for resource in self._concerned(host, granted):
            if not all(inventory.exclusive for inventory in host.inventories_of(resource)):
                continue  # sharers do not block each other
            for entry in host.waiting.get(resource, ()):
                if entry >= own:
                    break
                earlier = now.get(entry[2])
                if earlier is None or earlier.record.state != "pending" or earlier.record.reason_code != "busy":
                    continue  # it is served, gone, or waits for another reason by now
                if not choices.could_take(earlier.record, resource, record):
                    continue
                if earlier.offset > host.offset:
                    yield earlier, resource
                    return

    def _concerned(self, host: HostQueue, granted: Mapping[str, list[str]]) -> list[str]:
        """The resources with waiters, among those of a grant and others with its devices."""
        if not host.waiting.keys() - granted.keys():
            return [*granted]
        shown = {resource for devices in granted.values() for device in devices for resource in host.showing(device)}
        return sorted(shown | granted.keys())

    # --- at the end ------------------------------------------------------------------------------------

    def finish(
        self, now: Mapping[str, Written], holdings: Holdings, takes_out: Callable[[str, str, str], bool]
    ) -> None:
        """Check that no first worker in a host's queue waits for devices that were free for some commits. `holdings`:
        what is used of them. `takes_out`: whether an order takes out a host's device, of this resource."""
        for name, host in self._hosts.items():
            waiting = [entry for entry, _ in host.placed.values() if entry[2] in now]
            if not waiting:
                continue  # no worker waits, or it was moved to another partition
            _, _, key = min(waiting)
            waiter = now[key]
            writer = self._commits.writers.get(waiter.record.writer)
            if writer is None or writer.last is None or writer.last.commit < host.changed + SERVED_WITHIN:
                continue
            if waiter.offset > host.offset and _could_have_it(host, waiter, holdings, partial(takes_out, name)):
                self._wrong("queue", waiter.offset, f"{key} waits for free devices", self._log.place(host.offset))


def _could_have_it(host: HostQueue, waiter: Written, holdings: Holdings, takes_out: Callable[[str, str], bool]) -> bool:
    """Whether the whole request is surely free, healthy, and taken out by no order. No device counts twice.

    Never while the record lacks names: a manager of version 0.2 lent nothing until their driver had reported."""
    if any(inventory.names_left_out for inventory in host.inventories.values()):
        return False
    record, host_name = waiter.record, waiter.record.host
    if not choices.is_known(record):
        return False
    taken: set[str] = set()
    links, held = Links(host.inventories.values()), holdings.held(host_name)
    for resource, amount in record.request.amounts.items():
        inventory = host.inventories.get(resource)
        if inventory is None or inventory.state != "reported" or inventory.on_demand:
            return False
        out = inventory.cordoned | inventory.used
        free: dict[str, frozenset[str]] = {}
        for device in [device for device, healthy in inventory.healthy.items() if healthy and device not in out]:
            names = inventory.names(device)
            is_held = not names.isdisjoint(held)
            if takes_out(resource, device) or (
                is_held and not holdings.has_replica(host_name, names, inventory.replicas)
            ):
                continue
            wholes = links.wholes(names)  # a whole and its part count for one
            if (names | wholes).isdisjoint(taken) and not (is_held and wholes):
                free[device] = names | wholes
        choice = record.request.choices.get(resource)
        if choice is not None:
            wanted = choice if amount > 1 else choice._replace(same=())
            free = {name: free[name] for name in choices.largest(wanted, free, inventory.properties)}
        if len(free) < amount:
            return False
        taken.update(*free.values())
    return True

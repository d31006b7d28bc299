"""Promise 6 and the queue: what is granted was reported and healthy, nobody is served before an earlier worker that
waits for the same, and nobody waits for what is free.

A host's record tells what its drivers found, once for each commit. Where it changed in the commit of a grant, one of
the two must have the device; what was in between cannot be seen. A waiter counts if it is `busy`: all it wants could be
served if others had not got it. Its record may be older than what is known of the devices; then it says nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outfitter_verify import wire
from outfitter_verify.report import Findings
from outfitter_verify.wire import Allocation, Checkpoint, Inventory
from outfitter_verify.writers import Written

if TYPE_CHECKING:
    from outfitter_verify.ledger import Ledger

Place = tuple[int, int, str]
"""(-priority, number of the first registration, key): the queue's order."""

SETTLED = 5
"""So many commits after a device became free, whoever is first in the queue for it has it."""


@dataclass(slots=True)
class Host:
    """One host at one prefix of the ledger: what its record says, and said `before` the commit that is looked at (None:
    the same); where that record stands (`offset`) and the `earlier` one stood; who waits, busy, for what; the number of
    the last commit that changed anything.
    """

    inventories: Mapping[str, Inventory] = field(default_factory=dict)
    before: Mapping[str, Inventory] | None = None
    offset: int = -1
    earlier: int = -1
    waiting: dict[str, list[Place]] = field(default_factory=dict)
    placed: dict[str, tuple[Place, tuple[str, ...]]] = field(default_factory=dict)
    changed: int = 0

    def showing(self, device: str) -> list[str]:
        """The resources whose drivers show a device, healthy, under any of the names that they have for it."""
        told = {name: inventory for name, inventory in self.inventories.items() if inventory.state == "reported"}
        names = {device}
        groups = [group for inventory in told.values() for group in inventory.connected]
        while more := [group for group in groups if not group.isdisjoint(names) and not group <= names]:
            names.update(*more)
        return [name for name, inventory in told.items() if any(map(inventory.healthy.get, names))]

    def telling(self, resource: str) -> list[Inventory]:
        """What is said of a resource before and after the commit that is looked at."""
        told = [self.inventories.get(resource), (self.before or {}).get(resource)]
        return [inventory for inventory in told if inventory is not None]


class Order:
    """All hosts of one partition, commit by commit."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._hosts: dict[str, Host] = {}
        self._told: list[Host] = []

    def host(self, offset: int, name: str, inventories: Mapping[str, Inventory]) -> None:
        """A host's record: of the commit whose checkpoint follows."""
        host = self._host(name)
        host.before, host.inventories = host.inventories, inventories
        host.earlier, host.offset = host.offset, offset
        self._told.append(host)

    def commit(self, ledger: Ledger, commit: Checkpoint, records: list[Written]) -> None:
        """The allocation records of a commit. What was moved was granted elsewhere."""
        for written in records:
            was = written.before
            is_new = not written.repeat and (was is None or was.record.state == "pending")
            if not commit.moved and is_new and written.record.holds:
                self._granted(ledger, written)
        for written in records:
            if ledger.now.get(written.record.key) is not None:
                self._place(written)
        for host in [*self._told, *(self._host(written.record.host) for written in records if not written.repeat)]:
            host.changed, host.before = commit.commit, None
        self._told.clear()

    def delete(self, record: Allocation) -> None:
        """A record is there no more."""
        self._unplace(self._host(record.host), record.key)

    def _host(self, name: str) -> Host:
        return self._hosts.setdefault(name, Host())

    def _place(self, written: Written) -> None:
        """Put a record in its host's queue, or out of it."""
        record = written.record
        host = self._host(record.host)
        self._unplace(host, record.key)
        if record.state != "pending" or record.reason_code != "busy":
            return
        amounts = record.request.amounts
        if any(inventory.on_demand for resource in amounts for inventory in host.telling(resource)):
            return  # while its driver is asked it is not busy, and its record does not say so
        place = (-record.request.priority, record.source, record.key)
        exclusive = [name for name in amounts if all(each.exclusive for each in host.telling(name))]
        host.placed[record.key] = place, tuple(exclusive)
        for resource in exclusive:
            insort(host.waiting.setdefault(resource, []), place)

    @staticmethod
    def _unplace(host: Host, key: str) -> None:
        place, resources = host.placed.pop(key, ((0, 0, ""), ()))
        for resource in resources:
            host.waiting[resource].remove(place)

    # --- at a grant ------------------------------------------------------------------------------------

    def _granted(self, ledger: Ledger, written: Written) -> None:
        record = written.record
        host = self._host(record.host)
        granted = wire.devices(record.body)
        if not granted:
            return
        known = host.offset if host.offset < written.offset else host.earlier  # a commit's host records come last
        if host.offset < 0 or not ledger.commits.in_the_open(record.writer, known, written.offset):
            self._findings.part("inventory", "the host's record was compacted away, or is missing")
            return
        for resource, devices in granted.items():
            for device in devices:
                self._reported(ledger, written, host, resource, device)
        if host.before is None:
            self._findings.look("queue")
            for earlier, resource in self._overtaken(ledger, written, host, granted):
                what = f"{record.key} gets {resource}, and {earlier.record.key} waits for it and comes before"
                ledger.wrong("queue", written.offset, what, ledger.log.place(earlier.offset))

    def _reported(self, ledger: Ledger, written: Written, host: Host, resource: str, device: str) -> None:
        self._findings.look("inventory")
        told = host.telling(resource)
        if any(inventory.healthy.get(device) for inventory in told):
            return
        if host.before is not None:
            self._findings.part("inventory", "the inventory changed in the commit of a grant")
        elif any(device not in inventory.healthy and not inventory.whole for inventory in told):
            self._findings.part("inventory", "a host has more devices than its record lists")
        else:
            how = "is not healthy" if any(device in inventory.healthy for inventory in told) else "was not reported"
            what = f"{written.record.key} gets {device} of {resource}, which {how}"
            ledger.wrong("inventory", written.offset, what, ledger.log.place(host.offset))

    def _overtaken(
        self, ledger: Ledger, written: Written, host: Host, granted: Mapping[str, list[str]]
    ) -> Iterator[tuple[Written, str]]:
        """The first who waited for a resource of this grant, or for another one that shows a device of it, came before,
        and waits still."""
        record = written.record
        own = (-record.request.priority, record.source, record.key)
        for resource in self._concerned(host, granted):
            if not all(inventory.exclusive for inventory in host.telling(resource)):
                continue  # sharers are in no sharer's way, and it is since they wait that they share
            for place in host.waiting.get(resource, ()):
                if place >= own:
                    break
                earlier = ledger.now.get(place[2])
                if earlier is None or earlier.record.state != "pending" or earlier.record.reason_code != "busy":
                    continue  # served, gone or in other trouble since
                if earlier.offset > host.offset:
                    yield earlier, resource
                    return

    def _concerned(self, host: Host, granted: Mapping[str, list[str]]) -> list[str]:
        """The resources of a grant, and others that show its devices, where anybody waits for them."""
        if not host.waiting.keys() - granted.keys():
            return [*granted]
        shown = {resource for devices in granted.values() for device in devices for resource in host.showing(device)}
        return sorted(shown | granted.keys())

    # --- at the end ------------------------------------------------------------------------------------

    def finish(self, ledger: Ledger) -> None:
        """Whoever is first in a host's queue has what has been free for some commits."""
        for name, host in self._hosts.items():
            waiting = [place for place, _ in host.placed.values() if place[2] in ledger.now]
            if not waiting:
                continue  # nobody waits, or whoever did was moved to another partition
            _, _, key = min(waiting)
            waiter = ledger.now[key]
            writer = ledger.commits.writers.get(waiter.record.writer)
            if writer is None or writer.last is None or writer.last.commit < host.changed + SETTLED:
                continue
            if waiter.offset > host.offset and _could_have_it(host, waiter, ledger.held(name)):
                ledger.wrong("queue", waiter.offset, f"{key} waits for what is free", ledger.log.place(host.offset))


def _could_have_it(host: Host, waiter: Written, held: Collection[str]) -> bool:
    """All that it wants is healthy and nobody's, and no device stands for two of its resources."""
    taken: set[str] = set()
    for resource, amount in waiter.record.request.amounts.items():
        inventory = host.inventories.get(resource)
        if inventory is None or inventory.state != "reported" or inventory.on_demand:
            return False
        free = [inventory.names(device) for device, healthy in inventory.healthy.items() if healthy]
        free = [names for names in free if names.isdisjoint(held) and names.isdisjoint(taken)]
        if len(free) < amount:
            return False
        taken.update(*free)
    return True

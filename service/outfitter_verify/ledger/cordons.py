"""Operators' orders: nothing is granted that an order takes out, and an order that was read is in effect until it ends.

An order in effect is a record of the ledger. A commit shows only the last of what it decided, so a grant is judged by
the orders that are in effect before its commit and after it. The topic of orders says what should be in effect. How far
a manager has read it stands in the checkpoints. Where that position moves, just the orders before it are in effect: all
that was read is decided by then, and nothing behind it was read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outfitter_verify import wire
from outfitter_verify.ledger.writers import Commits, VisibleCommit, Written
from outfitter_verify.logs import Control, Log
from outfitter_verify.report import Findings
from outfitter_verify.wire import Checkpoint, Cordon, CordonOrder, HostInventory

NEEDED = "orders"
"""What a manager must know to work on a ledger that has had an order in effect."""
SERVED_WITHIN = 5
"""Most commits from a host's first record until its orders are in effect."""
ROUNDED_MS = 1
"""Times are rounded to milliseconds."""


class Placed(NamedTuple):
    """An order in effect, and its place in the ledger."""

    offset: int
    cordon: Cordon


class Version(NamedTuple):
    """One record of an order. None: a tombstone, or what managers do not understand."""

    offset: int
    order: CordonOrder | None


class Suspicion(NamedTuple):
    """A violation, unless compaction has hidden commits of `writer` between two offsets.

    `key`: of the order in the ledger. `after` -1: that it is missing is certain at the writer's end as well. Otherwise
    it stands there, which is certain unless a later record has replaced it.
    """

    offset: int
    what: str
    records: tuple[object, ...]
    writer: str
    after: int
    key: str


@dataclass(slots=True)
class CordonedHost:
    """One host at one prefix of the ledger: the resources in its newest record, and in the one before the current
    commit (None: the same)."""

    inventories: Mapping[str, HostInventory] = field(default_factory=dict)
    before: Mapping[str, HostInventory] | None = None
    since: dict[str, int] = field(default_factory=dict)
    """By writer: a commit in which it had a record."""

    def has_record(self, writer: str, number: int) -> None:
        """In a writer's commit of this number it had a record."""
        self.since[writer] = min(number, self.since.get(writer, number))

    def names_of(self, device: str, aliases: list[str], *, before: bool) -> frozenset[str]:
        """All names of a device, by the record before the current commit or after it."""
        names = frozenset({device, *aliases})
        inventories = self._inventories(before=before)
        groups = [group for each in inventories.values() for group in each.connected]
        while more := [group for group in groups if not group.isdisjoint(names) and not group <= names]:
            names = names.union(*more)
        return names

    def takes_out(self, cordon: Cordon, resource: str, names: frozenset[str], *, before: bool = False) -> bool:
        """Whether an order applies to a device with these names, as a device of this resource."""
        if cordon.device is not None:
            return cordon.device in names
        if cordon.resource in (None, resource):
            return True
        inventory = self._inventories(before=before).get(cordon.resource or "")
        return inventory is not None and not names.isdisjoint(inventory.healthy)

    def _inventories(self, *, before: bool) -> Mapping[str, HostInventory]:
        return self.before if before and self.before is not None else self.inventories


class Cordons:
    """All orders to the hosts of one partition, commit by commit."""

    def __init__(self, log: Log, commits: Commits, control: Control, findings: Findings) -> None:
        self._log = log
        self._commits = commits
        self._control = control
        self._findings = findings
        self._hosts: defaultdict[str, CordonedHost] = defaultdict(CordonedHost)
        self._updated: set[str] = set()
        self._now: dict[str, Placed] = {}
        self._changed: dict[str, Placed | None] = {}
        """Of each key that the current commit has changed: what was there before."""
        self._last: dict[str, int] = {}
        """Each key's last place."""
        self._latest_ms: dict[str, int] = {}
        """The latest time of each writer's commits."""
        self._suspicions: dict[Suspicion, None] = {}
        self._versions = self._read()

    def _read(self) -> dict[str, list[Version]]:
        """The versions of each order in the topic, by its id."""
        versions: defaultdict[str, list[Version]] = defaultdict(list)
        log = self._control.log
        for record in log.records if log is not None else ():
            name = (record.key or b"").decode("utf-8", "replace")
            try:
                order = wire.cordon_order(wire.parse(record.value), name) if record.value is not None else None
            except (wire.DamagedError, AttributeError, RecursionError):
                order = None
            versions[name].append(Version(record.offset, order))
        return versions

    # --- record by record ---

    def host(self, name: str, inventories: Mapping[str, HostInventory]) -> None:
        """Add a host's record, of the commit whose checkpoint follows."""
        host = self._hosts[name]
        if name not in self._updated:
            host.before = host.inventories
        host.inventories = inventories
        self._updated.add(name)

    def put(self, offset: int, cordon: Cordon) -> None:
        """Add an order in effect, of the commit whose checkpoint follows."""
        self._change(offset, cordon.key)
        self._now[cordon.key] = Placed(offset, cordon)

    def delete(self, offset: int, key: str) -> None:
        """Remove the record under a key of the ledger, whatever it is."""
        kind, _, name = key.partition("/")
        if kind == "@cordon":
            self._change(offset, key)
            self._now.pop(key, None)
        elif kind == "@host":
            self._hosts.pop(name, None)

    def _change(self, offset: int, key: str) -> None:
        self._changed.setdefault(key, self._now.get(key))
        self._last[key] = offset

    def takes_out(self, host: str, resource: str, device: str) -> bool:
        """Whether any order in effect applies to a device of a host's record."""
        here = self._hosts.get(host)
        if here is None:
            return False
        names = here.names_of(device, [], before=False)
        return any(here.takes_out(each.cordon, resource, names) for each in self._of(host))

    def _of(self, host: str) -> Iterator[Placed]:
        return (each for each in self._now.values() if each.cordon.host == host)

    # --- commit by commit ---

    def commit(self, commit: VisibleCommit, records: list[Written]) -> None:
        """Check a commit. Moved records were decided elsewhere."""
        here = commit.checkpoint
        if not here.writer.startswith("sweeper/"):
            self._latest_ms[here.writer] = max(here.at_ms, self._latest_ms.get(here.writer, here.at_ms))
            for written in records:
                if not here.moved and not written.repeat:
                    self._granted(commit, written)
            for name in self._updated:
                self._hosts[name].has_record(here.writer, here.commit)
            for written in records:
                if written.record.token is not None and written.record.host in self._hosts and not here.moved:
                    self._hosts[written.record.host].has_record(written.record.writer, written.record.commit)
            self._needed(commit)
            if not here.moved:
                self._ended(commit)
                self._position(commit)
        for name in self._updated:
            self._hosts[name].before = None
        self._updated.clear()
        self._changed.clear()

    def _wrong(self, offset: int, what: str, *records: object) -> None:
        self._findings.wrong("orders", self._log.place(offset), what, *records)

    def _note(self, why: str) -> None:
        self._findings.note_partial("orders", why)

    # --- at a grant ---

    def _granted(self, commit: VisibleCommit, written: Written) -> None:
        record, before = written.record, written.before
        if not record.holds or not any(each.cordon.host == record.host for each in self._now.values()):
            return
        had = wire.devices(before.record.body) if before is not None and before.record.holds else {}
        for resource, devices in wire.devices(record.body).items():
            for device in devices:
                if device not in had.get(resource, ()):
                    self._look_at(commit, written, resource, device)

    def _look_at(self, commit: VisibleCommit, written: Written, resource: str, device: str) -> None:
        record = written.record
        host = self._hosts[record.host]
        steady = [each for each in self._of(record.host) if each.cordon.key not in self._changed]
        if not steady:
            return
        self._findings.count("orders")
        last = commit.before
        was_last = last is not None and last.commit + 1 == commit.checkpoint.commit
        aliases = (record.body.get("aliases") or {}).get(device, [])
        names = host.names_of(device, aliases, before=False)
        # the record after the commit has names that may be newer than the grant
        earlier = names if host.before is None else host.names_of(device, [], before=True)
        for order in steady:
            cordon = order.cordon
            if not host.takes_out(cordon, resource, names):
                continue
            if not host.takes_out(cordon, resource, earlier, before=True):
                self._note("devices changed in the commit of a grant")
                continue
            is_new = was_last and last is not None and (record.token or 0) > last.token
            after = written.before.offset if written.before is not None else -1
            if not is_new and not self._commits.in_the_open(record.writer, after, written.offset):
                self._note("the record that would decide it was compacted away")
                continue
            what = f"{record.key} gets {device} of {resource}, which order {cordon.order} takes out"
            place = self._log.place(order.offset)
            suspicion = Suspicion(written.offset, what, (place,), record.writer, order.offset, cordon.key)
            self._suspicions[suspicion] = None
            return

    # --- what is in effect ---

    def _needed(self, commit: VisibleCommit) -> None:
        """Check that managers that do not know orders refuse this ledger, from the first order in effect on."""
        here, before = commit.checkpoint, commit.before
        own = [each for each in self._now.values() if self._writer(each.cordon.host) == here.writer]
        had = before is not None and NEEDED in before.needs
        if (own or had) and NEEDED not in here.needs and not here.moved:
            self._wrong(commit.offset, "a manager that knows no orders would work on it, although it has had some")

    def _ended(self, commit: VisibleCommit) -> None:
        """Check that what is no longer in effect has ended."""
        for key, before in self._changed.items():
            if before is None or key in self._now:
                continue
            self._findings.count("orders")
            at_ms = commit.checkpoint.at_ms
            cordon = before.cordon
            if cordon.until_ms is not None and cordon.until_ms <= at_ms + ROUNDED_MS:
                continue
            versions = self._versions.get(cordon.order, [])
            said = [each.order for each in versions if each.order is not None]
            if any(not order.stands(at_ms + ROUNDED_MS) for order in said):
                continue
            if not self._is_known(commit.checkpoint) or not self._is_known(commit.before):
                continue
            last = versions[-1] if versions else None
            reach = commit.checkpoint.orders[1] if commit.checkpoint.orders is not None else 0
            is_certain = last is not None and last.order is not None and last.offset < reach
            if is_certain or self._is_whole():
                what = f"order {cordon.order} of host {cordon.host} is no longer in effect, and nobody has ended it"
                self._wrong(self._last[key], what, self._log.place(before.offset))
            else:
                self._note("the end of an order may have been compacted away")

    def _is_known(self, checkpoint: Checkpoint | None) -> bool:
        """Whether a commit had read the topic that exists now."""
        if self._control.log is None:
            self._note(f"orders are not looked at: {self._control.why}")
            return False
        if checkpoint is None or checkpoint.orders is None:
            self._note("it is not known how far orders were read")
            return False
        is_same = checkpoint.orders[0] == self._control.topic_id
        if not is_same:
            self._note("orders of another topic are not looked at: it is gone")
        return is_same

    def _is_whole(self) -> bool:
        """Whether every record that the topic ever had is visible."""
        log = self._control.log
        return log is not None and log.start == 0 and not log.unseen and log.holes(-1, log.end) == 0

    def _position(self, commit: VisibleCommit) -> None:
        here, before, log = commit.checkpoint, commit.before, self._control.log
        if here.orders is None:
            return
        topic_id, to = here.orders
        was = before.orders if before is not None else None
        if was is not None and was[0] == topic_id and to < was[1]:
            self._wrong(commit.offset, f"it has read orders to {to}, but to {was[1]} before")
        if not self._is_known(here) or log is None:
            return
        if to > log.end:
            self._wrong(commit.offset, f"it has read orders to {to}, but they end at {log.end}")
        number = before.commit if before is not None else 0
        if was == here.orders or number + 1 != here.commit:
            return
        for version, certain in self._last_before(to):
            if certain:
                self._compare(commit, version)
            else:
                self._note("older versions of orders are gone, as compaction removes them")

    def _last_before(self, to: int) -> Iterator[tuple[CordonOrder, bool]]:
        """The last visible version of each order before an offset, and whether it is certain that there was no later
        one, and that a manager has seen it."""
        log = self._control.log
        if log is None:
            return
        for versions in self._versions.values():
            earlier = [each for each in versions if each.offset < to]
            if not earlier or earlier[-1].order is None:
                continue  # what is deleted may be gone before a manager has seen it
            last = earlier[-1]
            is_last = last is versions[-1]
            if last.order is not None:
                yield last.order, is_last or log.holes(last.offset, to) == 0

    def _compare(self, commit: VisibleCommit, order: CordonOrder) -> None:
        """Check that an order is in effect if it stands, and only then."""
        here, wanted = commit.checkpoint, order.cordon
        host = self._hosts.get(wanted.host)
        if host is None or self._writer(wanted.host) != here.writer:
            return
        if host.since.get(here.writer, here.commit) + SERVED_WITHIN > here.commit:
            return  # a new host's orders are taken after its record is written
        self._findings.count("orders")
        found = self._now.get(wanted.key)
        until_ms = wanted.until_ms
        if order.ended:
            if found is not None:
                what = f"order {wanted.order} is still in effect, although its end was read"
                self._suspect(commit, what, wanted.key, self._log.place(found.offset))
        elif until_ms is not None and until_ms <= self._latest_ms[here.writer] + ROUNDED_MS:
            return  # it was over when it was decided, or is now
        elif found is None:
            what = f"order {wanted.order} to host {wanted.host} was read, and is not in effect"
            self._suspect(commit, what, wanted.key)
        elif found.cordon != wanted:
            what = f"order {wanted.order} to host {wanted.host} is in effect otherwise than it says"
            self._suspect(commit, what, wanted.key, self._log.place(found.offset))

    def _suspect(self, commit: VisibleCommit, what: str, key: str, *records: object) -> None:
        suspicion = Suspicion(commit.offset, what, records, commit.checkpoint.writer, -1, key)
        self._suspicions[suspicion] = None

    def _writer(self, host: str) -> str:
        """The writer of a host: its own, or its partition's."""
        own = f"host/{host}"
        writer = self._commits.writers.get(own)
        return own if writer is not None and writer.commits else f"partition/{self._log.partition}"

    # --- at the end ---

    def finish(self) -> None:
        """Judge what compaction may explain; and check that what stands and was read is in effect at the end."""
        for name, writer in self._commits.writers.items():
            if not name.startswith("sweeper/") and writer.commits:
                self._at_the_end(writer.commits[-1])
        for suspicion in self._suspicions:
            is_last = self._last.get(suspicion.key, -1) <= suspicion.offset
            is_proved = is_last and (suspicion.after >= 0 or self._is_end(suspicion))
            if is_proved or self._commits.in_the_open(suspicion.writer, suspicion.after, suspicion.offset):
                self._wrong(suspicion.offset, suspicion.what, *suspicion.records)
            else:
                self._note("the record that would decide it was compacted away")

    def _is_end(self, suspicion: Suspicion) -> bool:
        """Whether it is about the writer's last commit: compaction never removes what is so at the end."""
        writer = self._commits.writers[suspicion.writer]
        return writer.commits[-1].offset == suspicion.offset

    def _at_the_end(self, commit: VisibleCommit) -> None:
        """Check the orders of which the writer's last commit says that they were read. `commit`: that one."""
        here, log = commit.checkpoint, self._control.log
        if here.moved or here.orders is None or not self._is_known(here) or log is None:
            return
        if log.unseen:
            self._note("orders are not looked at to the end: the client cannot read them")
            return
        for versions in self._versions.values():
            last = versions[-1]
            if last.order is not None and not last.order.ended and last.offset < here.orders[1]:
                self._compare(commit, last.order)

"""The state of a cluster, as its topics say it: the newest record of each key, and what follows from it.

What a page shows of a host is computed once for each change of the host. Each change of a record is an event.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from outfitter_proto import keys
from outfitter_proto.bus import Message
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import HOLDING_STATES, Checkpoint, DeadLetter, Note, Refresh, Transition
from outfitter_proto.signs_of_life import UNKNOWN, UNSERVED, Life, SignsOfLife, Verdict, responsible, writers_of
from outfitter_service.api.model.event_log import EventLog
from outfitter_service.api.model.tail import Tail, TailItem, position_of
from outfitter_service.query.cordons import OrderInEffect, host_order, orders_on
from outfitter_service.query.device_lines import DeviceEntry, entries_of
from outfitter_service.query.ledger_view import LedgerView, RecordChange, StoredAllocation
from outfitter_service.query.letters import ShownLetter, shown
from outfitter_service.query.managers import is_missed
from outfitter_service.query.steps import device_names

T = TypeVar("T")

_LARGEST = 2**64
"""More than any priority."""
_ON_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
_KINDS = {b"@host/": "host", b"@device/": "device", b"@cordon/": "cordon"}


class HistoryStep(NamedTuple):
    """A step of history: the record, its message, and all names of its devices."""

    record: Transition | Refresh | Note
    message: Message
    devices: frozenset[str]

    @property
    def names(self) -> tuple[str | None, str | None, str | None]:
        """Its host, worker and incarnation; None for those that it does not have."""
        if isinstance(self.record, Note):
            return self.record.about, None, None
        return self.record.host, self.record.worker, self.record.incarnation


class WriterPosition(Struct, frozen=True, kw_only=True):
    """A writer's newest checkpoint, and the end of its input when that was last looked at (None: not yet)."""

    checkpoint: Checkpoint
    end: int | None


class Fleet:
    """The newest state. `partitions`: of the topics. `host`: the only host that is shown; None: all.

    `changed` must be told of each record once, in the order of each partition.
    """

    def __init__(self, partitions: int, host: str | None = None) -> None:
        self.partitions = partitions
        self.host = host
        self.events = EventLog()
        self.steps: Tail[HistoryStep] = Tail()
        self.letters: Tail[ShownLetter] = Tail()
        self.input_ends: dict[int, int] = {}
        """The ends of the registrations by partition."""
        self._ledger = LedgerView()
        self._checkpoints: dict[str, Checkpoint] = {}
        """The newest checkpoint of each writer."""
        self._seen_at: dict[str, float] = {}
        """When the first checkpoint of each writer's instance came that says how often it says that it lives."""
        self.unanswered: dict[str, int] = {}
        """How many messages of hosts that nobody serves lie unanswered, as of the last `judge`."""
        self._announced: dict[str, tuple[Verdict, int | None, bool, bool]] = {}
        """What the last `judge` said of each host: its manager's life, messages unanswered, whether it is missed, and
        whether its end is planned."""
        self._judged: dict[tuple[str, str], Verdict] = {}
        """What is known of the managers, by writer and instance."""
        self._homes: dict[str, int] = {}
        """The partition that each key's record is from."""
        self._sorted_hosts: list[str] | None = None
        self._cached: dict[str, dict[str, Any]] = {}
        """What was computed of each host, by the name of the function."""
        self._newest: tuple[object, Any] = None, None
        """What was computed last of all hosts."""

    @property
    def ledger(self) -> LedgerView:
        """The newest records."""
        return self._ledger

    @property
    def hosts(self) -> list[str]:
        """The names of all hosts of which there are records, in the order of their places."""
        if self._sorted_hosts is None:
            self._sorted_hosts = sorted(self._ledger.names, key=host_place)
        return self._sorted_hosts

    @property
    def writers(self) -> list[WriterPosition]:
        """The position of each writer, by its name."""
        return [
            WriterPosition(checkpoint=checkpoint, end=self.input_ends.get(checkpoint.input.partition))
            for _, checkpoint in sorted(self._checkpoints.items())
        ]

    def life(self, host: str) -> Verdict:
        """Whether a host's manager lives, as of the last `judge`."""
        record, checkpoint = self._ledger.hosts_record(host), self._responsible(host)
        if record is not None and record.manager.stopped_at is not None:
            return Verdict(Life.STOPPED, record.manager.stopped_at)
        return UNKNOWN if checkpoint is None else self._judged.get((checkpoint.writer, checkpoint.instance), UNKNOWN)

    def is_managed(self, host: str) -> bool:
        """Whether a manager serves a host, as far as is known."""
        return self._ledger.hosts_record(host) is not None and self.life(host).life not in UNSERVED

    def is_missed(self, host: str) -> bool:
        """Whether somebody must start a host's manager."""
        if self.is_managed(host) or self.is_planned(host):
            return False
        states = Counter(stored.record.state for stored in self.workers(host))
        holding, waiting = sum(states[state] for state in HOLDING_STATES), states["pending"]
        return is_missed(self.life(host).life, self.unanswered.get(host), waiting=waiting, holding=holding)

    def orders(self, host: str) -> list[OrderInEffect]:
        """The operators' orders in effect on a host, the oldest first."""
        return self.once(host, "orders", lambda: orders_on(self._ledger, host))

    def orders_unread(self, host: str) -> str | None:
        """Why the manager that serves a host cannot read operators' orders; None: it can, or none serves the host."""
        checkpoint = self._responsible(host) if self.is_managed(host) else None
        return None if checkpoint is None else checkpoint.orders_unread or None

    def is_planned(self, host: str) -> bool:
        """Whether no manager serves a host, and an operator has taken out all of the host."""
        return not self.is_managed(host) and host_order(self.orders(host), datetime.now(UTC)) is not None

    def unserved(self) -> dict[str, Checkpoint]:
        """The hosts whose manager is stopped or dead, with its last checkpoint."""
        checkpoints = {host: self._responsible(host) for host in self.hosts if self.life(host).life in UNSERVED}
        return {host: checkpoint for host, checkpoint in checkpoints.items() if checkpoint is not None}

    def judge(self, signs: SignsOfLife, unanswered: Mapping[str, int], *, announce: bool) -> None:
        """Judge all managers anew, and with `announce` add an event for each host of which something has changed.
        `unanswered`: how many messages lie unanswered, by host."""
        self.unanswered = dict(unanswered)
        self._judged = {
            (writer, checkpoint.instance): signs.of(checkpoint, seen_at=self._seen_at[writer])
            for writer, checkpoint in self._checkpoints.items()
        }
        before = self._announced
        self._announced = {
            host: (self.life(host), self.unanswered.get(host), self.is_missed(host), self.is_planned(host))
            for host in self.hosts
        }
        for host, now in self._announced.items():
            if now != before.get(host, (UNKNOWN, None, False, False)):
                self._cached[host] = {}
                if announce:
                    checkpoint = self._responsible(host)
                    life, count, missed, planned = now
                    data: dict[str, object] = {"key": None if checkpoint is None else checkpoint.writer, "host": host}
                    data |= {"life": life.life, "life_at": life.at, "process": life.process}
                    data |= {"unanswered": count, "missed": missed, "planned": planned}
                    self.events.add("manager", host, msgspec.json.encode(data))

    def _responsible(self, host: str) -> Checkpoint | None:
        return responsible(self._checkpoints, host, self.partitions)

    def allocations(self, host: str) -> list[StoredAllocation]:
        """The allocations of a host, by key."""

        def compute() -> list[StoredAllocation]:
            return sorted(self._ledger.allocations_of(host), key=allocation_place)

        return self.once(host, "allocations", compute)

    def workers(self, host: str) -> list[StoredAllocation]:
        """The newest allocation of each worker of a host, in the order of their places."""

        def compute() -> list[StoredAllocation]:
            newest = {stored.record.worker: stored for stored in self._ledger.allocations_of(host)}
            return sorted(newest.values(), key=worker_place)

        return self.once(host, "workers", compute)

    def queue(self, host: str) -> list[StoredAllocation]:
        """The waiting allocations of a host, in the order in which they are served."""

        def compute() -> list[StoredAllocation]:
            waiting = [stored for stored in self._ledger.allocations_of(host) if stored.record.state == "pending"]
            return sorted(waiting, key=queue_place)

        return self.once(host, "queue", compute)

    def devices(self, host: str) -> list[DeviceEntry]:
        """The devices of a host, in the order of their places."""

        def compute() -> list[DeviceEntry]:
            record = self._ledger.hosts_record(host)
            entries = [] if record is None else entries_of(self._ledger, record)
            return sorted(entries, key=device_place)

        return self.once(host, "devices", compute)

    def prepare(self, host: str) -> None:
        """Compute what pages show of a host, so that the first ones need not."""
        for compute in (self.allocations, self.workers, self.queue, self.devices):
            compute(host)

    def restore(self, changes: Iterable[RecordChange]) -> None:
        """Add records from before the first event."""
        for change in changes:
            self._put(change)

    def change(self, change: RecordChange) -> None:
        """Add a newer record, and the event of it. A record that cannot be read counts as deleted, as on the pages."""
        if not self._put(change) or change.key.startswith("@checkpoint/"):
            return
        message = change.message if change.record is not None else structs.replace(change.message, value=None)
        key = message.key or b""
        kind = next((kind for prefix, kind in _KINDS.items() if key.startswith(prefix)), None)
        kind = kind or ("allocation" if not key.startswith(b"@") else "other")
        self.events.add(kind, keys.host_of(key), _as_data(message))

    def add_step(self, message: Message, record: Transition | Refresh | Note, *, announce: bool) -> None:
        """Add a step of history, and with `announce` the event of it."""
        host = record.about if isinstance(record, Note) else record.host
        if self.host not in {None, host}:
            return
        found = (record.device,) if isinstance(record, Note) else device_names(record)
        names = frozenset(name for name in found if name)
        self.steps.add(_item(message, record.at, HistoryStep(record, message, names)))
        if announce:
            self.events.add("step", host, _as_data(message))

    def add_letter(self, message: Message, letter: DeadLetter, *, announce: bool) -> None:
        """Add a dead letter, and with `announce` the event of it."""
        host = keys.writer_names(letter.writer).host
        if self.host is not None and self.host not in {host, letter.message_key}:
            return
        value = shown(letter)
        self.letters.add(_item(message, letter.at, value))
        if announce:
            self.events.add("dead-letter", letter.message_key or host, msgspec.json.encode(value))

    def _put(self, change: RecordChange) -> bool:
        """Put a record in its place. False: it is not shown, or another partition has the key's record."""
        key, message = change.key, change.message
        if isinstance(change.record, Checkpoint):
            if self.host is None or change.record.writer in writers_of(self.host, self.partitions):
                self._note_checkpoint(change.record)
            return True
        writer = keys.writer_of(message.key or b"")
        if writer is not None and self._checkpoints.pop(writer, None) is not None:
            self._seen_at.pop(writer, None)
            return True
        host = keys.host_of(message.key or b"")
        if host is None or self.host not in {None, host}:
            return False
        home = self._homes.get(key)
        if home not in {None, message.partition} and (
            message.value is None or message.partition != partition_of(host, self.partitions)
        ):
            return False  # left behind when partitions were added
        if message.value is None:
            self._homes.pop(key, None)
        else:
            self._homes[key] = message.partition
        was_known = host in self._ledger
        self._ledger.put(change)
        is_known = host in self._ledger
        if is_known:
            self._cached[host] = {}
        else:
            self._cached.pop(host, None)
        if is_known != was_known:
            self._sorted_hosts = None
        return True

    def _note_checkpoint(self, checkpoint: Checkpoint) -> None:
        before = self._checkpoints.get(checkpoint.writer)
        self._checkpoints[checkpoint.writer] = checkpoint
        if before is None or before.instance != checkpoint.instance or before.beat_s is UNSET:
            self._seen_at[checkpoint.writer] = time.monotonic()  # it has said before that it lives

    def once(self, host: str, name: str, compute: Callable[[], T]) -> T:
        """What `compute` returns, computed once for each change of the host."""
        computed = self._cached.get(host)
        if computed is None:
            return compute()
        if name not in computed:
            computed[name] = compute()
        found: T = computed[name]
        return found

    def once_at(self, moment: object, compute: Callable[[], T]) -> T:
        """What `compute` returns of all hosts, computed once for each moment and each event."""
        moment = (moment, self.events.last)
        if self._newest[0] != moment:
            self._newest = moment, compute()
        found: T = self._newest[1]
        return found


# The place of an item in its list, as text. Lists are sorted by it and cursors have it, so that both have one order.
# It does not change while other items come and go. The places of a host's items begin with the host's own place.


def host_place(host: str) -> str:
    return f"{host}/"


def worker_place(stored: StoredAllocation) -> str:
    return f"{stored.record.host}/{stored.record.worker}/"


def allocation_place(stored: StoredAllocation) -> str:
    return stored.record.key


def device_place(device: DeviceEntry) -> str:
    return f"{device.host}/{device.resource}/{device.id}"


def queue_place(stored: StoredAllocation) -> str:
    record = stored.record
    return f"{record.host}/{_LARGEST - record.request.priority:020d}/{record.source.offset:020d}/{record.key}"


def as_json(wire: bytes) -> Raw:
    """The bytes of a record that could be read. Its unknown fields may have what is no UTF-8; that is replaced."""
    return Raw(wire.decode("utf-8", "replace").encode())


def as_value(message: Message) -> Mapping[str, Any]:
    """A message as commands print it: `partition`, `offset`, `key`, and the record as on the bus (None: deleted)."""
    record = None if message.value is None else as_json(message.value)
    key = (message.key or b"").decode("utf-8", "replace")
    return {"partition": message.partition, "offset": message.offset, "key": key, "record": record}


def _as_data(message: Message) -> bytes:
    """The data of a message's event, on one line. JSON has line ends only between its tokens."""
    return msgspec.json.encode(as_value(message)).translate(_ON_ONE_LINE)


def _item(message: Message, at: datetime, value: T) -> TailItem[T]:
    return TailItem(position_of(at, message.partition, message.offset), at, value, len(message.value or b""))

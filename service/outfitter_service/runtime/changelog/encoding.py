"""Encodes one commit: history and dead letters first, then the ledger's part, which ends in the checkpoint.

The order inside the ledger's part keeps promise 1 at every prefix: releases stand before grants. `record_kinds` says
where each other kind of record stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from operator import itemgetter

from msgspec import UNSET, Raw, UnsetType, structs

from outfitter_proto.bus import Entry, Message
from outfitter_proto.codec import encode
from outfitter_proto.names import Topics
from outfitter_proto.records import (
    HOLDING_STATES,
    MAX_DEAD_LETTER_BODY,
    NO_TOKEN,
    Allocation,
    Checkpoint,
    Commit,
    DeadLetter,
    InputPosition,
    MessageSource,
    NobodysCode,
    Note,
    OrdersPosition,
    Put,
    Refresh,
    StateRecord,
    Token,
    Transition,
)
from outfitter_service.core.fast_path import FastGrant
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.core.state.record_kinds import KINDS
from outfitter_service.core.state.sizes import ENTRY_BYTES
from outfitter_service.runtime.changelog.snapshots import Piece
from outfitter_service.runtime.changelog.topic_layout import ClusterLayout
from outfitter_service.runtime.identity import Identity

LONGEST_REASON = 2000
"""Most characters of a reason, which may quote the refused message."""


class Transaction:
    """What one commit writes. It begins empty. What is decided is encoded at once."""

    def __init__(self, *, history: bool = True) -> None:
        """`history`: whether history is written."""
        self.values: dict[str, tuple[Allocation | StateRecord | None, bytes | None]] = {}
        """The last record of each changed key, with its encoded value; None is a tombstone."""
        self.fast_grants: dict[str, tuple[Allocation, Entry]] = {}
        """The records and entries of fast grants by key, in the order of their tokens."""
        self.stepless: dict[str, None] = {}
        """Keys that were put or deleted without a step in history."""
        self.positions: dict[str, int] = {}
        """Changed queue positions by key."""
        self.letters: list[DeadLetter] = []
        """Dead letters."""
        self.notes: list[Note] = []
        """History's words for people, about the manager."""
        self.piece: Piece | None = None
        """A piece of a snapshot."""
        self.ledger_bytes = 0
        """At most so many bytes are in the ledger's part, letters included."""
        self.history_bytes = 0
        """At most so many bytes are in history's part."""
        self._history = history
        self._steps: list[Entry] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write (heartbeats move leases in memory only)."""
        return not (self.values or self.fast_grants or self.notes or self.letters)

    # --- while events are decided ---

    def put(self, key: str, record: Allocation | StateRecord | None, value: bytes | None = None) -> None:
        """Write a record, or a tombstone. `value`: the encoded record, if it is encoded already."""
        if value is None and record is not None:
            value = encode(record)
        self.fast_grants.pop(key, None)
        self.values[key] = (record, value)
        # an earlier value of this key stays in the sum: few keys have one, and this is an upper bound
        self.ledger_bytes += len(key) + ENTRY_BYTES + (0 if value is None else len(value))

    def put_without_step(self, key: str, record: StateRecord | None, value: bytes | None = None) -> None:
        """As `put`, for a record other than an allocation: history gets it at the end of the commit."""
        self.stepless[key] = None
        self.put(key, record, value)

    def grant(self, grant: FastGrant, value: bytes) -> Transition:
        """Write a fast grant, encoded as `value`, and its step. Returns the step."""
        key, record = grant.key, grant.record
        name = key.encode()
        size = len(name) + ENTRY_BYTES
        if key in self.stepless:
            del self.values[key]
        self.fast_grants[key] = record, Entry(name, value)
        self.ledger_bytes += size + len(value)
        step = grant.step(Raw(value))
        if self._history:
            encoded = encode(step)
            self._steps.append(Entry(name, encoded))
            self.history_bytes += size + len(encoded)
        return step

    def step(self, key: str, step: Transition | Refresh) -> int:
        """Write a step into history, and return its size. Its record was mostly just encoded for the ledger."""
        if not self._history:
            return 0
        if type(step) is Transition:
            record, value = self.values[key]
            if record is step.record and value is not None:
                step = structs.replace(step, record=Raw(value))
        entry = Entry(key.encode(), encode(step))
        self._steps.append(entry)
        size = len(key) + ENTRY_BYTES + len(entry.value or b"")
        self.history_bytes += size
        return size

    def note(self, note: Note) -> None:
        """Write the words of a decision into history."""
        if self._history:
            entry = Entry(note.writer.encode(), encode(note))
            self._steps.append(entry)
            self.history_bytes += len(note.writer) + ENTRY_BYTES + len(entry.value or b"")

    def add_letter(self, letter: DeadLetter) -> None:
        """Write a dead letter."""
        self.ledger_bytes += len(letter.body) * 4 // 3 + len(letter.reason)
        self.letters.append(letter)

    # --- when it is complete ---

    def entries(self, topics: Topics, checkpoint: Checkpoint) -> list[tuple[str, list[Entry]]]:
        """The entries by topic, in the order in which they are written."""
        last = Entry(checkpoint.key.encode(), encode(checkpoint))
        written: list[tuple[str, list[Entry]]] = []
        if self._history:
            notes = [Entry(note.writer.encode(), encode(note)) for note in self.notes]
            written.append((topics.history, [*notes, *self._steps, *self._end_of_history(checkpoint.writer, last)]))
        if self.letters:
            written.append((topics.dead_letters, letter_entries(self.letters)))
        return [*written, (topics.allocations, [*self._records(), last])]

    def _records(self) -> list[Entry]:
        """The ledger's entries in order: tombstones, releases, grants by their tokens, other records.

        Releases with equal labels and operators follow each other. Else their sender could choose an order in which
        gzip sees none of these twice within its 32 KiB.
        """
        before = [Entry(key.encode(), None) for key in self.stepless if self._is_recreated(key)]
        released: list[tuple[bytes, Entry]] = []
        grants: list[tuple[Token, Entry]] = []
        after: list[Entry] = []
        for key, (record, value) in self.values.items():
            entry = Entry(key.encode(), value)
            # `type is`: isinstance costs a microsecond where the answer is no
            if type(record) is Allocation:
                if record.state in HOLDING_STATES:
                    grants.append((record.token or NO_TOKEN, entry))
                else:
                    released.append((encode((record.request.labels, record.request.operators)), entry))
            else:
                kind = KINDS.get(type(record))
                (after if kind is not None and kind.after_grants else before).append(entry)
        granted = [entry for _, entry in self.fast_grants.values()]
        if grants:
            grants += [(record.token or NO_TOKEN, entry) for record, entry in self.fast_grants.values()]
            granted = [entry for _, entry in sorted(grants, key=itemgetter(0))]
        return [*before, *[entry for _, entry in sorted(released, key=itemgetter(0))], *granted, *after]

    def _is_recreated(self, key: str) -> bool:
        """Whether an allocation was deleted and put again. Without a tombstone in between, its new record would look
        like a change of the old one."""
        return key not in self.values or type(self.values[key][0]) is Allocation

    def _end_of_history(self, writer: str, last: Entry) -> list[Entry]:
        """History's entries after the steps: the records that were put or deleted without a step, the piece of a
        snapshot, and the commit itself. That has the checkpoint as in the ledger's `last` entry."""
        entries: list[Entry] = []
        dropped: list[str] = []
        for key in self.stepless:
            record, value = self.values.get(key, (None, b""))
            if value is None:
                dropped.append(key)
            elif type(record) in KINDS:
                entries.append(Entry(key.encode(), encode(Put(writer=writer, key=key, record=Raw(value)))))
        if self.piece is not None:
            entries.append(self.piece.entry)
        end = Commit(writer=writer, checkpoint=Raw(last.value or b""), positions=self.positions, dropped=dropped)
        return [*entries, Entry(writer.encode(), encode(end))]


def checkpoint(
    identity: Identity,
    ledger: Ledger,
    position: InputPosition,
    *,
    layout: ClusterLayout,
    at: datetime,
    boot_id: str | None,
    snapshot: datetime | UnsetType,
    beat_s: float | UnsetType = UNSET,
    lease_grace_s: float | UnsetType = UNSET,
    orders: OrdersPosition | UnsetType = UNSET,
    orders_unread: str | UnsetType = UNSET,
) -> Checkpoint:
    """The checkpoint of a commit that has just begun. `position`: in the input. `layout`: the topics'.
    `boot_id`: the boot whose deaths are not all committed. `snapshot`: when the newest complete snapshot in history was
    begun. `beat_s`: seconds between two signs of life. `lease_grace_s`: seconds between a lease's end and its
    judgement. `orders`, `orders_unread`: how far operators' orders are taken, and why no more are read."""
    return Checkpoint(
        writer=identity.writer,
        instance=identity.instance,
        cluster=identity.cluster,
        scope=identity.scope,
        commit=ledger.commits,
        token=ledger.token,
        input=position,
        at=at,
        machine_id=identity.machine_id,
        boot_id=boot_id,
        snapshot=snapshot,
        pid_ns=UNSET if identity.pid_ns is None else identity.pid_ns,
        time_ns=UNSET if identity.time_ns is None else identity.time_ns,
        partitions=layout.partitions,
        ledger_id=layout.ledger,
        ledger_start=layout.ledger_start or UNSET,
        beat_s=beat_s,
        lease_grace_s=lease_grace_s,
        orders=orders,
        orders_unread=orders_unread,
        format=2 if ledger.needs else 1,
        needs=sorted(ledger.needs) or UNSET,
    )


def dead_letter(
    message: Message, reason: str, field: str | None, *, writer: str, at: datetime, code: str | UnsetType = UNSET
) -> DeadLetter:
    """The dead letter of a message: at most `MAX_DEAD_LETTER_BODY` bytes of it, with its length and SHA-256."""
    body = message.value or b""
    return DeadLetter(
        at=at,
        writer=writer,
        source=MessageSource(topic=message.topic, partition=message.partition, offset=message.offset),
        reason=reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…",
        field=field,
        message_key=message.key.decode("utf-8", "replace")[:1024] if message.key is not None else None,
        length=len(body),
        sha256=hashlib.sha256(body).hexdigest(),
        body=body[:MAX_DEAD_LETTER_BODY],
        code=NobodysCode.UNREADABLE if message.unreadable is not None else code,
        first=UNSET if message.first is None else message.first,
    )


def letter_entries(letters: Sequence[DeadLetter]) -> list[Entry]:
    """Dead letters under their keys."""
    return [Entry(letter.key.encode(), encode(letter)) for letter in letters]

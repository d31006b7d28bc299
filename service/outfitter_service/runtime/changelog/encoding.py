"""Encodes one commit: history and dead letters first, then one ledger batch that ends in the checkpoint.

The order inside the ledger batch keeps promise 1 at every prefix: releases stand before grants. `record_kinds` says
where each other kind of record stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
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
    Growth,
    InputPosition,
    MessageSource,
    NobodysCode,
    Note,
    Put,
    StateRecord,
    Token,
    Transition,
)
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.core.state.record_kinds import KINDS
from outfitter_service.runtime.changelog.shape import Shape
from outfitter_service.runtime.identity import Identity

LONGEST_REASON = 2000
"""Most characters of a reason, which may quote the refused message."""


def ledger_batch(
    values: Mapping[str, tuple[Allocation | StateRecord | None, bytes | None]],
    fast_grants: Mapping[str, tuple[Allocation, Entry]],
    checkpoint: Checkpoint,
    *,
    recreated: Iterable[str] = (),
) -> list[Entry]:
    """The ledger's entries in order: tombstones, releases, grants by their tokens, other records, the checkpoint.

    Releases with equal labels and operators follow each other. Else their sender could choose an order in which gzip
    sees none of these twice within its 32 KiB.

    `values`: records and their encoded values by key; None is a tombstone. `fast_grants`: records and entries by key,
    in the order of their tokens. `recreated`: keys that were deleted and put again. Without a tombstone in between,
    their new records would look like changes of the old ones.
    """
    before = [Entry(key.encode(), None) for key in recreated]
    released: list[tuple[bytes, Entry]] = []
    grants: list[tuple[Token, Entry]] = []
    after: list[Entry] = []
    for key, (record, value) in values.items():
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
    granted = [entry for _, entry in fast_grants.values()]
    if grants:
        grants += [(record.token or NO_TOKEN, entry) for record, entry in fast_grants.values()]
        granted = [entry for _, entry in sorted(grants, key=itemgetter(0))]
    before += [entry for _, entry in sorted(released, key=itemgetter(0))]
    return [*before, *granted, *after, Entry(checkpoint.key.encode(), encode(checkpoint))]


def commit_entries(
    checkpoint: Checkpoint,
    last: Entry,
    stepless: Mapping[str, tuple[Allocation | StateRecord | None, bytes | None]],
    positions: dict[str, int],
    piece: Entry | None,
) -> list[Entry]:
    """History's entries at the end of a commit, after its steps.

    They are the records that were put or deleted without a step (`stepless`), the `piece` of a snapshot, and the commit
    itself. The commit has the checkpoint as in the ledger's `last` entry, and the changed queue `positions`.
    """
    writer = checkpoint.writer
    entries: list[Entry] = []
    dropped: list[str] = []
    for key, (record, value) in stepless.items():
        if value is None:
            dropped.append(key)
        elif type(record) in KINDS:
            entries.append(Entry(key.encode(), encode(Put(writer=writer, key=key, record=Raw(value)))))
    if piece is not None:
        entries.append(piece)
    end = Commit(writer=writer, checkpoint=Raw(last.value or b""), positions=positions, dropped=dropped)
    return [*entries, Entry(writer.encode(), encode(end))]


def checkpoint(
    identity: Identity,
    ledger: Ledger,
    position: InputPosition,
    *,
    shape: Shape,
    grown: Growth | UnsetType = UNSET,
    at: datetime,
    boot_id: str | None,
    snapshot: datetime | UnsetType,
    beat_s: float | UnsetType = UNSET,
    lease_grace_s: float | UnsetType = UNSET,
) -> Checkpoint:
    """The checkpoint of a commit that was just sealed. `position`: in the input. `shape`: the topics'. `grown`: the
    input's offsets from before partitions were added. `boot_id`: the boot whose deaths are not all committed.
    `snapshot`: when the newest complete snapshot in history was begun. `beat_s`: seconds between two signs of life.
    `lease_grace_s`: seconds between a lease's end and its judgement."""
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
        partitions=shape.partitions,
        ledger_id=shape.ledger,
        ledger_start=shape.ledger_start or UNSET,
        grown=grown,
        beat_s=beat_s,
        lease_grace_s=lease_grace_s,
        format=2 if ledger.needs else 1,
        needs=sorted(ledger.needs) or UNSET,
    )


def note_entry(note: Note) -> Entry:
    """A note under its writer's key."""
    return Entry(note.writer.encode(), encode(note))


def step_entry(key: str, step: Transition, record: bytes | None) -> Entry:
    """A step under its allocation's key. `record`: its record, if it is encoded already."""
    return Entry(key.encode(), encode(step if record is None else structs.replace(step, record=Raw(record))))


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


def batches(
    topics: Topics, history: list[Entry], letters: Sequence[DeadLetter], ledger: list[Entry]
) -> list[tuple[str, list[Entry]]]:
    """One transaction's batches in the order in which they are written."""
    batches: list[tuple[str, list[Entry]]] = []
    if history:
        batches.append((topics.history, history))
    if letters:
        batches.append((topics.dead_letters, letter_entries(letters)))
    batches.append((topics.allocations, ledger))
    return batches

"""History: each change of the ledger and why. And dead letters: messages that changed nothing."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from outfitter_proto.records.ledger import Allocation, Checkpoint, Source, StateRecord
from outfitter_proto.records.values import Utc


class Transition(Struct, frozen=True, kw_only=True, tag_field="type", tag="transition", gc=False):
    """One step of one allocation: what caused it, what it became, and why. Key: the allocation's key.

    `event` names the cause (`register`, `deregister`, `lease-expired`, `owner-died`, `driver-report`, …);
    `source` is set when the cause was a message.
    """

    at: Utc
    host: str
    worker: str
    incarnation: str
    event: str
    to: str
    explanation: str
    record: Allocation | msgspec.Raw
    from_: str | None = msgspec.field(name="from", default=None)
    source: Source | None = None
    confirmed: bool | None = None


class Note(Struct, frozen=True, kw_only=True, tag_field="type", tag="note", gc=False):
    """Something of a whole host or writer worth keeping that is no allocation's step (input lost, start, stop)."""

    at: Utc
    writer: str
    event: str
    explanation: str


class Refresh(Struct, frozen=True, kw_only=True, tag_field="type", tag="refresh", gc=False, omit_defaults=True):
    """An allocation's record brought up to date without a step: its reason, its infos. Key: the allocation's key.

    `changed` are the fields that are not as before, as they are now; the others stay. `event` and `source` as in
    `Transition`.
    """

    at: Utc
    host: str
    worker: str
    incarnation: str
    writer: str
    event: str
    explanation: str
    changed: dict[str, Any]
    source: Source | None = None


class Put(Struct, frozen=True, kw_only=True, tag_field="type", tag="put", gc=False):
    """A record of the ledger that is no allocation's (such as a host's), as it is now. `key` is its key in the ledger;
    so is this record's."""

    writer: str
    key: str
    record: StateRecord | msgspec.Raw


class Snapshot(Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot", gc=False, omit_defaults=True):
    """A piece of a writer's state: records of the ledger by their keys, as they are after the commit that this is part
    of. Key: the writer.

    A large state is spread over several commits. `begun` is the number of the commit with the first piece, `part`
    counts pieces from 0. With the piece that is the `last`, and with all changes since the first, the state is
    complete: what changes behind a piece is told as always, and what is new since the first piece is in none.
    """

    writer: str
    begun: int
    part: int
    records: dict[str, msgspec.Raw]
    last: bool = False


class Commit(Struct, frozen=True, kw_only=True, tag_field="type", tag="commit", gc=False, omit_defaults=True):
    """What one transaction says in history ends here. Key: the writer.

    `checkpoint` is the ledger's. `positions` are the queue positions that are shown now where they have changed, by
    allocation key: such a record has the checkpoint's `commit` and `writer`, and is otherwise as it was. `dropped`
    are the keys that were deleted from the ledger.
    """

    writer: str
    checkpoint: Checkpoint | msgspec.Raw
    positions: dict[str, int] = {}
    dropped: list[str] = []


HistoryRecord = Transition | Note | Refresh | Put | Snapshot | Commit


class NobodysCode(enum.StrEnum):
    """Why a registration is nobody's: no manager would ever read it as its own."""

    NO_KEY = "no-key"
    UNREADABLE = "unreadable"
    BAD_KEY = "bad-key"
    WRONG_PARTITION = "wrong-partition"
    NO_MANAGER = "no-manager"


class MessageSource(Struct, frozen=True, kw_only=True, gc=False):
    """Where a message stood."""

    topic: str
    partition: int
    offset: int


class DeadLetter(Struct, frozen=True, kw_only=True, tag_field="type", tag="dead-letter", gc=False):
    """A message that could not be understood or obeyed. Key: `topic/partition/offset`.

    `body` holds at most 4 KiB of its bytes (base64 on the wire), `length` and `sha256` are of all of it.
    `field` is the JSON path of the wrong field, where there is one. `code` says of a message that is nobody's why it
    is: see `NobodysCode`. `count`: the letter stands for so many messages, this being the first of them and all of them
    standing before the offset `until`; left out: for this one.
    `first`: it is a whole record batch, from that offset to the source's, that cannot be read.
    """

    at: Utc
    writer: str
    source: MessageSource
    reason: str
    length: int
    sha256: str
    body: bytes
    message_key: str | None = None
    field: str | None = None
    code: str | UnsetType = UNSET
    first: int | UnsetType = UNSET
    count: int | UnsetType = UNSET
    until: int | UnsetType = UNSET

    @property
    def key(self) -> str:
        return f"{self.source.topic}/{self.source.partition}/{self.source.offset}"


MAX_DEAD_LETTER_BODY = 4 * 1024

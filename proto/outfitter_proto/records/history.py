"""History: each change of the ledger, with the reason. Dead letters: messages without effect."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from outfitter_proto.records.ledger import Allocation, Checkpoint, Source, StateRecord
from outfitter_proto.records.values import CommitNumber, Utc


class Transition(Struct, frozen=True, kw_only=True, tag_field="type", tag="transition", gc=False):
    """One step of one allocation: its cause, the new record, and the reason. Key: the allocation's key.

    `from` and `to`: the states before and after it; `from` null: the allocation is new. `at`: when the manager decided
    it. `event` names the cause (`register`, `deregister`, `lease-expired`, `owner-died`, `driver-report`, …);
    `source` is set when the cause was a message. `explanation`: the reason, for people. `confirmed`: of a release,
    whether an in-use check found the devices unused; null: this step releases none.
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
    """An event of a whole host or writer and not of an allocation (input lost, start, stop)."""

    at: Utc
    writer: str
    event: str
    explanation: str


class Refresh(Struct, frozen=True, kw_only=True, tag_field="type", tag="refresh", gc=False, omit_defaults=True):
    """A change of an allocation's record without a step: its reason, its infos. Key: the allocation's key.

    `changed` has the new values of the changed fields. `event` and `source` as in `Transition`.
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
    """The new version of another ledger record than an allocation's, such as a host's. `key` is its key in the ledger
    and also this record's key."""

    writer: str
    key: str
    record: StateRecord | msgspec.Raw


class Snapshot(Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot", gc=False, omit_defaults=True):
    """A piece of a writer's state: ledger records by key, as they are after this commit. Key: the writer.

    A large state is spread over several commits. `begun` is the number of the commit with the first piece, `part`
    counts pieces from 0. The state is complete with the `last` piece and all changes since the first one. History has
    these changes as usual; records that are new since the first piece are in no piece.
    """

    writer: str
    begun: CommitNumber
    part: int
    records: dict[str, msgspec.Raw]
    last: bool = False


class Commit(Struct, frozen=True, kw_only=True, tag_field="type", tag="commit", gc=False, omit_defaults=True):
    """The end of one transaction in history. Key: the writer.

    `checkpoint`: the ledger's. `positions`: the changed queue positions by allocation key; these records also get the
    checkpoint's `commit` and `writer`, and no other change. `dropped`: the keys deleted from the ledger.
    """

    writer: str
    checkpoint: Checkpoint | msgspec.Raw
    positions: dict[str, int] = {}
    dropped: list[str] = []


HistoryRecord = Transition | Note | Refresh | Put | Snapshot | Commit


class NobodysCode(enum.StrEnum):
    """Why a registration is unroutable: no manager would ever read it as its own."""

    NO_KEY = "no-key"
    UNREADABLE = "unreadable"
    BAD_KEY = "bad-key"
    WRONG_PARTITION = "wrong-partition"
    NO_MANAGER = "no-manager"


class MessageSource(Struct, frozen=True, kw_only=True, gc=False):
    """The place of a message."""

    topic: str
    partition: int
    offset: int


class DeadLetter(Struct, frozen=True, kw_only=True, tag_field="type", tag="dead-letter", gc=False):
    """A message that the manager could not understand or obey. Key: `topic/partition/offset`.

    `body` has at most 4 KiB of its bytes (base64 on the wire); `length` and `sha256` are of the whole message.
    `field` is the JSON path of the wrong field, if any. `code`: why a message is unroutable, see `NobodysCode`.
    `count`: the letter stands for this many messages, of which this is the first, and all are before the offset
    `until`. Left out: for this one only. `first`: an unreadable record batch, from this offset to the source's.
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

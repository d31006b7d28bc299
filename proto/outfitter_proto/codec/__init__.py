"""Encodes and decodes records, as JSON in UTF-8 with msgspec. Errors name the wrong field of the message.

A body and its key must name the same host. The broker checks neither. The modules of this package check what types do
not say: bounds, the field of a fault, unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import chain
from typing import Any, TypeVar

import msgspec
from msgspec.json import Decoder

from outfitter_proto.codec.bounds import WITHIN_BYTES, excess, excess_of_owner
from outfitter_proto.records import (
    NAME_PATTERN,
    Beat,
    CordonOrder,
    DeadLetter,
    HistoryRecord,
    LedgerRecord,
    Register,
    Registration,
)

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 * 1024
"""The longest registration that we read (the registrations topic's `max.message.bytes`)."""
MAX_ORDER_BYTES = 16 * 1024
"""The longest order that we read (the control topic's `max.message.bytes`)."""


class WireError(ValueError):
    """The bytes are no valid message."""

    def __init__(self, what: str, problem: str, field: str | None = None) -> None:
        self.what = what
        """The kind of message."""
        self.problem = problem
        """The fault and the valid values."""
        self.field = field
        """The JSON path of the wrong field (`$.resources.gpu.amount`). None: the whole message is wrong."""
        super().__init__(f"{what}: {problem}" + (f" (at {field})" if field else ""))


class UnknownTypeError(WireError):
    """A record with an unknown `type`. Readers skip it; writers refuse its host."""


encode = msgspec.json.Encoder().encode
"""Encode any record to compact JSON bytes."""

# Made here and not on first use: msgspec 0.22 shows other threads the layout of a struct before it is complete, and
# whoever decodes with it meanwhile ends the process (SIGSEGV). Only one thread imports a module.

_registration: Decoder[Registration] = Decoder(Registration)
_ledger: Decoder[LedgerRecord] = Decoder(LedgerRecord)
_history: Decoder[HistoryRecord] = Decoder(HistoryRecord)
_dead_letter: Decoder[DeadLetter] = Decoder(DeadLetter)
_beat: Decoder[Beat] = Decoder(Beat)
_order: Decoder[CordonOrder] = Decoder(CordonOrder)

_NAME = NAME_PATTERN[1 : NAME_PATTERN.index("$")]
_is_name = re.compile(_NAME).fullmatch
_are_names = re.compile(f"{_NAME}/{_NAME}").fullmatch
_valid_names: set[str] = set()  # a cache
_MOST_CACHED_NAMES = 1000
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _translate(what: str, value: bytes, kind: Any, error: Exception) -> WireError:
    from outfitter_proto.codec import faults

    fault = faults.locate(value, kind, error)
    if fault.field == "$.type" and fault.problem.startswith("Invalid value "):
        return UnknownTypeError(what, fault.problem, fault.field)
    return WireError(what, fault.problem, fault.field)


def decode_registration(
    value: bytes | None,
    *,
    key: bytes | None = None,
    warnings: list[str] | None = None,
    exact: bool = True,
    named: bool = True,
) -> Registration:
    """Decode one message of the registrations topic.

    `key`: the message's key, if it has one; its host must be the body's. Unknown fields are ignored, and `warnings`
    gets a sentence for each. Two options save milliseconds for a large message: `named` False gives one warning for all
    unknown fields, `exact` False allows an error without the field's path.

    Raises:
        WireError: the message is empty, too long or no JSON, has an unknown type or a wrong field, or contradicts its
        key.
    """
    what = "registration"
    if value is None:
        raise WireError(what, "the message has no body; a JSON object is needed")
    if not value:
        raise WireError(what, "the message is empty; a JSON object is needed")
    if len(value) > MAX_MESSAGE_BYTES:
        raise WireError(what, f"{len(value)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        message = _registration.decode(value)
    except _UNREADABLE as error:
        message = _without_unknown_fields(what, value, error, warnings, exact=exact, named=named)
    if type(message) is Register:
        owner = message.owner
        if len(value) > WITHIN_BYTES or (owner is not None and excess_of_owner(owner) is not None):
            _refuse_excess(what, message)
    if not _is_well_named(message):
        raise _misnamed(what, message)
    if key is not None and key != message.host.encode():
        named_by_key = key[:300].decode("utf-8", "replace")
        raise WireError(
            what,
            f"the body names host {message.host!r} but the key is {named_by_key!r}; both must be the host",
            "$.host",
        )
    return message


def _without_unknown_fields(
    what: str, value: bytes, error: Exception, warnings: list[str] | None, *, exact: bool, named: bool
) -> Registration:
    """A refused registration without its unknown fields.

    Searching for their names takes a hundred times as long, so we do it only if all other fields are within bounds.

    Raises:
        WireError: more than unknown fields is wrong.
    """
    from outfitter_proto.codec import unknown

    if not unknown.is_about_unknown_fields(error):
        raise _translate(what, value, Registration, error) if exact else _inexact(what, value, error) from error
    try:
        message = _registration.decode(encode(unknown.tolerant(Registration).decode(value)))
    except _UNREADABLE as other:
        if exact:
            _known_part(what, value, Registration, error, _registration)
        raise _inexact(what, value, other) from other
    if (problem := _not_text(value)) is not None:  # nobody has checked the values of unknown fields
        raise WireError(what, problem)
    if type(message) is Register:
        _refuse_excess(what, message)
    if warnings is not None:
        warnings += unknown.without(value, Registration).warnings if named else [unknown.UNNAMED]
    return message


def _inexact(what: str, value: bytes, error: Exception) -> WireError:
    return WireError(what, _not_text(value) or str(error))


def _not_text(value: bytes) -> str | None:
    from outfitter_proto.codec import faults

    return faults.not_text(value)


def _refuse_excess(what: str, message: Register) -> None:
    fault = excess(message)
    if fault is not None:
        raise WireError(what, fault.problem, fault.field)


def _is_well_named(message: Registration) -> bool:
    """Whether all names in the message are valid."""
    incarnation = message.incarnation
    if not _are_names(f"{message.worker}/{'any' if incarnation is None else incarnation}"):
        return False
    if message.host not in _valid_names and not _are_valid((message.host,)):
        return False
    if type(message) is not Register:
        return True
    if message.resources and not _are_valid(message.resources):
        return False
    return not message.operators or _are_valid(chain(message.operators, *message.operators.values()))


def _are_valid(names: Iterable[str]) -> bool:
    """Whether these names are valid. Valid ones are cached, because they are few, unlike those of workers and
    incarnations."""
    for name in names:
        if name in _valid_names:
            continue
        if not _is_name(name):
            return False
        if len(_valid_names) >= _MOST_CACHED_NAMES:
            _valid_names.clear()
        _valid_names.add(name)
    return True


def _misnamed(what: str, message: Registration) -> WireError:
    from outfitter_proto.codec import faults

    fault = faults.misnamed(message, _is_name)
    return WireError(what, fault.problem, fault.field)


def _known_part(what: str, value: bytes, kind: Any, error: Exception, decoder: Decoder[T]) -> T:
    """A refused message without its unknown fields.

    Raises:
        WireError: more than unknown fields is wrong.
    """
    from outfitter_proto.codec import unknown

    if not unknown.is_about_unknown_fields(error):
        raise _translate(what, value, kind, error) from error
    try:
        value = unknown.without(value, kind).body
        return decoder.decode(value)
    except _UNREADABLE as other:
        raise _translate(what, value, kind, other) from other


def decode_ledger(value: bytes, *, key: bytes | None = None) -> LedgerRecord:
    """Decode one record of the allocations topic.

    Raises:
        UnknownTypeError: a type of a later version.
        WireError: damaged, or under another key than its own.
    """
    try:
        record = _ledger.decode(value)
    except _UNREADABLE as error:
        record = _known_part(_ledger_record(key), value, LedgerRecord, error, _ledger)
    if key is not None and record.key.encode() != key:
        raise WireError(_ledger_record(key), f"its body belongs under the key {record.key!r}")
    return record


def _ledger_record(key: bytes | None) -> str:
    return f"ledger record {key.decode('utf-8', 'replace')}" if key is not None else "ledger record"


def decode_history(value: bytes) -> HistoryRecord:
    """Decode one record of the history topic; raises `WireError`."""
    try:
        return _history.decode(value)
    except _UNREADABLE as error:
        return _known_part("history record", value, HistoryRecord, error, _history)


def decode_dead_letter(value: bytes) -> DeadLetter:
    """Decode one record of the dead-letters topic; raises `WireError`."""
    try:
        return _dead_letter.decode(value)
    except _UNREADABLE as error:
        raise _translate("dead letter", value, DeadLetter, error) from error


def decode_beat(value: bytes, *, key: bytes | None = None) -> Beat:
    """Decode one record of the managers' topic.

    Raises:
        UnknownTypeError: a type of a later version.
        WireError: damaged, or under another key than its writer.
    """
    try:
        beat = _beat.decode(value)
    except _UNREADABLE as error:
        raise _translate("manager's sign of life", value, Beat, error) from error
    if key is not None and beat.key.encode() != key:
        raise WireError("manager's sign of life", f"its body belongs under the key {beat.key!r}")
    return beat


def decode_order(value: bytes, *, key: bytes | None = None) -> CordonOrder:
    """Decode one record of the control topic.

    Raises:
        UnknownTypeError: an order of a later version.
        WireError: damaged, longer than `MAX_ORDER_BYTES`, or under another key than its id.
    """
    if len(value) > MAX_ORDER_BYTES:
        raise WireError("operator's order", f"{len(value)} bytes; at most {MAX_ORDER_BYTES} are read")
    try:
        order = _order.decode(value)
    except _UNREADABLE as error:
        raise _translate("operator's order", value, CordonOrder, error) from error
    for field, name in (("$.id", order.id), ("$.host", order.host)):
        if not _is_name(name):
            raise WireError("operator's order", f"{name[:40]!r} is no valid name", field)
    for field, what in (("$.resource", order.resource), ("$.device", order.device)):
        if what == "":
            raise WireError("operator's order", "an empty text names nothing; leave the field out for all", field)
    for field, moment in (("$.at", order.at), ("$.until", order.until), ("$.ended_at", order.ended_at)):
        if moment and not _has_utc(moment):
            raise WireError("operator's order", f"{moment.isoformat()} is in UTC no time of the years 1 to 9999", field)
    if key is not None and order.key.encode() != key:
        raise WireError("operator's order", f"its body belongs under the key {order.key!r}")
    return order


def _has_utc(moment: datetime) -> bool:
    """Whether Python has this moment in UTC: a local time of the year 9999 may be of the year 10000 there."""
    try:
        moment.astimezone(UTC)
    except OverflowError:
        return False
    return True

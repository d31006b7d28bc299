"""Fields that this version does not know, in what workers write: what is left without them, and where they stood.

The structs that workers write refuse unknown fields, which costs nothing where all are known. Only a message that was
refused for one comes here: the unknown fields are taken out, whatever stands in them, and are told instead. A field
that was added in a later version must cost no worker its answer; one that was misspelt must not go unnoticed.
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from outfitter_proto.faults import Step, path

MOST_TOLD = 8
"""Of one message's unknown fields so many are named; the others are counted."""
LONGEST_PATH = 200
UNNAMED = "unknown fields were ignored; they are not named, for many messages of this host have some"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Known(NamedTuple):
    """A message without its unknown fields, and what to say of them."""

    body: bytes
    warnings: list[str]


class Unknown(NamedTuple):
    """An unknown field: where it is, and the names that would be known there."""

    steps: tuple[Step, ...]
    known: tuple[str, ...]


def is_about_unknown_fields(error: Exception) -> bool:
    """Whether msgspec refused a message for a field that it does not know."""
    return isinstance(error, msgspec.ValidationError) and str(error).startswith("Object contains unknown field")


def without(body: bytes, kind: Any, *, named: bool = True) -> Known:
    """Take what is unknown out of `body`, a message of `kind`; not `named`, it is told that there was some, but not
    what: that is what takes most of the time.

    Raises:
        msgspec.DecodeError, RecursionError: it is no JSON.
    """
    found: list[Unknown] = []
    kept = _kept(body, _type_info(kind), (), found)
    if not named:
        return Known(kept, [UNNAMED] if found else [])
    warnings = [_in_words(one) for one in found[:MOST_TOLD]]
    if len(found) > MOST_TOLD:
        warnings.append(f"{len(found) - MOST_TOLD} more unknown fields were ignored")
    return Known(kept, warnings)


@cache
def _type_info(kind: Any) -> inspect.Type:
    """To look through all structs takes most of a millisecond."""
    return inspect.type_info(kind)


def _kept(body: bytes, kind: inspect.Type, steps: tuple[Step, ...], found: list[Unknown]) -> bytes:
    """The JSON value `body` with the known part of its objects."""
    if not body.lstrip().startswith(b"{"):
        return body
    fields = _OBJECT.decode(body)
    struct = _struct(kind, fields)
    if struct is not None:
        types = {field.encode_name: field.type for field in struct.fields}
        known = (*types, *([struct.tag_field] if struct.tag_field else []))
        if struct.forbid_unknown_fields:
            found += [Unknown((*steps, name), known) for name in fields if name not in known]
            fields = {name: value for name, value in fields.items() if name in known}
    else:
        values = _mapping(kind)
        if values is None:
            return body
        types = dict.fromkeys(fields, values)
    inner = {
        name: msgspec.Raw(_kept(bytes(value), types[name], (*steps, name), found)) if name in types else value
        for name, value in fields.items()
    }
    return msgspec.json.encode(inner)


def _struct(kind: inspect.Type, fields: dict[str, msgspec.Raw]) -> inspect.StructType | None:
    """The struct that an object of `kind` is, by its tag where there are several."""
    structs = [option for option in _options(kind) if isinstance(option, inspect.StructType)]
    if len(structs) == 1:
        return structs[0]
    return next(
        (one for one in structs if one.tag_field in fields and msgspec.json.decode(fields[one.tag_field]) == one.tag),
        None,
    )


def _mapping(kind: inspect.Type) -> inspect.Type | None:
    """What the values of an object of `kind` are, where its keys are anybody's to choose."""
    return next((option.value_type for option in _options(kind) if isinstance(option, inspect.DictType)), None)


def _options(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):  # what the schema says of it besides
        return _options(kind.type)
    return tuple(chain(*map(_options, kind.types))) if isinstance(kind, inspect.UnionType) else (kind,)


def _in_words(one: Unknown) -> str:
    from difflib import get_close_matches

    where = path(one.steps)
    if len(where) > LONGEST_PATH:
        where = f"{where[:LONGEST_PATH]}…"
    name = str(one.steps[-1])
    near = get_close_matches(name[:64].lower(), one.known, n=1, cutoff=0.6)
    known = f"did you mean {near[0]}?" if near else f"known there are {', '.join(one.known)}"
    return f"unknown field {where} was ignored; {known}"


__all__ = ["UNNAMED", "Known", "is_about_unknown_fields", "without"]

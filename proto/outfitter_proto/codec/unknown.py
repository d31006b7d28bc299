"""Removes unknown fields from workers' messages and lists them.

The structs of workers' messages refuse unknown fields, which costs nothing for valid messages. Only refused messages
come here. A field from a later version must not cost a worker its answer, and a misspelt field must not go unnoticed.
"""

from __future__ import annotations

from functools import cache, reduce
from itertools import chain
from operator import or_
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from outfitter_proto.codec.faults import Step, path
from outfitter_proto.records import Condition

MOST_NAMED = 8
"""Most unknown fields that the warnings name; the others are counted."""
LONGEST_PATH = 200
STRICT = (Condition,)
"""Structs whose unknown fields are errors: who leaves out a part of what a device must be gets another device."""
UNNAMED = "unknown fields were ignored; they are not named, because many messages of this host have some"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Known(NamedTuple):
    """A message without its unknown fields, and the warnings about them."""

    body: bytes
    warnings: list[str]


class Unknown(NamedTuple):
    """An unknown field."""

    steps: tuple[Step, ...]
    """Its path."""
    known: tuple[str, ...]
    """The known names beside it."""


def is_about_unknown_fields(error: Exception) -> bool:
    """Whether msgspec refused a message because of an unknown field."""
    return isinstance(error, msgspec.ValidationError) and str(error).startswith("Object contains unknown field")


@cache
def tolerant(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of `kind` that ignores unknown fields anywhere. Its structs encode to the known part of the message. It
    takes a few nanoseconds a byte, whereas `without` takes hundreds."""
    return msgspec.json.Decoder(_tolerant(kind))


def _tolerant(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind if kind in STRICT else _twin(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if not parts:
        return kind
    if origin is Annotated:
        return Annotated[(_tolerant(parts[0]), *parts[1:])]
    others = tuple(map(_tolerant, parts))
    return reduce(or_, others) if origin in (Union, UnionType) else origin[others]


def _twin(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The same struct, but it accepts any fields."""
    config, hints = struct.__struct_config__, get_type_hints(struct, include_extras=True)
    fields = [(field.name, _tolerant(hints[field.name]), _default(field)) for field in msgspec.structs.fields(struct)]
    return msgspec.defstruct(
        struct.__name__, fields, tag_field=config.tag_field, tag=config.tag, kw_only=True, gc=False
    )


def _default(field: msgspec.structs.FieldInfo) -> Any:
    defaults: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
    return msgspec.field(name=field.encode_name, **defaults)


def without(body: bytes, kind: Any) -> Known:
    """Remove the unknown fields from `body`, a message of `kind`.

    Raises:
        msgspec.DecodeError, RecursionError: it is no JSON.
    """
    unknown: list[Unknown] = []
    plan = _plan(kind)
    kept = _kept(body, plan, (), unknown) if plan is not None else body
    warnings = [_in_words(field) for field in unknown[:MOST_NAMED]]
    if len(unknown) > MOST_NAMED:
        warnings.append(f"{len(unknown) - MOST_NAMED} more unknown fields were ignored")
    return Known(kept, warnings)


class _Fields(NamedTuple):
    """A struct's fields."""

    known: dict[str, None] | None
    """The known names. None: any name is valid."""
    plans: dict[str, _Plan]
    """The fields to search."""


class _Plan(NamedTuple):
    """How to search an object."""

    tag_field: str | None
    structs: dict[Any, _Fields]
    """It is one of these, by their tags."""
    values: _Plan | None
    """How to search all its values."""


@cache
def _plan(kind: Any) -> _Plan | None:
    """The cached plan for a type, because building all takes most of a millisecond."""
    return _plan_of(inspect.type_info(kind))


def _plan_of(kind: inspect.Type) -> _Plan | None:
    """The plan for a type; None if its values cannot have unknown fields."""
    structs: dict[Any, _Fields] = {}
    tag_field, values = None, None
    for option in _options(kind):
        if isinstance(option, inspect.StructType) and option.cls not in STRICT:
            tag_field = option.tag_field
            structs[option.tag] = _fields_of(option)
        elif isinstance(option, inspect.DictType):
            values = _plan_of(option.value_type)
    if values is None and not any(fields.known is not None or fields.plans for fields in structs.values()):
        return None
    return _Plan(tag_field, structs, values)


def _fields_of(struct: inspect.StructType) -> _Fields:
    names = [field.encode_name for field in struct.fields] + ([struct.tag_field] if struct.tag_field else [])
    plans = {field.encode_name: plan for field in struct.fields if (plan := _plan_of(field.type)) is not None}
    return _Fields(dict.fromkeys(names) if struct.forbid_unknown_fields else None, plans)


def _kept(body: bytes | msgspec.Raw, plan: _Plan, steps: tuple[Step, ...], unknown: list[Unknown]) -> bytes:
    """The JSON value `body`, at the path `steps`, with only the known part of its objects. Adds the others to
    `unknown`."""
    body = bytes(body)
    if not body.lstrip().startswith(b"{"):
        return body
    fields = _OBJECT.decode(body)
    of_struct = _fields(plan, fields)
    if of_struct is None:
        inner = {name: (plan.values, value) for name, value in fields.items()}
    else:
        known, plans = of_struct
        if known is not None and not fields.keys() <= known.keys():
            unknown += [Unknown((*steps, name), tuple(known)) for name in fields if name not in known]
            fields = {name: value for name, value in fields.items() if name in known}
        inner = {name: (plan, fields[name]) for name, plan in plans.items() if name in fields}
    for name, (plan_of_it, value) in inner.items():
        if plan_of_it is not None:
            fields[name] = msgspec.Raw(_kept(value, plan_of_it, (*steps, name), unknown))
    return msgspec.json.encode(fields)


def _fields(plan: _Plan, fields: dict[str, msgspec.Raw]) -> _Fields | None:
    """The known fields of an object, by its tag if it may be one of several structs."""
    if len(plan.structs) == 1:
        [only] = plan.structs.values()
        return only
    if plan.tag_field not in fields:
        return None
    tag = msgspec.json.decode(fields[plan.tag_field])  # any type: the field may occur twice
    return next((of_struct for name, of_struct in plan.structs.items() if name == tag), None)


def _options(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):  # annotations for the schema
        return _options(kind.type)
    return tuple(chain(*map(_options, kind.types))) if isinstance(kind, inspect.UnionType) else (kind,)


def _in_words(field: Unknown) -> str:
    from difflib import get_close_matches

    where = path(field.steps)
    if len(where) > LONGEST_PATH:
        where = f"{where[:LONGEST_PATH]}…"
    name = str(field.steps[-1])
    near = get_close_matches(name[:64].lower(), field.known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known there are {', '.join(field.known)}"
    return f"unknown field {where} was ignored; {hint}"

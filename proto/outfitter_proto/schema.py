"""The wire contract for tools, as JSON Schema 2020-12 and AsyncAPI 3, generated from the structs.

They describe what Outfitter writes. Unknown fields are always allowed, because changes only add fields.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import msgspec

from outfitter_proto import __version__, records, topics
from outfitter_proto.names import DEFAULT_CLUSTER

VERSION = ".".join(__version__.split(".")[:2])
"""The contract's version. Tests read golden files of each version, so that old bytes stay readable."""

UNIONS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "Registration": get_args(records.Registration),
    "LedgerRecord": get_args(records.LedgerRecord),
    "HistoryRecord": get_args(records.HistoryRecord),
    "DeadLetter": (records.DeadLetter,),
    "Beat": (records.Beat,),
    "CordonOrder": (records.CordonOrder,),
}
"""The messages or records of each topic, by the name of its schema."""

_CHANNELS = {
    "registrations": (
        "Registration",
        "receive",
        "Messages of workers. A key and a body must name the same host.",
        "The host.",
    ),
    "allocations": (
        "LedgerRecord",
        "send",
        "The ledger: the manager's whole state, compacted. Null bodies delete their key.",
        (
            "`host/worker/incarnation`, `@host/<host>`, `@device/<host>/<percent-encoded id>`, "
            "`@cordon/<host>/<order>` or `@checkpoint/<writer>`."
        ),
    ),
    "history": (
        "HistoryRecord",
        "send",
        "Every transition with its reason, and every other change of the ledger.",
        "The key of the allocation or of another ledger record, or the writer.",
    ),
    "dead_letters": (
        "DeadLetter",
        "send",
        "Messages that the manager could not understand or obey.",
        "`topic/partition/offset` of the message.",
    ),
    "managers": (
        "Beat",
        "send",
        "Signs of life of managers, compacted. A cluster works without this topic.",
        "The writer: `host/<host>` or `partition/<n>`.",
    ),
    "control": (
        "CordonOrder",
        "receive",
        "Orders of operators, compacted. A cluster works without this topic.",
        "The id of the order.",
    ),
}
_PARTITIONED = "The partition is murmur2 of the host's name, as Java's clients compute it."
_ONE_PARTITION = "The topic has one partition."
_NUMERIC_SETTINGS = {"retention.ms", "max.message.bytes"}
_BOUND_SETTINGS = _NUMERIC_SETTINGS | {"cleanup.policy"}


def json_schema() -> dict[str, Any]:
    """A JSON Schema 2020-12 for every message and record; `$defs` has one for each topic and each type."""
    schemas = _schemas("#/$defs/{name}")
    schemas |= {
        name: {"oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds]}
        for name, kinds in UNIONS.items()
        if len(kinds) > 1
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:outfitter:wire:{VERSION}",
        "title": f"Outfitter's messages and records, version {VERSION}",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in UNIONS],
        "$defs": schemas,
    }


def asyncapi() -> dict[str, Any]:
    """An AsyncAPI 3 document from the manager's point of view: channels, operations, messages, schemas."""
    return {
        "asyncapi": "3.0.0",
        "id": "urn:outfitter:manager",
        "info": {
            "title": "Outfitter",
            "version": __version__,
            "description": "A resource manager for stream workers: registrations in, allocations out.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {name: _channel(name) for name in _CHANNELS},
        "operations": {
            f"{action}-{name.replace('_', '-')}": {
                "action": action,
                "channel": {"$ref": f"#/channels/{name}"},
                "summary": about,
            }
            for name, (_, action, about, _) in _CHANNELS.items()
        },
        "components": {
            "schemas": _schemas("#/components/schemas/{name}"),
            "messages": {kind.__name__: _message(kind) for kinds in UNIONS.values() for kind in kinds},
        },
    }


def _channel(name: str) -> dict[str, Any]:
    union, _, about, key = _CHANNELS[name]
    every = topics.required(DEFAULT_CLUSTER) | topics.optional(DEFAULT_CLUSTER)
    settings = every[f"{DEFAULT_CLUSTER}.{name.replace('_', '-')}"]
    return {
        "address": f"{{cluster}}.{name.replace('_', '-')}",
        "title": name.replace("_", " "),
        "description": f"{about} Key: {key} {_ONE_PARTITION if name == 'control' else _PARTITIONED}",
        "parameters": {"cluster": {"description": "The cluster's name.", "default": DEFAULT_CLUSTER}},
        "messages": {
            kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"} for kind in UNIONS[union]
        },
        "bindings": {
            "kafka": {
                "topicConfiguration": {
                    setting.name: _binding(setting) for setting in settings if setting.name in _BOUND_SETTINGS
                },
                "bindingVersion": "0.5.0",
            }
        },
    }  # fmt: skip


def _binding(setting: topics.Setting) -> Any:
    return int(setting.value) if setting.name in _NUMERIC_SETTINGS else setting.value.split(",")


def _message(kind: type[msgspec.Struct]) -> dict[str, Any]:
    about = inspect.cleandoc(kind.__doc__ or "")
    return {
        "name": str(kind.__struct_config__.tag),
        "title": kind.__name__,
        "summary": about.partition("\n")[0],
        "contentType": "application/json",
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
        "bindings": {"kafka": {"key": {"type": "string"}, "bindingVersion": "0.5.0"}},
    }


def _schemas(reference: str) -> dict[str, Any]:
    kinds = [kind for kinds in UNIONS.values() for kind in kinds]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=reference)
    describe_fields(schemas)
    tidied: dict[str, Any] = _tidied(schemas)
    return tidied


def describe_fields(schemas: dict[str, Any]) -> None:
    """Describe the fields of records in these schemas, which have the records' names."""
    for name, texts in _field_texts().items():
        properties = schemas.get(name, {}).get("properties", {})
        for field in msgspec.structs.fields(getattr(records, name)):
            if field.name in texts and (schema := properties.get(field.encode_name)) is not None:
                # whatever stands beside a reference is ignored by draft 7 of JSON Schema, which AsyncAPI uses
                about = {"allOf": [schema]} if "$ref" in schema else schema
                properties[field.encode_name] = about | {"description": texts[field.name]}


@cache
def _field_texts() -> dict[str, dict[str, str]]:
    """The texts under fields in `records.py`, by record and field."""
    found: dict[str, dict[str, str]] = {}
    for definition in ast.parse(inspect.getsource(records)).body:
        if isinstance(definition, ast.ClassDef):
            for field, text in pairwise(definition.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(about))):
                        found.setdefault(definition.name, {})[name] = inspect.cleandoc(about)
    return found


def _tidied(value: Any) -> Any:
    """Remove the docstrings' indentation, the part of patterns that only Python's `$` needs, and OpenAPI's
    discriminators of unions (`type` distinguishes their members). Allow further fields everywhere."""
    if isinstance(value, dict):
        return {key: _tidied_text(key, inner) for key, inner in value.items() if not _is_foreign(key, inner)}
    return [_tidied(inner) for inner in value] if isinstance(value, list) else value


def _is_foreign(key: str, value: Any) -> bool:
    """Whether the entry is for OpenAPI only, or stricter than the contract because the codec's structs are."""
    return (key == "discriminator" and "propertyName" in value) or (key == "additionalProperties" and value is False)


def _tidied_text(key: str, value: Any) -> Any:
    if key == "description" and isinstance(value, str):
        return inspect.cleandoc(value)
    if key == "pattern" and isinstance(value, str):
        return value.replace(r"(?!\n)", "")
    return _tidied(value)

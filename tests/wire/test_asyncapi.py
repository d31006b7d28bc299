"""`outfitter schema` is an AsyncAPI 3 document by AsyncAPI's own JSON Schema (tests/asyncapi has it)."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outfitter_proto import schema

SPECIFICATION = Path(__file__).parents[1] / "asyncapi" / "asyncapi-3.0.0.schema.json.gz"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    document = json.loads(gzip.decompress(SPECIFICATION.read_bytes()))
    jsonschema.Draft7Validator.check_schema(document)
    return jsonschema.Draft7Validator(document)


def complaints(validator: jsonschema.Draft7Validator, document: dict[str, Any]) -> list[str]:
    """Where the document breaks the specification. Schemas may be of any kind by it; ours are AsyncAPI's own."""
    return [
        f"{'.'.join(map(str, inner.absolute_path))}: {inner.message}"
        for error in validator.iter_errors(document)
        for inner in (error, *(error.context or ()))
    ]


def test_the_document_is_one_of_asyncapi_3(validator: jsonschema.Draft7Validator) -> None:
    assert complaints(validator, schema.asyncapi()) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("components", "schemas", "Put", "properties", "record", "discriminator"), {"propertyName": "type"}),
        (("channels", "registrations", "messages"), []),
        (("operations", "send-history", "action"), "publish"),
        (("components", "messages", "Register", "bindings", "kafka", "bindingVersion"), 5),
        (("info", "version"), None),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_what_the_parser_would_refuse_is_seen_here(
    validator: jsonschema.Draft7Validator, path: tuple[str, ...], value: object
) -> None:
    document = copy.deepcopy(schema.asyncapi())
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert complaints(validator, document)

"""What `outfitter schema` prints fits what is written, judged by a stock validator."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import msgspec
import pytest

from outfitter_proto import codec, schema
from support.wire_samples import SAMPLES

DOCUMENT = schema.json_schema()
VALIDATOR = jsonschema.Draft202012Validator(DOCUMENT)


def plain(name: str) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.json.decode(codec.encode(SAMPLES[name]))
    return value


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(DOCUMENT)


@pytest.mark.parametrize("name", SAMPLES)
def test_each_golden_message_is_accepted(name: str) -> None:
    VALIDATOR.validate(plain(name))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_without_a_needed_field_is_refused(name: str) -> None:
    value = plain(name)
    del value["host" if "host" in value and value["type"] != "note" else "writer"]
    assert not VALIDATOR.is_valid(value)


BROKEN = [
    ("register-full", ("resources", "gpu", "amount"), -1),
    ("register-full", ("resources", "gpu", "amount"), "2"),
    ("register-full", ("resources",), {"g u": {"amount": 1}}),
    ("register-full", ("host",), "a/b"),
    ("register-full", ("lease_s",), 0),
    ("register-full", ("labels",), {"a": 1}),
    ("heartbeat", ("type",), "heart-beat"),
    ("allocation-allocated", ("resources", "gpu"), [{"index": 0}]),
    ("allocation-allocated", ("since",), 5),
    ("checkpoint", ("input",), {"partition": 3}),
]


@pytest.mark.parametrize(("name", "path", "value"), BROKEN)
def test_what_the_codec_refuses_the_schema_refuses_too(name: str, path: tuple[str, ...], value: object) -> None:
    message = copy.deepcopy(plain(name))
    inner = message
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert not VALIDATOR.is_valid(message)
    decode = codec.decode_registration if name in {"register-full", "heartbeat"} else codec.decode_ledger
    with pytest.raises(codec.WireError):
        decode(msgspec.json.encode(message))


def test_further_fields_are_allowed_since_evolution_is_additive() -> None:
    VALIDATOR.validate(plain("heartbeat") | {"load": 0.5})


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for inner in value.values() for ref in references(inner)]
    return [ref for inner in value for ref in references(inner)] if isinstance(value, list) else []


@pytest.mark.parametrize("document", [schema.asyncapi(), DOCUMENT], ids=["asyncapi", "json-schema"])
def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = references(document)
    assert found
    for reference in found:
        inner: Any = document
        for step in reference.removeprefix("#/").split("/"):
            inner = inner[step]


DESCRIBED = [
    ("Register", "lease_s", "Left out: the manager's default."),
    ("Register", "owner", "The process whose end ends the allocation."),  # a reference to another schema
    ("Transition", "from", "The state before it."),  # no field's name in Python
    ("Survivors", "uid", "Their real user id."),  # in no topic by itself
]


@pytest.mark.parametrize(
    "schemas", [schema.asyncapi()["components"]["schemas"], DOCUMENT["$defs"]], ids=["asyncapi", "json-schema"]
)
@pytest.mark.parametrize(("kind", "field", "text"), DESCRIBED)
def test_the_text_under_a_field_describes_it(schemas: dict[str, Any], kind: str, field: str, text: str) -> None:
    about = schemas[kind]["properties"][field]
    assert about["description"].startswith(text)
    assert "$ref" not in about, "draft 7 ignores what stands beside a reference"


def test_asyncapi_names_each_topic_with_its_messages_and_cleanup() -> None:
    channels = schema.asyncapi()["channels"]
    assert {name: channel["address"] for name, channel in channels.items()} == {
        "registrations": "{cluster}.registrations",
        "allocations": "{cluster}.allocations",
        "history": "{cluster}.history",
        "dead_letters": "{cluster}.dead-letters",
        "managers": "{cluster}.managers",
        "control": "{cluster}.control",
    }
    assert set(channels["allocations"]["messages"]) == {"Allocation", "Host", "Device", "Cordon", "Checkpoint"}
    assert channels["allocations"]["bindings"]["kafka"]["topicConfiguration"]["cleanup.policy"] == ["compact"]

"""How large a registration's parts may be: each is refused beyond its bound by name, and taken at it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outfitter_proto import codec, schema
from outfitter_proto.codec.bounds import WITHIN_BYTES
from outfitter_proto.records import Allocation

OWNER = {"pid": 1, "start_ticks": 1, "pid_ns": 1}


def message(**fields: Any) -> bytes:
    body = {"type": "register", "host": "h", "worker": "w", "incarnation": "1", **fields}
    return json.dumps(body, ensure_ascii=False).encode()


def asks(count: int) -> dict[str, Any]:
    return {f"r{number}": {"amount": 1} for number in range(count)}


NUMBERS = ("start_ticks", "pid_ns", "time_ns")
AT_THE_BOUND: list[tuple[str, dict[str, Any]]] = [
    *((f"$.owner.{name}", {"owner": {**OWNER, "boot_id": "b", name: 2**64 - 1}}) for name in NUMBERS),
    ("$.owner.boot_id", {"owner": {**OWNER, "boot_id": "b" * 64}}),
    ("$.resources", {"resources": asks(64)}),
    ("$.operators", {"operators": {f"o{number}": {} for number in range(256)}}),
    ("$.operators", {"operators": {f"o{number}": asks(64) for number in range(16)}}),
    ("$.labels", {"labels": {"é": "x" * 2000, "y": "ü" * 1046 + "z"}}),
    ("$.resources", {"resources": {"r": {"amount": 1, "where": {"x": "y" * (4096 - 15)}}}}),
]
BEYOND: list[tuple[str, dict[str, Any]]] = [
    *((f"$.owner.{name}", {"owner": {**OWNER, "boot_id": "b", name: 2**64}}) for name in NUMBERS),
    *((f"$.owner.{name}", {"owner": {**OWNER, "boot_id": "b", name: 10**2000}}) for name in NUMBERS),
    ("$.owner.boot_id", {"owner": {**OWNER, "boot_id": "b" * 65}}),
    ("$.resources", {"resources": asks(65)}),
    ("$.operators", {"operators": {f"o{number}": {} for number in range(257)}}),
    ("$.operators", {"operators": {f"o{number}": asks(41) for number in range(25)}}),
    ("$.labels", {"labels": {"é": "x" * 2000, "y": "ü" * 1046 + "zz"}}),
    ("$.resources", {"resources": {"r": {"amount": 1, "where": {"x": "y" * (4096 - 14)}}}}),
    ("$.resources", {"resources": {f"r{n}": {"amount": 1, "same": ["y" * 100]} for n in range(40)}}),
    ("$.labels", {"labels": {"x" * 5000: ""}}),
    ("$.labels", {"labels": {f"{number}": "" for number in range(1500)}}),
]


@pytest.mark.parametrize(("field", "fields"), AT_THE_BOUND)
def test_what_is_at_the_bound_is_taken(field: str, fields: dict[str, Any]) -> None:
    codec.decode_registration(message(**fields))


@pytest.mark.parametrize(("field", "fields"), BEYOND)
def test_what_is_beyond_is_refused_with_its_field_its_size_and_the_bound(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(codec.WireError) as caught:
        codec.decode_registration(message(**fields))
    assert caught.value.field == field
    assert "at most" in caught.value.problem


def test_what_is_not_looked_at_cannot_be_beyond() -> None:
    """The shortest message that is over each bound but the owner's is longer than those that are passed."""
    names = [f"{number}" for number in range(65)]
    shortest = [
        {"resources": {name: {"amount": 1} for name in names}},
        {"operators": {f"{number}": {} for number in range(257)}},
        {"labels": {"": "x" * 4097}},
    ]
    for fields in shortest:
        body = json.dumps({"type": "register", "host": "h", "worker": "w", "incarnation": "1", **fields})
        assert len(body.replace(" ", "")) > WITHIN_BYTES


def test_records_that_are_over_a_bound_are_read_all_the_same() -> None:
    """Earlier versions wrote them."""
    request = {"amounts": {}, "labels": {"x": "y" * 9000}, "owner": {**OWNER, "boot_id": "b" * 900, "pid_ns": 2**70}}
    record = {
        "type": "allocation", "host": "h", "worker": "w", "incarnation": "1", "state": "allocated", "request": request,
        "since": "2026-01-01T00:00:00Z", "writer": "host/h", "commit": 1, "source": {"partition": 0, "offset": 0},
    }  # fmt: skip
    assert isinstance(codec.decode_ledger(json.dumps(record).encode()), Allocation)


def test_the_schema_says_them() -> None:
    defined = schema.json_schema()["$defs"]
    assert defined["Owner"]["properties"]["boot_id"]["maxLength"] == 64
    assert defined["Owner"]["properties"]["start_ticks"]["maximum"] == 2**64 - 1
    assert defined["Owner"]["properties"]["pid_ns"]["maximum"] == 2**64 - 1
    assert defined["Owner"]["properties"]["time_ns"]["anyOf"][0]["maximum"] == 2**64 - 1
    assert defined["Deregister"]["properties"]["reason"]["anyOf"][0]["maxLength"] == 256
    asked = defined["Register"]["properties"]
    assert asked["resources"]["anyOf"][0]["maxProperties"] == 64
    assert asked["operators"]["anyOf"][0]["maxProperties"] == 256
    of_resource = defined["ResourceRequest"]["properties"]
    assert of_resource["where"]["anyOf"][0]["maxProperties"] == 32
    assert of_resource["same"]["anyOf"][0]["maxItems"] == 4

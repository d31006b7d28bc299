"""Fields that this version does not know: obeyed without them in what workers write, and told; ignored in records."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto import codec
from outfitter_proto.records import Allocation, Heartbeat, Register, Transition
from support.wire_samples import SAMPLES

HEAD: dict[str, Any] = {"type": "register", "host": "gpu-3", "worker": "w", "incarnation": "1"}
OWNER = {"pid": 1, "start_ticks": 1, "pid_ns": 1, "boot_id": "b"}


def told(message: dict[str, Any]) -> list[str]:
    warnings: list[str] = []
    codec.decode_registration(json.dumps(message).encode(), warnings=warnings)
    return warnings


@pytest.mark.parametrize(
    ("more", "sentences"),
    [
        ({}, []),
        ({"resorces": {"gpu": {"amount": 2}}}, ["unknown field $.resorces was ignored; did you mean resources?"]),
        ({"leases_s": 5}, ["unknown field $.leases_s was ignored; did you mean lease_s?"]),
        ({"PRIORITY": 5}, ["unknown field $.PRIORITY was ignored; did you mean priority?"]),
        (
            {"resources": {"gpu": {"ammount": 2, "amount": 1}}},
            ["unknown field $.resources.gpu.ammount was ignored; did you mean amount?"],
        ),
        (
            {"operators": {"a": {"gpu": {"amount": 1, "share": 1}}}},
            ["unknown field $.operators.a.gpu.share was ignored; did you mean same?"],
        ),
        ({"owner": {**OWNER, "bootid": "b"}}, ["unknown field $.owner.bootid was ignored; did you mean boot_id?"]),
        ({"labels": {"anything": "goes"}}, []),
        ({"resources": None, "owner": None, "x": None}, None),
        ({"\x1b[2J\n": 1}, None),
    ],
    ids=str,
)
def test_each_is_named_by_its_path_with_the_nearest_known_name(
    more: dict[str, Any], sentences: list[str] | None
) -> None:
    warnings = told(HEAD | more)
    if sentences is not None:
        assert warnings == sentences
    assert all("\x1b" not in one and "\n" not in one for one in warnings)
    assert bool(warnings) == (sentences != [])


def test_of_heartbeats_and_deregistrations_they_are_told_too() -> None:
    for kind in ("heartbeat", "deregister"):
        assert told(HEAD | {"type": kind, "resource": 1})


def test_what_is_wrong_with_the_known_part_is_said_of_it() -> None:
    for wrong, field in (
        ({"resources": {"gpu": {"amount": 0}}}, "$.resources.gpu.amount"),
        ({"worker": 3}, "$.worker"),
    ):
        for message in (HEAD | {"x": [1]} | wrong, HEAD | wrong | {"x": [1]}):
            with pytest.raises(codec.WireError) as caught:
                told(message)
            assert caught.value.field == field


@pytest.mark.parametrize("value", [b"1e999", b"-0", b"9" * 5000, b"[[[{}]]]", b"0.1e-400"], ids=repr)
def test_whatever_stands_in_it_is_no_error(value: bytes) -> None:
    body = json.dumps(HEAD).encode()[:-1] + b',"x":' + value + b"}"
    warnings: list[str] = []
    assert codec.decode_registration(body, warnings=warnings).worker == "w"
    assert len(warnings) == 1


def test_of_many_some_are_named_and_the_rest_is_counted_in_sentences_of_some_length() -> None:
    warnings = told(HEAD | {f"{n}-{'x' * 2_000}": n for n in range(25)})
    assert len(warnings) == 9
    assert warnings[-1] == "17 more unknown fields were ignored"
    assert all(len(one) < 500 for one in warnings)


names = st.text(st.characters(codec="utf-8"), max_size=12)
anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
KNOWN = {*Register.__struct_fields__, *OWNER, "type", "amount"}


@given(st.data())
def test_wherever_they_stand_the_message_is_the_one_without_them(data: st.DataObject) -> None:
    """Register's objects are all of ours: the message, each resource, each operator's resource, the owner."""
    plain: dict[str, Any] = msgspec.json.decode(codec.encode(SAMPLES["register-full"]))
    message: dict[str, Any] = msgspec.json.decode(codec.encode(SAMPLES["register-full"]))
    places = [message, message["owner"], *message["resources"].values()]
    places += [wanted for operator in message["operators"].values() for wanted in operator.values()]
    added = 0
    for place in places:
        more = data.draw(st.dictionaries(names.filter(lambda name: name not in KNOWN), anything, max_size=2))
        added += len(more)
        place.update(more)
    warnings: list[str] = []
    body = msgspec.json.encode(message)
    assert codec.decode_registration(body, warnings=warnings) == codec.decode_registration(msgspec.json.encode(plain))
    assert len(warnings) == min(added, 9)
    warnings.clear()
    unnamed = codec.decode_registration(body, warnings=warnings, named=False)
    assert unnamed == codec.decode_registration(msgspec.json.encode(plain))
    assert len(warnings) == min(added, 1)


MANY = {f"o{number}": {"gpu": {"amount": 1, "later": 1}} for number in range(1600)}


@pytest.mark.parametrize(
    ("message", "how", "problem"),
    [
        ({"operators": MANY}, {"named": True}, "1600 operators"),
        ({"operators": MANY}, {"named": False}, "1600 operators"),
        ({"operators": MANY, "priority": "high"}, {"exact": False}, "Expected `int`, got `str` - at `$.priority`"),
        ({"resources": {"gpu": {"amount": 1, "later": 1}}}, {"named": False}, None),
    ],
    ids=["beyond the bounds", "beyond the bounds, not named", "wrong, without its place", "not named"],
)
def test_nothing_is_looked_through_for_names_that_are_not_told(
    monkeypatch: pytest.MonkeyPatch, message: dict[str, Any], how: dict[str, bool], problem: str | None
) -> None:
    """To look into each object costs a hundred times what it takes to read them: 213 ns a byte of 1,600 operators."""
    from outfitter_proto.codec import unknown

    def fail(*_: object) -> unknown.Known:
        raise AssertionError("it was looked through")

    monkeypatch.setattr(unknown, "without", fail)
    body = msgspec.json.encode(HEAD | message)
    warnings: list[str] = []
    if problem is None:
        codec.decode_registration(body, warnings=warnings, **how)
        assert warnings == [unknown.UNNAMED]
        return
    with pytest.raises(codec.WireError, match=re.escape(problem)):
        codec.decode_registration(body, warnings=warnings, **how)


@pytest.mark.parametrize("tag", ["[]", "{}", "1", '"heartbeat"', '"nothing"'])
def test_a_type_that_stands_there_twice_makes_nothing_but_an_error_of_the_wire(tag: str) -> None:
    body = f'{json.dumps(HEAD)[:-1]},"later":1,"type":{tag}}}'
    with suppress(codec.WireError):
        codec.decode_registration(body.encode(), warnings=[])


def test_only_objects_in_which_something_can_be_unknown_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large message with one unknown field the labels are copied as they are: quotas count bytes, not values."""
    from outfitter_proto.codec import unknown

    looked_into: list[bytes] = []
    decoder = unknown._OBJECT

    def decode(body: bytes) -> dict[str, msgspec.Raw]:
        looked_into.append(body)
        return decoder.decode(body)

    monkeypatch.setattr(unknown, "_OBJECT", SimpleNamespace(decode=decode))
    labels = {f"label-{number}": "x" for number in range(100)}
    message = {**HEAD, "labels": labels, "resources": {"gpu": {"amount": 1}}, "later": 1}
    decoded = codec.decode_registration(msgspec.json.encode(message), warnings=[])
    assert isinstance(decoded, Register)
    assert decoded.labels == labels
    assert len(looked_into) == 3  # the message, its resources, the one resource


def test_plain_messages_cost_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    from outfitter_proto.codec import unknown

    def fail(*_: object) -> unknown.Known:
        raise AssertionError("it was looked at twice")

    monkeypatch.setattr(unknown, "without", fail)
    for sample in SAMPLES.values():
        if isinstance(sample, Register | Heartbeat):
            codec.decode_registration(codec.encode(sample))


@pytest.mark.parametrize(
    "path", [(), ("request",), ("request", "owner"), ("request", "resources", "gpu")], ids=".".join
)
def test_records_of_a_later_version_are_read_with_fields_anywhere(path: tuple[str, ...]) -> None:
    record = SAMPLES["allocation-allocated"]
    assert isinstance(record, Allocation)
    later: dict[str, Any] = msgspec.json.decode(codec.encode(record))
    later["request"]["owner"] = OWNER
    expected = codec.decode_ledger(msgspec.json.encode(later))
    inner = later
    for step in path:
        inner = inner[step]
    inner["later"] = {"than": "this"}
    assert codec.decode_ledger(msgspec.json.encode(later)) == expected
    step = {
        "type": "transition", "at": "2026-01-01T00:00:00Z", "host": "h", "worker": "w", "incarnation": "i",
        "event": "register", "to": "allocated", "explanation": "", "record": later, "later": 1,
    }  # fmt: skip
    assert isinstance(codec.decode_history(msgspec.json.encode(step)), Transition)


def test_a_part_of_a_clause_that_nobody_knows_refuses_the_message() -> None:
    """Without it, the worker would get devices that it does not want."""
    resources = {"gpu": {"amount": 1, "where": {"memory.total_bytes": {"min": "40Gi", "mx": "80Gi"}}, "wher": 1}}
    with pytest.raises(codec.WireError, match="unknown field `mx`") as caught:
        told(HEAD | {"resources": resources})
    assert caught.value.field == '$.resources.gpu.where["memory.total_bytes"]'

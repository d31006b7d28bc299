"""The codec's errors say which field of which message is wrong, and nothing that comes in breaks it."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto import codec, records

HEAD = '{"type":"register","host":"gpu-3","worker":"tm-17","incarnation":"1"'
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
REQUESTS = st.dictionaries(
    NAMES, st.integers(1, records.MAX_AMOUNT).map(lambda n: records.ResourceRequest(amount=n)), max_size=4
)
SECONDS = st.floats(min_value=0.001, max_value=366 * 86_400)
REGISTERS = st.builds(
    records.Register,
    host=NAMES,
    worker=NAMES,
    incarnation=NAMES,
    resources=st.none() | REQUESTS,
    operators=st.none() | st.dictionaries(NAMES, REQUESTS, max_size=3),
    owner=st.none()
    | st.builds(
        records.Owner,
        pid=st.integers(1, 2**31),
        start_ticks=st.integers(0, 2**63),
        pid_ns=st.integers(0, 2**63),
        boot_id=TEXTS,
    ),
    lease_s=st.just(msgspec.UNSET) | st.none() | SECONDS,
    wait_s=st.none() | SECONDS,
    priority=st.integers(-1_000_000, 1_000_000),
    labels=st.dictionaries(TEXTS, TEXTS, max_size=3),
)


def refused(text: str | bytes) -> codec.WireError:
    with pytest.raises(codec.WireError) as caught:
        codec.decode_registration(text.encode() if isinstance(text, str) else text)
    return caught.value


@given(REGISTERS)
def test_what_is_encoded_decodes_to_the_same(message: records.Register) -> None:
    assert codec.decode_registration(codec.encode(message), key=message.host.encode()) == message


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_a_wire_error(value: bytes) -> None:
    for decode in (codec.decode_registration, codec.decode_ledger, codec.decode_history, codec.decode_dead_letter):
        with contextlib.suppress(codec.WireError):
            decode(value)


FIELDS = [
    (',"resources":{"ok":{"amount":1},"gpu":{"amount":-1},"z":{"amount":0}}', "$.resources.gpu.amount", "found -1"),
    (',"resources":{"gpu":{"amount":"two"}}', "$.resources.gpu.amount", 'found "two"'),
    (',"resources":{"gpu":{"amount":2.5}}', "$.resources.gpu.amount", "found 2.5"),
    (',"resources":{"gpu":{"amount":99999999999999999999}}', "$.resources.gpu.amount", "9223372036854775807"),
    (',"resources":{"ok":{"amount":1},"gpu":{}}', "$.resources.gpu.amount", "missing required field `amount`"),
    (',"resources":{"ok":{"amount":1},"gpu":[1]}', "$.resources.gpu", "found [1]"),
    (',"resources":{"ok":{"amount":1},"g u":{"amount":1}}', "$.resources", 'found "g u"'),
    (',"resources":7', "$.resources", "found 7"),
    (',"operators":{"a":{},"infer":{"x":{"amount":1},"gpu":{"amount":0}}}', "$.operators.infer.gpu.amount", "found 0"),
    (',"operators":{"a":{},"inf/er":{}}', "$.operators", 'found "inf/er"'),
    (',"operators":{"a":{},"infer":{"gpu":{"amount":1},"g u":{"amount":1}}}', "$.operators.infer", 'found "g u"'),
    (',"labels":{"a.b":1}', '$.labels["a.b"]', "found 1"),
    (',"lease_s":0', "$.lease_s", "found 0"),
    (',"lease_s":1e400', "$.lease_s", "out of range"),
    (',"priority":1000001', "$.priority", "found 1000001"),
    (',"owner":{"pid":1,"start_ticks":-5,"pid_ns":0,"boot_id":""}', "$.owner.start_ticks", "found -5"),
    (',"owner":{"pid":1}', "$.owner.start_ticks", "missing"),
]


@pytest.mark.parametrize(("rest", "field", "words"), FIELDS, ids=[row[1] + " " + row[2] for row in FIELDS])
def test_an_error_names_the_very_field_and_what_was_found(rest: str, field: str, words: str) -> None:
    refused(HEAD + rest + "}")
    error = refused(HEAD + rest + "}")  # nothing that was refused is remembered
    assert error.field == field
    assert words in str(error)
    assert field in str(error)


def test_what_names_are_remembered_is_bounded() -> None:
    for number in range(3000):
        codec.decode_registration(f'{HEAD},"resources":{{"k{number}":{{"amount":1}}}}}}'.encode())
    for start in range(0, 3000, 200):
        operators = ",".join(f'"o{number}":{{}}' for number in range(start, start + 200))
        codec.decode_registration(f'{HEAD},"operators":{{{operators}}}}}'.encode())
    assert len(codec._valid_names) <= 1000


@pytest.mark.parametrize("host", ["", "a/b", "@host", "gpu-3\\n", "-a", "a" * 254, "gpü"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    error = refused(f'{{"type":"heartbeat","host":"{host}","worker":"w","incarnation":"i"}}')
    assert error.field == "$.host"
    assert "Expected a name" in str(error)


@pytest.mark.parametrize("kind", ["register", "heartbeat", "deregister"])
@pytest.mark.parametrize("field", ["host", "worker", "incarnation"])
@pytest.mark.parametrize("name", ["", "a/b", "b/", "a\n", "-a", "a" * 254, "ü"])
def test_each_part_of_an_allocations_key_must_be_a_name(kind: str, field: str, name: str) -> None:
    body = {"type": kind, "host": "h", "worker": "w", "incarnation": "i"}
    assert codec.decode_registration(msgspec.json.encode(body)).worker == "w"
    error = refused(msgspec.json.encode(body | {field: name}))
    assert error.field == f"$.{field}"
    assert error.problem.startswith("Expected a name")


def test_the_wrong_one_of_thousands_of_keys_is_found() -> None:
    many = ",".join(f'"k{i}":{{"amount":1}}' for i in range(2_500))
    assert refused(f'{HEAD},"resources":{{{many},"gpu":{{"amount":0}}}}}}').field == "$.resources.gpu.amount"


def test_a_long_value_is_shown_shortened() -> None:
    assert len(str(refused(f'{HEAD},"resources":"{"x" * 10_000}"}}'))) < 300


def test_an_unknown_type_is_told_apart_from_a_damaged_message() -> None:
    error = refused('{"type":"upgrade","host":"gpu-3"}')
    assert isinstance(error, codec.UnknownTypeError)
    assert "upgrade" in str(error)
    with pytest.raises(codec.UnknownTypeError):
        codec.decode_ledger(b'{"type":"lease","x":1}')
    for damaged in ('{"type":7}', "{}", '{"type":"register"}'):
        assert not isinstance(refused(damaged), codec.UnknownTypeError)


def test_a_state_of_a_later_version_is_read_as_it_stands() -> None:
    request = b'{"amounts":{}}'
    record = codec.decode_ledger(
        b'{"type":"allocation","host":"h","worker":"w","incarnation":"i","state":"migrating","request":' + request
        + b',"since":"2026-01-01T00:00:00Z","writer":"host/h","commit":1,"source":{"partition":0,"offset":0}}'
    )  # fmt: skip
    assert isinstance(record, records.Allocation)
    assert record.state == "migrating"
    assert record.state not in records.FINAL_STATES | records.HOLDING_STATES


def test_a_time_without_its_zone_is_refused() -> None:
    with pytest.raises(codec.WireError) as caught:
        codec.decode_history(b'{"type":"note","at":"2026-01-01T00:00:00","writer":"w","event":"e","explanation":"x"}')
    assert caught.value.field == "$.at"


def test_a_body_that_contradicts_its_key_is_refused() -> None:
    body = HEAD.encode() + b"}"
    assert codec.decode_registration(body, key=b"gpu-3").host == "gpu-3"
    for key in (b"gpu-4", b"", b"\xff", b"gpu-3 "):
        with pytest.raises(codec.WireError, match="names host 'gpu-3' but the key is"):
            codec.decode_registration(body, key=key)


GARBAGE = {
    "nothing": b"",
    "no JSON": b"hello",
    "a megabyte of zeros": b"\0" * 1_000_000,
    "a megabyte of JSON": b'{"type":"register","x":"' + b"y" * 1_000_000 + b'"}',
    "deep arrays": b"[" * 60_000,
    "deep objects": b'{"a":' * 12_000,
    "deep in an unknown field": HEAD.encode() + b',"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "NaN": HEAD.encode() + b',"lease_s":NaN}',
    "Infinity": HEAD.encode() + b',"lease_s":Infinity}',
    "a lone surrogate": HEAD.encode() + b',"labels":{"a":"\\ud800"}}',
    "a lone low surrogate": HEAD.encode() + b',"labels":{"a":"\\udc00"}}',
    "bad UTF-8": HEAD.encode() + b',"labels":{"a":"\xff"}}',
    "text after the end": HEAD.encode() + b"} {}",
    "cut off": HEAD.encode(),
    "a list": b"[1]",
    "null": b"null",
    "UTF-16": (HEAD + "}").encode("utf-16"),
}


@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_a_wire_error_that_says_something(value: bytes) -> None:
    assert len(str(refused(value))) < 400


HALF_IN = {
    "a label's value": '"labels":{"a":"?"}',
    "a label's name": '"labels":{"?":"a"}',
    "the host": '"host":"?"',
    "the worker": '"worker":"?"',
    "the incarnation": '"incarnation":"?"',
    "the type": '"type":"?"',
    "a resource": '"resources":{"?":{"amount":1}}',
    "an operator": '"operators":{"?":{"gpu":{"amount":1}}}',
    "an operator's resource": '"operators":{"o":{"?":{"amount":1}}}',
    "the owner's boot": '"owner":{"pid":1,"start_ticks":1,"pid_ns":1,"boot_id":"?"}',
    "an unknown field": '"unknown":{"a":["?"]}',
    "an unknown field's name": '"?":1',
    "an unknown field's name, and others": '"a":1,"b":{"?":1},"c":1',
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("after", ["", ',"priority":0,"wait_s":null'])
@pytest.mark.parametrize("place", HALF_IN)
def test_half_a_character_is_refused_by_its_name_wherever_it_is(place: str, after: str, exact: bool) -> None:
    for half, shown in (
        (r"\ud800", r"\ud800"), (r"x\uDFFFy", r"\uDFFF"), (r"\udc00\ud800", r"\udc00"),
        (r"\ud800\ud83d\ude00", r"\ud800"),
        (r"\ud83d\ude00\udE00", r"\udE00"), (r"\\\ud800", r"\ud800"), (r"\"\ud8ff\u0041", r"\ud8ff"),
    ):  # fmt: skip
        value = f"{HEAD},{HALF_IN[place].replace('?', half)}{after}}}".encode()
        with pytest.raises(codec.WireError) as caught:
            codec.decode_registration(value, exact=exact)
        assert caught.value.problem == (
            f"{shown} is half of a character: the other half of the surrogate pair is missing "
            f"(byte {value.rindex(shown.encode())})"
        )
    for bad in (b"\xed\xa0\x80", b"\xff", b"\xc3"):
        value = f"{HEAD},{HALF_IN[place]}{after}}}".encode().replace(b"?", bad)
        with pytest.raises(codec.WireError) as caught:
            codec.decode_registration(value, exact=exact)
        assert caught.value.problem == f"the message is not UTF-8 (byte {value.index(bad)})"


@pytest.mark.parametrize("exact", [True, False])
def test_what_other_programs_put_before_or_around_json_is_named(exact: bool) -> None:
    message = f"{HEAD}}}"
    for value, named in (
        (b"\0\0\0\0\x0c" + message.encode(), "a schema registry's frame"),
        (b"\0\0\0\0\x01\x02\x04ab", "a schema registry's frame"),
        (message.encode("utf-8-sig"), "a byte order mark"),
        (message.encode("utf-16"), "is UTF-16"),
        (message.encode("utf-16-le"), "is UTF-16"),
        (message.encode("utf-16-be"), "is UTF-16"),
    ):
        with pytest.raises(codec.WireError) as caught:
            codec.decode_registration(value, exact=exact)
        assert named in caught.value.problem


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\\ud800", r"\\\\udc00", r"\ud7ff\ue000", "😀"])
def test_a_whole_pair_and_an_escaped_backslash_are_text(text: str) -> None:
    value = f'{HEAD},"labels":{{"a":"{text}"}},"unknown":"{text}"}}'.encode()
    message = codec.decode_registration(value)
    assert isinstance(message, records.Register)
    assert message.labels == {"a": json.loads(f'"{text}"')}


def test_a_registration_is_read_up_to_its_largest_size_and_no_further() -> None:
    room = codec.MAX_MESSAGE_BYTES - len(f'{HEAD},"x":""}}')
    codec.decode_registration(f'{HEAD},"x":"{"y" * room}"}}'.encode())
    assert "at most 65536 are read" in str(refused(f'{HEAD},"x":"{"y" * (room + 1)}"}}'))


def test_a_message_without_a_body_is_refused() -> None:
    with pytest.raises(codec.WireError, match="no body"):
        codec.decode_registration(None)


def test_of_a_key_given_twice_the_last_one_counts() -> None:
    """As in nearly every JSON reader; what counts is that all readers of ours agree."""
    message = codec.decode_registration(b'{"host":"a",' + HEAD.encode()[1:] + b"}")
    assert message.host == "gpu-3"


def test_an_empty_message_is_called_empty() -> None:
    with pytest.raises(codec.WireError, match="the message is empty; a JSON object is needed"):
        codec.decode_registration(b"")

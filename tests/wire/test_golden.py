"""Bytes that were written once stay readable, and what is written today is what the golden files say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from outfitter_proto import codec, records
from outfitter_proto.records import AllocationState
from support.wire_samples import KEYS, SAMPLES

HERE = Path(__file__).parent
GOLDEN = {path.stem: path for path in sorted((HERE / "golden" / "v0.1").glob("*.json"))}
FOREIGN = sorted((HERE / "golden" / "foreign").glob("*.json"))
DECODERS = {
    "register": codec.decode_registration,
    "heartbeat": codec.decode_registration,
    "deregister": codec.decode_registration,
    "allocation": codec.decode_ledger,
    "host": codec.decode_ledger,
    "device": codec.decode_ledger,
    "checkpoint": codec.decode_ledger,
    "transition": codec.decode_history,
    "note": codec.decode_history,
    "refresh": codec.decode_history,
    "put": codec.decode_history,
    "snapshot": codec.decode_history,
    "commit": codec.decode_history,
    "dead-letter": codec.decode_dead_letter,
    "beat": codec.decode_beat,
    "cordon": codec.decode_ledger,
    "cordon-order": codec.decode_order,
}
KINDS = [kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
KINDS.remove(msgspec.Struct)


def decoded(value: bytes) -> msgspec.Struct:
    return DECODERS[msgspec.json.decode(value)["type"]](value)


def test_every_sample_has_its_golden_file() -> None:
    assert GOLDEN.keys() == SAMPLES.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_mean_what_they_meant(name: str) -> None:
    value = decoded(GOLDEN[name].read_bytes())
    wanted = SAMPLES[name]
    if isinstance(value, records.Transition):
        # the record within may be of a later version, and so is kept as it came
        value = msgspec.structs.replace(value, record=codec.decode_ledger(bytes(codec.encode(value.record))))
    if isinstance(value, records.Snapshot) and isinstance(wanted, records.Snapshot):
        assert {key: bytes(record) for key, record in value.records.items()} == {
            key: bytes(record) for key, record in wanted.records.items()
        }
        value, wanted = (msgspec.structs.replace(one, records={}) for one in (value, wanted))
    assert value == wanted


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_are_written_again_to_the_byte(name: str) -> None:
    golden = GOLDEN[name].read_bytes()
    assert codec.encode(decoded(golden)) == golden
    assert codec.encode(SAMPLES[name]) == golden


def test_every_type_and_every_state_has_a_golden_file() -> None:
    types = {msgspec.json.decode(path.read_bytes())["type"] for path in GOLDEN.values()}
    assert types == DECODERS.keys()
    states = {sample.state for sample in SAMPLES.values() if isinstance(sample, records.Allocation)}
    assert states == set(AllocationState)


def test_every_field_has_a_golden_file_in_which_it_is_said() -> None:
    unsaid = {(kind, field.name) for kind in KINDS for field in structs.fields(kind)}
    for sample in SAMPLES.values():
        unsaid -= set(said(sample))
    assert unsaid == set()


def said(value: object) -> Iterator[tuple[type, str]]:
    """The fields, of a value and of what is in it, that have another value than the one they have when left out."""
    if isinstance(value, msgspec.Struct):
        for field in structs.fields(value):
            part = getattr(value, field.name)
            if field.required or part != (
                field.default_factory() if callable(field.default_factory) else field.default
            ):
                yield type(value), field.name
            yield from said(part)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from said(part)


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.stem)
def test_what_other_languages_write_is_read(path: Path) -> None:
    assert decoded(path.read_bytes()).host == "gpu-3"


def test_a_lease_left_out_is_not_a_lease_of_null() -> None:
    left_out = codec.decode_registration((HERE / "golden" / "foreign" / "register-shortest.json").read_bytes())
    null = codec.decode_registration(GOLDEN["register-no-lease"].read_bytes())
    assert left_out.lease_s is msgspec.UNSET
    assert null.lease_s is None


@pytest.mark.parametrize("name", KEYS)
def test_records_stand_under_the_documented_keys(name: str) -> None:
    assert SAMPLES[name].key.encode() == KEYS[name]


@pytest.mark.parametrize("name", ["allocation-pending", "host", "device", "cordon", "checkpoint"])
def test_a_ledger_record_under_another_key_is_refused(name: str) -> None:
    assert codec.decode_ledger(GOLDEN[name].read_bytes(), key=KEYS[name]) == SAMPLES[name]
    with pytest.raises(codec.WireError, match="belongs under the key"):
        codec.decode_ledger(GOLDEN[name].read_bytes(), key=KEYS[name] + b"x")


def test_a_sign_of_life_under_another_key_is_refused() -> None:
    assert codec.decode_beat(GOLDEN["beat"].read_bytes(), key=KEYS["beat"]) == SAMPLES["beat"]
    with pytest.raises(codec.WireError, match="belongs under the key 'host/gpu-3'"):
        codec.decode_beat(GOLDEN["beat"].read_bytes(), key=b"host/gpu-4")


def test_an_order_under_another_key_or_with_a_bad_name_is_refused() -> None:
    assert codec.decode_order(GOLDEN["cordon-order"].read_bytes(), key=KEYS["cordon-order"]) == SAMPLES["cordon-order"]
    with pytest.raises(codec.WireError, match="belongs under the key 'k3v9-01'"):
        codec.decode_order(GOLDEN["cordon-order"].read_bytes(), key=b"k3v9-02")
    with pytest.raises(codec.WireError, match=r"'gpu/3' is no valid name \(at \$\.host\)"):
        codec.decode_order(GOLDEN["cordon-order"].read_bytes().replace(b'"gpu-3"', b'"gpu/3"'))
    with pytest.raises(codec.WireError, match=r"an empty text names nothing; .* \(at \$\.device\)"):
        codec.decode_order(GOLDEN["cordon-order-that-ended"].read_bytes().replace(b'"GPU-1"', b'""'))


@pytest.mark.parametrize("field", ["at", "until", "ended_at"])
@pytest.mark.parametrize("time", ["9999-12-31T23:59:59-05:00", "0001-01-01T00:00:00+05:00"])
def test_an_order_whose_time_is_beyond_utcs_is_refused(field: str, time: str) -> None:
    order = {**json.loads(GOLDEN["cordon-order"].read_bytes()), field: time}
    with pytest.raises(codec.WireError, match=rf"is in UTC no time of the years 1 to 9999 \(at \$\.{field}\)"):
        codec.decode_order(json.dumps(order).encode())
    edge = json.dumps({**order, field: time[:19] + "Z"}).encode()
    assert codec.decode_order(edge).id == order["id"]


def test_an_order_that_is_longer_than_its_topic_takes_is_refused() -> None:
    order = json.loads(GOLDEN["cordon-order"].read_bytes())
    rest = codec.MAX_ORDER_BYTES - len(json.dumps({**order, "device": ""}))
    assert codec.decode_order(json.dumps({**order, "device": "x" * rest}).encode()).device == "x" * rest
    with pytest.raises(codec.WireError, match="16385 bytes; at most 16384 are read"):
        codec.decode_order(json.dumps({**order, "device": "x" * (rest + 1)}).encode())

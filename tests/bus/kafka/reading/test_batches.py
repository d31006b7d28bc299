"""Record batches as they lie in a fetch answer: what is skipped, decoded, and refused."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import struct
import sys
import tracemalloc
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import anyio
import cramjam
import pytest
from aiokafka.record._crc32c import crc as crc32c
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_proto.bus import BusUnavailableError
from outfitter_proto.bus.kafka.reading import batches, codecs
from outfitter_proto.bus.kafka.reading.reader import KafkaReader
from outfitter_proto.bus.patience import Patience
from support import floods
from support.bus.packing_bus import packed, read
from support.managers.in_process import heartbeat, register

CONTROL = 0x20
TRANSACTIONAL = 0x10


def batch_of(
    *values: bytes | None,
    base: int = 0,
    producer: int = 7,
    codec: int = 0,
    transactional: bool = False,
    keyless: bool = False,
) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=codec, is_transactional=int(transactional), producer_id=producer, producer_epoch=0,
        base_sequence=0, batch_size=2**30,
    )  # fmt: skip
    for number, value in enumerate(values):
        builder.append(number, 1_000 + number * (not keyless), None if keyless else b"k%d" % number, value, [])
    data = bytearray(builder.build())
    struct.pack_into(">q", data, 0, base)  # the base offset is the broker's, outside the checksum
    return bytes(data)


def with_attributes(data: bytes, attributes: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(">h", changed, 21, attributes)
    return bytes(changed)


def visible(data: bytes, aborted: list[tuple[int, int]]) -> list[int]:
    return [batch.base for batch, seen in batches.committed(batches.split(data), aborted) if seen]


def test_a_batch_cut_off_at_the_end_is_left_for_the_next_fetch() -> None:
    whole, cut = batch_of(b"a", base=5), batch_of(b"b", base=6)
    for length in range(len(cut)):
        assert [batch.base for batch in batches.split(whole + cut[:length])] == [5]
    assert [batch.next for batch in batches.split(whole + cut)] == [6, 7]


def test_records_keep_their_offsets_keys_values_and_times() -> None:
    [batch] = batches.split(batch_of(b"x", None, b"", base=40))
    found = batches.messages(batch, "t", 3)
    assert [(m.topic, m.partition, m.offset, m.key, m.value, m.timestamp_ms) for m in found] == [
        ("t", 3, 40, b"k0", b"x", 1000),
        ("t", 3, 41, b"k1", None, 1001),
        ("t", 3, 42, b"k2", b"", 1002),
    ]


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
@given(values=st.lists(st.none() | st.binary(max_size=300), min_size=1, max_size=20), times=st.integers(1, 500))
@settings(deadline=None, max_examples=20)
def test_what_any_codec_packed_is_read_as_it_was(codec: int, values: list[bytes | None], times: int) -> None:
    written = [None if value is None else value * times for value in values]
    [batch] = batches.split(batch_of(*written, codec=codec))
    assert batch.attributes & 7 == codec
    assert [m.value for m in batches.messages(batch, "t", 0)] == written


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
@given(data=st.binary(max_size=2000))
def test_what_no_codec_packed_is_an_unreadable_batch_and_nothing_worse(codec: int, data: bytes) -> None:
    for bytes_ in (data, b"\x82SNAPPY\x00" + data):
        with contextlib.suppress(codecs.UnpackingError):
            codecs.unpack(codec, bytes_)


def test_a_gzip_that_is_cut_off_anywhere_is_none() -> None:
    stream = gzip.compress(b"first") + gzip.compress(b"second")
    first = len(gzip.compress(b"first"))
    whole = {0, first, first + 1}  # one byte is no beginning of a member
    for cut in {*range(len(stream))} - whole:
        with pytest.raises(codecs.UnpackingError, match="gzip"):
            codecs.unpack(codecs.GZIP, stream[:cut])


def test_java_s_snappy_stream_is_read() -> None:
    blocks = [b"a" * 5000, b"", b"b"]
    packed = [bytes(cramjam.snappy.compress_raw(block)) for block in blocks]
    stream = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1) + b"".join(struct.pack(">i", len(p)) + p for p in packed)
    assert codecs.unpack(codecs.SNAPPY, stream) == b"".join(blocks)
    for cut in range(16, len(stream)):
        if cut not in (16, 20 + len(packed[0]), 24 + len(packed[0]) + len(packed[1])):
            with pytest.raises(codecs.UnpackingError, match="snappy"):
                codecs.unpack(codecs.SNAPPY, stream[:cut])


def test_a_wrong_checksum_is_corruption_and_not_a_bad_message() -> None:
    data = bytearray(batch_of(b"value"))
    data[-3] ^= 1
    [batch] = batches.split(bytes(data))
    with pytest.raises(batches.CorruptBatchError, match="checksum"):
        batches.messages(batch, "t", 0)


@pytest.mark.parametrize(("codec", "name"), [(2, "snappy"), (3, "lz4"), (4, "zstd")])
def test_without_a_library_for_it_a_codec_is_refused_by_name(
    codec: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [batch] = batches.split(batch_of(b"x", codec=codec))
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(batches.UnreadableBatchError, match=name):
        batches.messages(batch, "t", 0)


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_batch_that_unpacks_to_more_than_the_limit_is_refused_in_bounded_memory(codec: int) -> None:
    just_so = batch_of(bytes(codecs.MAX_UNPACKED - 20), codec=codec, transactional=True)
    just = batches.messages(next(batches.split(just_so)), "t", 0)
    assert len(just[0].value or b"") == codecs.MAX_UNPACKED - 20
    [bomb] = batches.split(batch_of(bytes(50_000_000), codec=codec))
    tracemalloc.start()
    try:
        with pytest.raises(batches.UnreadableBatchError, match="more than"):
            batches.messages(bomb, "t", 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * codecs.MAX_UNPACKED


def alike(number: int, *, labels: int = 0, heartbeat: bool = False) -> bytes:
    """A message that differs from its neighbours in a number alone, or not at all."""
    if heartbeat:
        return b'{"type":"heartbeat","host":"gpu-3","worker":"tm-17","incarnation":"run-1"}'
    body = {"type": "register", "host": "gpu-3", "worker": f"tm-{number}", "incarnation": "run-1", "lease_s": 600,
            "resources": {"gpu": {"amount": 1}},
            "labels": {f"label-{place}": "the same value of every worker " for place in range(labels)}}  # fmt: skip
    return json.dumps(body, separators=(",", ":")).encode()


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
@pytest.mark.parametrize("like", [{}, {"labels": 20}, {"heartbeat": True}], ids=str)
def test_a_thousand_messages_that_are_alike_are_read_with_room_to_spare(codec: int, like: dict[str, Any]) -> None:
    [batch] = batches.split(batch_of(*[alike(number, **like) for number in range(1000)], codec=codec))
    assert len(batches.messages(batch, "t", 0)) == 1000
    packed = batch.data[61:]
    assert 2 * len(codecs.unpack(codec, packed)) < codecs.MOST_TIMES * len(packed)


@pytest.mark.parametrize("codec", [codecs.GZIP, codecs.ZSTD])
@pytest.mark.parametrize("level", [codecs.FAST, codecs.SMALL])
def test_a_finished_batch_that_is_packed_is_read_as_it_was(codec: int, level: int) -> None:
    values = [b'{"type":"transition","worker":"tm-%d"}' % number for number in range(1000)]
    plain = batch_of(*values, transactional=True)
    packed = bytes(batches.packed(plain, codec, level))
    assert 4 * len(packed) < len(plain)
    [as_it_was], [as_it_is] = batches.split(plain), batches.split(packed)
    assert batches.messages(as_it_is, "t", 0) == batches.messages(as_it_was, "t", 0)
    assert (as_it_is.is_transactional, as_it_is.producer, as_it_is.next) == (True, 7, 1000)


@pytest.mark.parametrize("codec", [1, 4])
def test_a_batch_of_workers_that_unpacks_to_too_many_times_its_size_is_refused(codec: int) -> None:
    """Far below the limit that there is for any batch."""
    data = batch_of(*[b"A" * 60_000] * 20, codec=codec)
    [bomb] = batches.split(data)
    with pytest.raises(batches.UnreadableBatchError, match="unpacks to more than"):
        batches.messages(bomb, "t", 0)
    [of_a_manager] = batches.split(batch_of(*[b"A" * 60_000] * 20, codec=codec, transactional=True))
    assert len(batches.messages(of_a_manager, "t", 0)) == 20


def test_a_batch_of_many_records_that_take_less_than_a_byte_each_is_refused() -> None:
    few = batch_of(*[b""] * batches.FEW_RECORDS, codec=4, keyless=True)
    assert len(batches.messages(next(batches.split(few)), "t", 0)) == batches.FEW_RECORDS
    [many] = batches.split(batch_of(*[b""] * 15_000, codec=4, keyless=True))
    assert len(many.data) < 15_000
    with pytest.raises(batches.UnreadableBatchError, match="15000 records"):
        batches.messages(many, "t", 0)


def one_batch(values: Iterable[dict[str, Any]], codec: int = codecs.ZSTD, **how: Any) -> batches.RecordBatch:
    [batch] = batches.split(batch_of(*map(floods.compact, values), codec=codec, **how))
    return batch


def test_a_batch_of_many_registrations_that_take_few_bytes_each_is_refused() -> None:
    """A batch like those with which a flood kept a manager from others' messages."""
    [few] = packed(map(floods.compact, map(floods.pair, range(batches.FEW_RECORDS))))
    assert len(read(few)) == batches.FEW_RECORDS
    [many] = packed(map(floods.compact, map(floods.pair, range(10_000))))
    assert len(many) < 4 * 10_000
    [letter] = read(many)
    assert letter.key is None
    [batch] = batches.split(struct.pack(">q", 0) + many[8:])
    with pytest.raises(batches.UnreadableBatchError, match=r"10000 messages besides heartbeats; at most [5-7]... are"):
        batches.messages(batch, "t", 0)
    unlike = one_batch(register(f"w{n}", f"{n * 2654435761**4 % 2**128:032x}", gpu=1) for n in range(5000))
    assert len(batches.messages(unlike, "t", 0)) == 5000
    of_a_manager = with_attributes(batch.data, codecs.ZSTD | TRANSACTIONAL)
    assert len(batches.messages(next(batches.split(checked(of_a_manager))), "t", 0)) == 10_000


@pytest.mark.parametrize("codec", [codecs.NONE, codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD])
@pytest.mark.parametrize(
    ("workers", "times", "incarnation"),
    [(5000, 1, "run-1"), (5000, 1, "{}"), (5000, 1, "{:032x}"), (500, 10, "{:032x}"), (50, 100, "{:032x}")],
    ids=["alike", "numbers", "random", "after an outage", "after a long outage"],
)
def test_heartbeats_are_read_however_many_a_producer_has_gathered(
    codec: int, workers: int, times: int, incarnation: str
) -> None:
    """By linger.ms, or while the brokers were away. Were they refused, leases would end."""
    said = [heartbeat(f"tm-{n}", incarnation.format(n * 2654435761**4 % 2**128)) for n in range(workers)]
    assert len(batches.messages(one_batch(said * times, codec), "t", 0)) == workers * times


@pytest.mark.parametrize("name", [name for name in floods.FLOODS if name.endswith("in turn") and "ends" not in name])
def test_what_repeats_further_back_than_gzip_sees_is_refused(name: str) -> None:
    """Else the answers would take up to a hundred times as many bytes as their batch."""
    _, make = floods.FLOODS[name]
    length = len(floods.compact(make(0)))
    values = [make(n) for n in range(min(1000, 1_000_000 // length))]
    with pytest.raises(batches.UnreadableBatchError, match="more than 2 times its size with gzip"):
        batches.messages(one_batch(values), "t", 0)
    for codec in (codecs.NONE, codecs.GZIP):
        assert len(batches.messages(one_batch(values, codec), "t", 0)) == len(values)
    assert len(batches.messages(one_batch(values, transactional=True), "t", 0)) == len(values)


@pytest.mark.parametrize("labels", [0, 2, 20])
@pytest.mark.parametrize("count", [1, 10, 100, 1000])
def test_registrations_that_are_alike_are_read_however_a_producer_packs_them(labels: int, count: int) -> None:
    for codec in (codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD):
        [batch] = batches.split(batch_of(*[alike(number, labels=labels) for number in range(count)], codec=codec))
        assert len(batches.messages(batch, "t", 0)) == count


def test_a_batch_of_more_records_than_anybody_sends_is_refused_whole() -> None:
    most = batch_of(*([b""] * batches.MAX_RECORDS), codec=4)
    assert len(batches.messages(next(batches.split(most)), "t", 0)) == batches.MAX_RECORDS
    more = batch_of(*([b""] * (batches.MAX_RECORDS + 1)), codec=4)
    with pytest.raises(batches.UnreadableBatchError, match="20001 records"):
        batches.messages(next(batches.split(more)), "t", 0)


def test_an_unreadable_batch_is_one_message_without_a_key_at_its_last_offset() -> None:
    [batch] = batches.split(batch_of(b"a", b"b", base=9))
    raw = batches.raw_message(batch, "t", 1, batches.UnreadableBatchError(9, "is no gzip"))
    assert raw.unreadable == "the record batch at offset 9 is no gzip"
    assert (raw.key, raw.offset, raw.partition) == (None, 10, 1)
    assert raw.value == batch.data[61:]


def test_records_of_an_aborted_transaction_are_skipped_until_its_marker() -> None:
    data = (
        batch_of(b"committed", base=0, producer=1, transactional=True)
        + with_attributes(batch_of(b"m", base=1, producer=1, transactional=True), TRANSACTIONAL | CONTROL)
        + batch_of(b"aborted", base=2, producer=1, transactional=True)
        + batch_of(b"other", base=3, producer=2, transactional=True)
        + batch_of(b"plain", base=4, producer=-1)
        + with_attributes(batch_of(b"m", base=5, producer=1, transactional=True), TRANSACTIONAL | CONTROL)
        + batch_of(b"later", base=6, producer=1, transactional=True)
    )
    assert visible(data, [(1, 2)]) == [0, 3, 4, 6]
    assert visible(data, []) == [0, 2, 3, 4, 6]


def test_an_emptied_control_batch_ends_its_producers_transaction_too() -> None:
    emptied = with_attributes(batch_of(b"m", base=1, producer=1, transactional=True), TRANSACTIONAL | CONTROL)[:61]
    emptied = emptied[:8] + struct.pack(">i", 61 - 12) + emptied[12:]
    data = (
        batch_of(b"aborted", base=0, producer=1, transactional=True)
        + emptied
        + batch_of(b"later", base=2, producer=1, transactional=True)
    )
    assert visible(data, [(1, 0)]) == [2]


# --- what cannot be true: a bad broker's, or somebody's in between ---------------------------------------


def checked(data: bytes) -> bytes:
    """With the right checksum, whatever else is wrong with it."""
    return data[:17] + struct.pack(">I", crc32c(data[21:])) + data[21:]


def with_length(data: bytes, length: int) -> bytes:
    return data[:8] + struct.pack(">i", length) + data[12:]


def with_records(data: bytes, records: bytes, count: int) -> bytes:
    """Other records, uncompressed."""
    return checked(with_length(data[:57] + struct.pack(">i", count) + records, 49 + len(records)))


def varint(number: int) -> bytes:
    coded = (number << 1) ^ (number >> 63)
    out = bytearray()
    while coded > 0x7F:
        out.append(coded & 0x7F | 0x80)
        coded >>= 7
    return bytes((*out, coded))


@pytest.mark.parametrize("magic", [-128, 0, 1, 2, 3])
@pytest.mark.parametrize("room", [0, 5, 49, 4000])
def test_a_length_that_no_batch_can_have_is_corruption_and_never_reaches_the_decoder(magic: int, room: int) -> None:
    least = 49 if magic == 2 else 14
    data = batch_of(b"v" * room)
    for length in (*range(-20, least), -(2**31), -(2**31) + 12, -len(data), -12 - len(data)):
        lying = with_length(data[:16] + struct.pack(">b", magic) + data[17:], length)
        for found in (lying, batch_of(b"first", base=0) + lying):
            with pytest.raises(batches.CorruptBatchError, match="too few"):
                list(batches.split(found + bytes(100)))


@pytest.mark.parametrize("base", [-1, -(2**63), 2**63 - 1, 4])
def test_a_batch_that_begins_before_the_last_one_ended_or_where_no_offset_is_is_corruption(base: int) -> None:
    with pytest.raises(batches.CorruptBatchError, match="has the offsets"):
        list(batches.split(batch_of(b"a", b"b", base=3) + batch_of(b"c", base=base)))


@pytest.mark.parametrize("last_delta", [-1, -2, -(2**31)])
def test_a_batch_that_ends_before_it_begins_is_corruption(last_delta: int) -> None:
    data = batch_of(b"a", base=7)
    with pytest.raises(batches.CorruptBatchError, match="has the offsets"):
        list(batches.split(data[:23] + struct.pack(">i", last_delta) + data[27:]))


@pytest.mark.parametrize("deltas", [(0, 1_000_000), (1, 0), (0, 0), (-1, 0), (2**62,)])
def test_records_that_are_numbered_outside_of_their_batch_are_unreadable(deltas: tuple[int, ...]) -> None:
    """Brokers take them; whoever believed them would leave out what others send."""
    body = [b"\x00" + varint(0) + varint(delta) + varint(-1) + varint(-1) + varint(0) for delta in deltas]
    records = b"".join(varint(len(one)) + one for one in body)
    [batch] = batches.split(with_records(batch_of(*[b""] * len(deltas), base=40), records, len(deltas)))
    with pytest.raises(batches.UnreadableBatchError, match="numbers its records otherwise"):
        batches.messages(batch, "t", 0)


EXTREMES = [
    sign * 2**bits + near
    for bits in (0, 7, 14, 21, 28, 31, 32, 33, 56, 62, 63)
    for sign in (1, -1)
    for near in (-1, 0, 1)
]


@pytest.mark.parametrize("where", range(5))
def test_a_record_that_lies_about_any_length_is_an_unreadable_batch_and_nothing_worse(where: int) -> None:
    """The record's own length, its key's, its value's, and how many headers it has."""
    for lie in EXTREMES:
        if not -(2**63) <= lie < 2**63:
            continue
        told = [b"\x00" + varint(0) + varint(0), varint(1) + b"k", varint(1) + b"v", varint(0)]
        if where in (1, 2):
            told[where] = varint(lie) + b"x"
        elif where == 3:
            told[3] = varint(lie)
        elif where == 4:
            told[3] = varint(1) + varint(lie)
        body = b"".join(told)
        records = varint(lie if where == 0 else len(body)) + body
        [batch] = batches.split(with_records(batch_of(b""), records, 1))
        with contextlib.suppress(batches.UnreadableBatchError):
            batches.messages(batch, "t", 0)


@given(
    values=st.lists(st.none() | st.binary(max_size=40), min_size=1, max_size=4),
    codec=st.sampled_from([0, 1, 2, 3, 4]),
    changes=st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=8)), max_size=6),
    cut=st.integers(0, 400),
    right=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_whatever_a_broker_sends_ends_in_batches_or_in_a_declared_error(
    values: list[bytes | None], codec: int, changes: list[tuple[int, bytes]], cut: int, right: bool
) -> None:
    data = bytearray(batch_of(*values, codec=codec) + batch_of(*values, base=len(values)))
    for at, new in changes:
        data[at : at + len(new)] = new
    found = checked(bytes(data)) if right else bytes(data)
    position = -1
    try:
        for batch, _ in batches.committed(batches.split(found[: len(found) - cut]), []):
            assert position < batch.next
            position = batch.next
            with contextlib.suppress(batches.CorruptBatchError, batches.UnreadableBatchError):
                offsets = [message.offset for message in batches.messages(batch, "t", 0)]
                assert offsets == sorted(set(offsets))
                assert not offsets or batch.base <= offsets[0] <= offsets[-1] < batch.next
    except batches.CorruptBatchError:
        pass


def in_frames(codec: int, pieces: list[bytes]) -> bytes:
    pack = {1: cramjam.gzip.compress, 3: cramjam.lz4.compress, 4: cramjam.zstd.compress}[codec]
    return b"".join(bytes(pack(piece)) for piece in pieces)


@pytest.mark.parametrize("codec", [1, 3, 4])
@pytest.mark.parametrize("cuts", [(), (5,), (5, 9), tuple(range(1, 60))])
def test_records_packed_in_several_members_are_all_read(codec: int, cuts: tuple[int, ...]) -> None:
    """A broker counts the records of all of them."""
    plain = batch_of(*[b"v%d" % n for n in range(10)])
    records = plain[61:]
    ends = (0, *cuts, len(records))
    packed = in_frames(codec, [records[a:b] for a, b in itertools.pairwise(ends)])
    data = checked(with_attributes(with_length(plain[:61] + packed, 49 + len(packed)), codec))
    [batch] = batches.split(data)
    assert [message.value for message in batches.messages(batch, "t", 0)] == [b"v%d" % n for n in range(10)]


@pytest.mark.parametrize("rest", [bytes(512), b"x", bytes(20) + b"x", b"\x1f"])
def test_what_follows_the_last_gzip_member_is_ignored_as_java_does(rest: bytes) -> None:
    for text in (b"one", b""):
        assert codecs.unpack(codecs.GZIP, in_frames(1, [text]) + rest) == text
    with pytest.raises(codecs.UnpackingError, match=r"is not gzip|cut off"):
        codecs.unpack(codecs.GZIP, rest)


def test_snappy_streams_of_java_that_follow_each_other_are_all_read() -> None:
    def stream(piece: bytes) -> bytes:
        block = bytes(cramjam.snappy.compress_raw(piece))
        return codecs._XERIAL + bytes(8) + len(block).to_bytes(4, "big") + block

    assert codecs.unpack(codecs.SNAPPY, stream(b"one") + stream(b"two")) == b"onetwo"
    with pytest.raises(codecs.UnpackingError, match="cut off"):
        codecs.unpack(codecs.SNAPPY, stream(b"one") + stream(b"two")[:-1])
    with pytest.raises(codecs.UnpackingError, match="cut off"):
        codecs.unpack(codecs.SNAPPY, stream(b"one") + codecs._XERIAL)


def test_members_that_together_unpack_to_more_than_the_limit_are_refused() -> None:
    member = in_frames(1, [bytes(codecs.MAX_UNPACKED // 2 + 1)])
    assert len(codecs.unpack(codecs.GZIP, member)) == codecs.MAX_UNPACKED // 2 + 1
    with pytest.raises(codecs.UnpackingError, match="more than"):
        codecs.unpack(codecs.GZIP, member * 2)
    assert codecs.unpack(codecs.GZIP, in_frames(1, [b""] * 3000 + [b"end"])) == b"end"


class LyingLeader:
    """Answers a reader's fetches, one after the other, with whatever bytes are said; the last one for ever."""

    url = "kafka://liar:9092"
    login = SimpleNamespace(url=url)

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []
        self.patience = Patience()

    async def ask_leader(self, topic: str, partition: int, request: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        self.asked.append(request._topics[0][1][0][1])
        data = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return 0, 0, 0, 0, None, data

    def forget(self) -> None: ...

    async def aclose(self) -> None: ...


@pytest.mark.parametrize(
    "lie",
    [
        with_length(batch_of(b"x", base=2), 20),
        with_length(batch_of(b"x", base=2), -12),
        with_length(batch_of(b"x", base=2), 2**31 - 1),
        batch_of(b"x", base=0),
        batch_of(b"x", base=-5),
        b"\xff" * 100,
        b"\x00" * 16,
        b"\x00" * 4000,
    ],
    ids=["short", "negative", "endless", "old", "before all", "ones", "cut off", "zeros"],
)
@pytest.mark.parametrize("committed", [True, False])
async def test_a_reader_gives_what_was_good_then_says_what_was_not_and_goes_on_once_it_is(
    lie: bytes, committed: bool
) -> None:
    good = batch_of(b"a", b"b", base=0)
    leader = LyingLeader(good + lie, lie, batch_of(b"c", base=2), b"")
    async with KafkaReader(leader, "t", 0, 0, committed=committed, lenient=not committed) as reader:  # type: ignore[arg-type]
        with anyio.fail_after(10):
            values = [message.value for message in await reader.fetch()]
            with pytest.raises(BusUnavailableError, match="t/0"):
                await reader.fetch()
            values += [message.value for message in await reader.fetch()]
    assert values == [b"a", b"b", b"c"]

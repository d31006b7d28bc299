"""What is fuzzed: each parser of foreign bytes, as a function that ends in what its documentation says, or raises.

A target raises for a defect only: an error that its parser does not declare, or an answer that cannot be.
"""

from __future__ import annotations

import atexit
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from io import BytesIO
from pathlib import Path

import msgspec
from aiokafka.cluster import ClusterMetadata
from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest as AnyMetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, InitProducerIdRequest
from aiokafka.record._crc32c import crc as crc32c

from outfitter_drivers.api import Device, PermanentDriverError, TemporaryDriverError
from outfitter_drivers.gpu import coordination as gpu_coordination
from outfitter_drivers.gpu.compute_processes import Processes
from outfitter_drivers.gpu.nvidia import NvidiaDriver, parse_gpus, selected_by_index
from outfitter_drivers.nvidia import cdi, inventory, pci
from outfitter_drivers.nvidia.driver import why_uncountable
from outfitter_drivers.nvidia.faults import Faults
from outfitter_drivers.nvidia.protocol import decode_answer
from outfitter_drivers.nvidia.snapshot import Snapshot
from outfitter_drivers.nvidia.xid import XidClasses
from outfitter_drivers.script import ScriptOutcome, parse_indexes
from outfitter_drivers.support.description import described_device
from outfitter_drivers.support.device_name import is_blank
from outfitter_proto import clauses, codec
from outfitter_proto.bus import BusError, TopicSpec
from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.embedded import housekeeping, log
from outfitter_proto.bus.kafka import authorization
from outfitter_proto.bus.kafka.connecting import answers
from outfitter_proto.bus.kafka.connecting.cluster import Cluster
from outfitter_proto.bus.kafka.connecting.connection import Connector
from outfitter_proto.bus.kafka.connecting.login import login_of
from outfitter_proto.bus.kafka.connecting.protocol import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    MetadataRequest,
    coordinator_of,
)
from outfitter_proto.bus.kafka.reading import batches, codecs
from outfitter_proto.names import check_name
from outfitter_proto.records import Clause, Health
from outfitter_proto.support.units import parse_duration
from outfitter_service.config import ConfigurationError, ResourceConfig, options, sources
from outfitter_service.config.names import resource_names
from outfitter_service.requests import RequestError, annotated_amounts, request_in_pod_template
from outfitter_service.webhook import review
from outfitter_verify import wire
from outfitter_verify.ledger.choices import meets
from outfitter_verify.registrations.messages import classify

Target = Callable[[bytes], None]

_FOLDER = tempfile.TemporaryDirectory(prefix="outfitter-fuzz-")
atexit.register(_FOLDER.cleanup)
_NOWHERE = Path("/nowhere")
_CRC_AT, _CRC_END, _LEAST_CHECKED = 17, 21, 61
_UUIDS = frozenset(("GPU-a", "GPU-b"))
_OWNER = gpu_coordination.ScriptOwner(7, "5", "1", "boot")


def registrations(data: bytes) -> None:
    with suppress(codec.WireError):
        assert codec.decode_registration(data, key=b"h").host == "h"


def records(data: bytes) -> None:
    for decode in (codec.decode_ledger, codec.decode_history, codec.decode_dead_letter):
        with suppress(codec.WireError):
            codec.encode(decode(data))


def record_batches(data: bytes) -> None:
    """As they came, and with the right checksum of the first."""
    _decode(data)
    if len(data) >= _LEAST_CHECKED:
        end = min(len(data), 12 + max(int.from_bytes(data[8:12], "big", signed=True), 0))
        _decode(data[:_CRC_AT] + crc32c(data[_CRC_END:end]).to_bytes(4, "big") + data[_CRC_END:])


def _decode(data: bytes) -> None:
    position = -1
    with suppress(batches.CorruptBatchError):
        for batch in batches.split(data):
            assert position < batch.next, "it goes back"
            position = batch.next
            with suppress(batches.CorruptBatchError, batches.UnreadableBatchError):
                offsets = [message.offset for message in batches.messages(batch, "t", 0)]
                assert all(batch.base <= offset < batch.next for offset in offsets)


def packed_records(data: bytes) -> None:
    if data:
        with suppress(codecs.UnpackingError):
            assert len(codecs.unpack(data[0] % 8, data[1:])) <= max(codecs.MAX_UNPACKED, len(data))


_LEADER = Node("127.0.0.1", 9092)
_ASKED = [
    request.prepare({request.API_KEY: (version, version)})
    for version, request in (
        (10, MetadataRequest(["t"])), (11, FetchRequest(500, 1, 99, 1, [("t", [(0, 0, 99)])])),
        (4, FetchRequest(500, 1, 99, 1, [("t", [(0, 0, 99)])])), (3, OffsetRequest(-1, 1, [("t", [(0, -1)])])),
        (7, ProduceRequest(transactional_id=None, required_acks=-1, timeout=9, topics=[("t", [(0, b"")])])),
        (2, DescribeConfigsRequest([(2, "t", None)])), (3, CreateTopicsRequest([("t", 1, 1, [], [])], 9, False)),
        (1, coordinator_of("transactional-id", "t")), (0, DescribeTransactionsRequest("t")),
        (0, DescribeProducersRequest("t", 0)), (0, InitProducerIdRequest("t", 9)), (5, AnyMetadataRequest(["t"])),
        (0, AddPartitionsToTxnRequest("t", 1, 0, [("t", [0])])),
    )
]  # fmt: skip


def broker_answers(data: bytes) -> None:
    """The first byte says what was asked. Whoever reads the answer gets it, or an error of the bus."""
    request = _ASKED[data[0] % len(_ASKED) if data else 0]
    try:
        answer = answers.decoded(request, BytesIO(data[1:]))
    except answers.UnusableAnswerError:
        return
    assert answers.throttled_s(answer) >= 0
    with suppress(BusError):
        match request.API_KEY:
            case MetadataRequest.API_KEY if request.API_VERSION == _ASKED[0].API_VERSION:
                Cluster(Connector(login_of("kafka://h")))._learn("t", _LEADER, answer)
                authorization._granted(answer)
            case AnyMetadataRequest.API_KEY:
                ClusterMetadata().update_metadata(answer)
            case (
                FetchRequest.API_KEY | OffsetRequest.API_KEY | ProduceRequest.API_KEY | DescribeProducersRequest.API_KEY
            ):
                row = answers.row_of(answer)
                assert row is None or row[0] == 0
            case DescribeConfigsRequest.API_KEY:
                [(_, _, _, _, entries)] = answer.resources
                assert len({setting: value for setting, value, *_ in entries}) <= len(entries)
            case DescribeTransactionsRequest.API_KEY:
                [(_, name, *_)] = answer.transaction_states
                assert name == "t"


def toml(data: bytes) -> None:
    _configuration("a.toml", data)


def yaml(data: bytes) -> None:
    _configuration("config.yaml", data)


def flink_conf(data: bytes) -> None:
    _configuration("flink-conf.yaml", data)


def _configuration(name: str, data: bytes) -> None:
    path = Path(_FOLDER.name) / name
    path.write_bytes(data)
    with suppress(ConfigurationError):
        for entry in sources.read(path).entries:
            if entry.key == options.LIST_KEY:
                resource_names(entry.value)


def script_output(data: bytes) -> None:
    with suppress(PermanentDriverError, TemporaryDriverError):
        indexes = parse_indexes(data)
        assert len(set(indexes)) == len(indexes)
        assert not any(map(is_blank, indexes))


def nvidia_smi(data: bytes) -> None:
    """As the rows alone, as either output of a call that fails, and as the answer about processes."""
    rows = parse_gpus(data, sysfs=_NOWHERE)
    for outcome in (ScriptOutcome(14, data, b""), ScriptOutcome(0, data, data)):
        read = NvidiaDriver(sysfs=_NOWHERE).read(outcome)
        assert [device.properties["index"] for device in read[: len(rows)]] == [
            device.properties["index"] for device in rows
        ]
        for user in Processes(outcome).users(_UUIDS, "7"):
            assert user.isprintable()


def nvml_answers(data: bytes) -> None:
    """As a line of the NVML process, and what becomes of it."""
    with suppress(ValueError):
        answer = decode_answer(data)
        faults = Faults(XidClasses())
        earlier: list[Device] = []
        for machine in (inventory.Machine(), _FUNCTIONS):
            found = inventory.seen(answer.snapshot or Snapshot(), machine, faults, earlier)
            earlier = [each.device for each in found]
            names = [device.id or (device.properties["index"],) for device in earlier]
            assert len(set(names)) == len(names), "one device twice"
            assert all(device.reason or device.health is Health.HEALTHY for device in earlier)
            selected_by_index(earlier, why_uncountable(found))


_FUNCTIONS = inventory.Machine(functions={"0000:19:00.0": pci.Function(bus_id="0000:19:00.0", is_offered=True)})


def gpu_files(data: bytes) -> None:
    """As a CDI spec, as the driver's facts about a GPU, and as a list of Xids."""
    text = data.decode("utf-8", "replace")
    assert all(name.isascii() and name.isprintable() for name in cdi.defined(text))
    assert all(len(value) <= 200 for value in pci.facts(text).values())
    pci.normal_bus_id(text)
    with suppress(ValueError):
        XidClasses({"reset": text})


def device_files(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with suppress(ValueError):
        described_device(dict(line.partition("=")[::2] for line in text.splitlines()), name="n", index=0)


def _lives(owner: gpu_coordination.ScriptOwner) -> bool:
    return owner.pid % 2 == 0


def coordination(data: bytes) -> None:
    with suppress(gpu_coordination.CoordinationError):
        chosen, after = gpu_coordination.choose(data, ["0", "1", "11"], 2, _OWNER, _lives)
        assert len(set(chosen)) == 2
        again, _ = gpu_coordination.choose(after, ["0", "1", "11"], 2, _OWNER, _lives)
        assert set(again) == set(chosen)


def words(data: bytes) -> None:
    """Durations, names, lists of names, and whatever an option may be set to."""
    text = data.decode("utf-8", "surrogateescape")
    for parse in (parse_duration, lambda word: check_name(word, "host"), *(option.parse for option in _OPTIONS)):
        with suppress(ValueError):
            parse(text)
    resource_names(text)


_OPTIONS = (*options.SETTINGS, *options.RESOURCE_OPTIONS)


def choices(data: bytes) -> None:
    """The clauses of a worker, and behind a line feed each property of a device. The checker says the same of them."""
    said, _, property_text = data.partition(b"\n")
    try:
        where = _where.decode(said)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    asked, text = clauses.clauses_of(where, list(where)[:4]), property_text.decode("utf-8", "replace")
    clauses.in_words(asked)
    if clauses.problem(asked) is not None:
        return
    info = dict.fromkeys(where, text) | {"id": "a"}
    found = clauses.Sieve(asked).fault(info)
    clauses.fault(asked, [info, info | {"id": "b"}])
    raw = msgspec.json.decode(said)
    assert (found is None) == all(meets(raw[name], name, info | {"local_index": "?"}) for name in where), found


_where = msgspec.json.Decoder(dict[str, Clause])


def pod_templates(data: bytes) -> None:
    with suppress(RequestError):
        request_in_pod_template(data.decode("utf-8", "replace"), {"nvidia.com/gpu": "2"})


_RESOURCES = [ResourceConfig(name="gpu", amount=1, kubernetes_key="nvidia.com/gpu")]


def reviews(data: bytes) -> None:
    """As an API server's review, and as the annotation of a pod."""
    with suppress(review.NoReviewError):
        review.answer(data, lambda text: annotated_amounts(text, _RESOURCES))
    with suppress(ConfigurationError):
        assert annotated_amounts(data.decode("utf-8", "replace"), _RESOURCES).keys() <= {"nvidia.com/gpu"}


def verifier(data: bytes) -> None:
    classify(b"h", data)
    with suppress(wire.DamagedError):
        body = wire.parse(data)
        for read in (
            wire.allocation,
            wire.inventories,
            wire.checkpoint,
            wire.cordon,
            partial(wire.cordon_order, key="k"),
        ):
            if isinstance(body, dict):
                with suppress(wire.DamagedError):
                    read(body)


_COLUMNS = ("off", "time", "key", "value")
_TYPES = ("INTEGER", "REAL", "TEXT", "BLOB", "NULL")


def embedded_rows(data: bytes) -> None:
    """A row with columns of any type: for each a byte that says which, one for its length, then its bytes."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        log.set_up(connection)
        log.create_topic(connection, TopicSpec("t", 1, {}))
        connection.execute("PRAGMA ignore_check_constraints = ON")
        row, rest = [], data
        for _ in _COLUMNS:
            kind, length, rest = rest[:1] or b"\4", rest[1:2] or b"\0", rest[2:]
            value, rest = rest[: length[0]], rest[length[0] :]
            row.append((_TYPES[kind[0] % len(_TYPES)], value))
        casts = ", ".join("NULL" if kind == "NULL" else f"CAST(? AS {kind})" for kind, _ in row)
        values = [value for kind, value in row if kind != "NULL"]
        with suppress(sqlite3.IntegrityError):
            connection.execute(
                f"INSERT INTO record (topic, part, {', '.join(_COLUMNS)}) VALUES (1, 0, {casts})", values
            )
        connection.execute("UPDATE part SET next = 300")
        with suppress(BusError):
            topic = log.find_topic(connection, "t")
            assert topic is not None
            for message in log.fetch(connection, topic, 0, 0, 10).messages:
                assert 0 <= message.offset < 300
                assert isinstance(message.key, bytes | None)
                assert isinstance(message.value, bytes | None)
            for part in housekeeping._parts(connection):
                housekeeping._headers(connection, part, 0, 300)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        registrations, records, record_batches, packed_records, broker_answers, toml, yaml, flink_conf, script_output,
        nvidia_smi, nvml_answers, gpu_files, device_files, coordination, words, choices, pod_templates, reviews,
        verifier, embedded_rows,
    )
}  # fmt: skip

"""Requests that aiokafka lacks, requests encoded without copies, and the meaning of error codes.

Formats and codes: Kafka's protocol guide (Metadata version 10, KIP-516 for topic ids; KIP-664 for lists of
transactions and producers; KIP-890 for transactions of version 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

from aiokafka import errors as kafka_errors
from aiokafka.protocol.admin import ApiVersionRequest_v2, SaslAuthenticateRequest_v0, SaslAuthenticateRequest_v1
from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.types import (
    Array,
    Boolean,
    Bytes,
    CompactArray,
    CompactBytes,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
    UnsignedVarInt32,
)

from outfitter_proto import __version__
from outfitter_proto.bus.kafka.connecting.login import Login
from outfitter_proto.bus.port import (
    BusAuthorizationError,
    BusConfigurationError,
    BusError,
    BusUnavailableError,
    Right,
    TooLargeError,
)

OK = 0
OFFSET_OUT_OF_RANGE = 1
UNKNOWN_TOPIC = 3
TOPIC_EXISTS = 36
INVALID_PARTITIONS = 37
TOPIC_AUTHORIZATION_FAILED = 29
CONCURRENT_TRANSACTIONS = 51
TRANSACTIONAL_ID_DENIED = 53
TRANSACTIONAL_ID_NOT_FOUND = 105

# The leader has moved or is not ready yet, and nothing was written: look it up again.
MOVED = frozenset({3, 5, 6, 9, 13, 14, 15, 16, 19, 41, 56, 72, 74, 75, 78})
_TOO_LARGE = frozenset({10, 18})
_CLUSTER_AUTHORIZATION_FAILED = 31
_COORDINATOR_TYPES = {"group": 0, "transactional-id": 1}
COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR = 14, 15, 16
COORDINATORS = {
    "group": ("groups", "offsets.topic.replication.factor", (), "__consumer_offsets"),
    "transactional-id": (
        "transactions", "transaction.state.log.replication.factor", ("transaction.state.log.min.isr",),
        "__transaction_state",
    ),
}  # fmt: skip
"""Whom a coordinator serves, the broker's settings that may keep its topic from being made or written, and the topic,
by Kafka's names."""
DEFAULT_FACTOR = 3
"""Kafka's default of these factors."""
_ANSWERS = {
    5: "a partition has no leader",
    COORDINATOR_LOADING: "the coordinator still loads its state",
    19: "too few copies of a partition are in sync for its min.insync.replicas: see whether brokers are away",
    20: "too few copies of a partition are in sync for its min.insync.replicas: see whether brokers are away",
    49: "the brokers have forgotten this writer, which wrote nothing for longer than transactional.id.expiration.ms",
    CONCURRENT_TRANSACTIONS: "the writer's last transaction is not complete yet",
}
_DENIED_KINDS = {
    29: "topic",
    30: "group",
    _CLUSTER_AUTHORIZATION_FAILED: "cluster",
    TRANSACTIONAL_ID_DENIED: "transactional-id",
}
_CONFIGURATION = {
    17: "the name of topic {topic!r} is not valid",
    32: "the broker refuses this machine's time for topic {topic!r}: it is ahead of the broker's by more than "
    "message.timestamp.after.max.ms; set the clock of this machine, or the broker's, right",
    37: "the number of partitions of topic {topic!r} is not valid",
    38: "the replication factor of topic {topic!r} is not possible with the current brokers",
    40: "a setting of topic {topic!r} is not valid",
    44: "a policy of the cluster forbids topic {topic!r}",
    50: "the transaction time-out is longer than the broker's transaction.max.timeout.ms: set that to 5000 or more",
    87: "topic {topic!r} refuses a record (a compacted topic takes no record without a key)",
}


def error_name(code: int) -> str:
    """Kafka's number and aiokafka's name."""
    return f"error {code}, {kafka_errors.for_code(code).__name__}"


def error_in_words(code: int, request: str, *, kind: str, brokers: int) -> str:
    """What an answer with an error code to `request` means, and what to do. `kind`: whose coordinator was asked, a
    `group`'s or a `transactional-id`'s. `brokers`: how many there are."""
    name = getattr(kafka_errors.for_code(code), "message", "") or error_name(code)
    if code == COORDINATOR_NOT_AVAILABLE:
        return no_coordinator(kind, brokers)
    words = _ANSWERS.get(code)
    return f"{words} ({name})" if words is not None else f"the broker answers {request} with {name}"


def no_coordinator(kind: str, brokers: int) -> str:
    """Why there is no coordinator for a `group` or a `transactional-id`, and what to do."""
    users, factor, others, topic = COORDINATORS[kind]
    remedy = f"see whether the partitions of {topic} have leaders"
    if brokers < DEFAULT_FACTOR:
        settings = " and ".join((factor, *others))
        remedy = f"with fewer than {DEFAULT_FACTOR} brokers set {settings} to {brokers or 1} there, or {remedy}"
    return f"the brokers have no coordinator for {users} (COORDINATOR_NOT_AVAILABLE): {remedy}"


def refusal(
    login: Login,
    code: int,
    *,
    topic: str | None = None,
    operation: str = "Describe",
    name: str | None = None,
    detail: str | None = None,
    size: int | None = None,
) -> BusError:
    """The port's error for an error code.

    `operation` (Kafka's name of a right) failed on `topic`, or on `name` if the code is about another kind of object.
    `detail`: the broker's message, if it sent one. `size`: the bytes of the refused batch.
    """
    url = login.url
    suffix = f" ({detail or error_name(code)})"
    if code in _DENIED_KINDS:
        kind = _DENIED_KINDS[code]
        what = topic if kind == "topic" else name
        return BusAuthorizationError(f"{url}: {denial(login, Right(operation, kind, what or ''))}{suffix}")
    if code in _CONFIGURATION:
        return BusConfigurationError(f"{url}: {_CONFIGURATION[code].format(topic=topic)}{suffix}")
    if code in _TOO_LARGE:
        batch = "" if size is None else f"a batch of {size} bytes is "
        larger = f"{url}: {batch}larger than max.message.bytes of topic {topic!r} allows{suffix}"
        return TooLargeError(larger, topic=topic, size=size)
    what = _ANSWERS.get(code, "the broker refused a request")
    return BusUnavailableError(f"{url}: {what}{f' (topic {topic!r})' if topic else ''}{suffix}")


def denial(login: Login, right: Right) -> str:
    """The sentence about a missing right, with the command that grants it."""
    operation, kind, name = right
    is_name = login.principal.startswith("User:")
    what = f"{operation} on the cluster" if kind == "cluster" else f"{operation} on {kind} {name!r}"
    option = "--cluster" if kind == "cluster" else f"--{kind} {name}"
    principal = f"'{login.principal}'" if is_name else "PRINCIPAL"
    return (
        f"{what} is not granted to {login.principal}: kafka-acls --add --allow-principal {principal} "
        f"--operation {operation} {option}"
    )


def coordinator_of(kind: str, name: str) -> FindCoordinatorRequest:
    """The request for the coordinator of a `group` or a `transactional-id`."""
    return FindCoordinatorRequest(name, _COORDINATOR_TYPES[kind])


class ApiVersionsRequest(Request[ApiVersionRequest_v2]):  # type: ignore[misc]  # aiokafka has no types
    """Which requests the broker knows. aiokafka's asks in a version whose answer does not tell of throttling."""

    API_KEY = 18
    ALLOW_UNKNOWN_API_VERSION = True

    def build(self, request_struct_class: type[ApiVersionRequest_v2]) -> ApiVersionRequest_v2:
        return request_struct_class()


class Uuid:
    """A topic's id in Kafka's protocol: sixteen bytes."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: Any) -> bytes:
        return bytes(data.read(16))

    @classmethod
    def repr(cls, value: bytes) -> str:
        return value.hex()


def _structure(*fields: tuple[str, Any]) -> Schema:
    """A structure of a flexible version: these fields, then tagged ones."""
    return Schema(*fields, ("tags", TaggedFields))


def _array(*fields: tuple[str, Any]) -> CompactArray:
    """An array of structures of a flexible version."""
    return CompactArray(*fields, ("tags", TaggedFields))


# aiokafka has no types. Its classes are Any to mypy, so subclassing needs an ignore.


class MetadataResponse(Response):  # type: ignore[misc]
    """Brokers, and topics with their ids, partitions and leaders."""

    API_KEY = 3
    API_VERSION = 10
    SCHEMA = _structure(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            _array(
                ("node_id", Int32),
                ("host", CompactString()),
                ("port", Int32),
                ("rack", CompactString()),
            ),
        ),
        ("cluster_id", CompactString()),
        ("controller_id", Int32),
        (
            "topics",
            _array(
                ("error_code", Int16),
                ("name", CompactString()),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    _array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
        ("cluster_authorized_operations", Int32),
    )


class MetadataRequestV10(RequestStruct):  # type: ignore[misc]
    """Topics by name. The request never creates a topic."""

    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 10
    RESPONSE_TYPE = MetadataResponse
    SCHEMA = _structure(
        ("topics", _array(("topic_id", Uuid), ("name", CompactString()))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    )


class MetadataRequest(Request[MetadataRequestV10]):  # type: ignore[misc]
    """Metadata with topic ids; brokers since Kafka 2.8 know it."""

    API_KEY = 3

    def __init__(self, topics: list[str], *, rights: bool = False) -> None:
        """`topics`: their names; none: no topic. `rights`: ask for our rights on each topic, too."""
        self._topics = topics
        self._rights = rights

    def build(self, request_struct_class: type[MetadataRequestV10]) -> MetadataRequestV10:
        topics: list[tuple[bytes, str, dict[int, bytes]]] = [(bytes(16), name, {}) for name in self._topics]
        return request_struct_class(topics, False, False, self._rights, {})


def pieces(request: RequestStruct) -> Iterator[bytes]:
    """The parts of `request.encode()` without copies. aiokafka copies records six times, once at each level of the
    schema, and a commit has megabytes of records."""
    yield from _pieces(request.SCHEMA, [request.get_item(name) for name in request.SCHEMA.names])


def _pieces(kind: Any, value: Any) -> Iterator[bytes]:
    if isinstance(kind, Schema):
        for field, item in zip(kind.fields, value, strict=True):
            yield from _pieces(field, item)
    elif isinstance(kind, Array) and value is not None:
        is_compact = isinstance(kind, CompactArray)
        yield UnsignedVarInt32.encode(len(value) + 1) if is_compact else Int32.encode(len(value))
        for item in value:
            yield from _pieces(kind.array_of, item)
    elif kind in (Bytes, CompactBytes) and value is not None:
        yield UnsignedVarInt32.encode(len(value) + 1) if kind is CompactBytes else Int32.encode(len(value))
        yield value
    else:
        yield kind.encode(value)


class JoiningProduceResponse(Response):  # type: ignore[misc]
    """Partitions with an error code and the offset of the first record."""

    API_KEY = 0
    API_VERSION = 12
    SCHEMA = _structure(
        (
            "topics",
            _array(
                ("topic", CompactString()),
                (
                    "partitions",
                    _array(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("offset", Int64),
                        ("timestamp", Int64),
                        ("log_start_offset", Int64),
                        (
                            "record_errors",
                            _array(("batch_index", Int32), ("batch_index_error_message", CompactString())),
                        ),
                        ("error_message", CompactString()),
                    ),
                ),
            ),
        ),
        ("throttle_time_ms", Int32),
    )


class JoiningProduceRequestV12(RequestStruct):  # type: ignore[misc]
    """A record batch for each partition, to their leader."""

    FLEXIBLE_VERSION = True
    API_KEY = 0
    API_VERSION = 12
    RESPONSE_TYPE = JoiningProduceResponse
    SCHEMA = _structure(
        ("transactional_id", CompactString()),
        ("required_acks", Int16),
        ("timeout", Int32),
        (
            "topics",
            _array(
                ("topic", CompactString()), ("partitions", _array(("partition", Int32), ("messages", CompactBytes)))
            ),
        ),
    )


class JoiningProduceRequest(Request[JoiningProduceRequestV12]):  # type: ignore[misc]
    """Records of a transaction of version 2. Their partitions join it. In versions that aiokafka has, they must have
    been added before."""

    API_KEY = 0

    def __init__(
        self, transactional_id: str, timeout_ms: int, topics: Sequence[tuple[str, int, bytes | bytearray]]
    ) -> None:
        """`topics`: each with a partition and the record batch for it."""
        self._transactional_id = transactional_id
        self._timeout_ms = timeout_ms
        self._topics = topics

    def build(self, request_struct_class: type[JoiningProduceRequestV12]) -> JoiningProduceRequestV12:
        topics: list[Any] = [(topic, [(partition, batch, {})], {}) for topic, partition, batch in self._topics]
        return request_struct_class(self._transactional_id, -1, self._timeout_ms, topics, {})


class EpochEndTxnResponse(Response):  # type: ignore[misc]
    """An error code, and the producer id and epoch of the next transaction."""

    API_KEY = 26
    API_VERSION = 5
    SCHEMA = _structure(
        ("throttle_time_ms", Int32), ("error_code", Int16), ("producer_id", Int64), ("producer_epoch", Int16)
    )


class EpochEndTxnRequestV5(RequestStruct):  # type: ignore[misc]
    """A transaction and its end, to its coordinator."""

    FLEXIBLE_VERSION = True
    API_KEY = 26
    API_VERSION = 5
    RESPONSE_TYPE = EpochEndTxnResponse
    SCHEMA = _structure(
        ("transactional_id", CompactString()), ("producer_id", Int64), ("producer_epoch", Int16), ("committed", Boolean)
    )


class EpochEndTxnRequest(Request[EpochEndTxnRequestV5]):  # type: ignore[misc]
    """The end of a transaction of version 2. It raises the epoch, so a late copy of it ends nothing."""

    API_KEY = 26

    def __init__(self, transactional_id: str, producer_id: int, producer_epoch: int, committed: bool) -> None:
        self._fields = transactional_id, producer_id, producer_epoch, committed

    def build(self, request_struct_class: type[EpochEndTxnRequestV5]) -> EpochEndTxnRequestV5:
        return request_struct_class(*self._fields, {})


class DescribeTransactionsResponse(Response):  # type: ignore[misc]
    """Transactional ids with the state of their last transaction."""

    API_KEY = 65
    API_VERSION = 0
    SCHEMA = _structure(
        ("throttle_time_ms", Int32),
        (
            "transaction_states",
            _array(
                ("error_code", Int16),
                ("transactional_id", CompactString()),
                ("state", CompactString()),
                ("timeout_ms", Int32),
                ("start_time_ms", Int64),
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                (
                    "topics",
                    _array(("topic", CompactString()), ("partitions", CompactArray(Int32))),
                ),
            ),
        ),
    )


class DescribeTransactionsRequestV0(RequestStruct):  # type: ignore[misc]
    """Transactional ids, to their coordinator."""

    FLEXIBLE_VERSION = True
    API_KEY = 65
    API_VERSION = 0
    RESPONSE_TYPE = DescribeTransactionsResponse
    SCHEMA = _structure(("transactional_ids", CompactArray(CompactString())))


class DescribeTransactionsRequest(Request[DescribeTransactionsRequestV0]):  # type: ignore[misc]
    """The state of a transactional id's last transaction; brokers since Kafka 3.0 know it."""

    API_KEY = 65

    def __init__(self, transactional_id: str) -> None:
        self._transactional_id = transactional_id

    def build(self, request_struct_class: type[DescribeTransactionsRequestV0]) -> DescribeTransactionsRequestV0:
        return request_struct_class([self._transactional_id], {})


class DescribeProducersResponse(Response):  # type: ignore[misc]
    """A partition's producers, each with the first offset of its open transaction (-1: none open)."""

    API_KEY = 61
    API_VERSION = 0
    SCHEMA = _structure(
        ("throttle_time_ms", Int32),
        (
            "topics",
            _array(
                ("name", CompactString()),
                (
                    "partitions",
                    _array(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("error_message", CompactString()),
                        (
                            "active_producers",
                            _array(
                                ("producer_id", Int64),
                                ("producer_epoch", Int32),
                                ("last_sequence", Int32),
                                ("last_timestamp", Int64),
                                ("coordinator_epoch", Int32),
                                ("transaction_start", Int64),
                            ),
                        ),
                    ),
                ),
            ),
        ),
    )


class DescribeProducersRequestV0(RequestStruct):  # type: ignore[misc]
    """Partitions, to their leader."""

    FLEXIBLE_VERSION = True
    API_KEY = 61
    API_VERSION = 0
    RESPONSE_TYPE = DescribeProducersResponse
    SCHEMA = _structure(
        (
            "topics",
            _array(("name", CompactString()), ("partitions", CompactArray(Int32))),
        ),
    )


class DescribeProducersRequest(Request[DescribeProducersRequestV0]):  # type: ignore[misc]
    """The producers of a partition; brokers since Kafka 2.8 know it."""

    API_KEY = 61

    def __init__(self, topic: str, partition: int) -> None:
        self._topic = topic
        self._partition = partition

    def build(self, request_struct_class: type[DescribeProducersRequestV0]) -> DescribeProducersRequestV0:
        return request_struct_class([(self._topic, [self._partition], {})], {})


class FeaturesResponse(Response):  # type: ignore[misc]
    """The broker's requests and the cluster's features (KIP-584), of which `tags` have those that are switched on."""

    API_KEY = 18
    API_VERSION = 3
    SCHEMA = _structure(
        ("error_code", Int16),
        ("api_versions", _array(("api_key", Int16), ("min_version", Int16), ("max_version", Int16))),
        ("throttle_time_ms", Int32),
    )


class FeaturesRequestV3(RequestStruct):  # type: ignore[misc]
    """The name and version of a client."""

    FLEXIBLE_VERSION = True
    API_KEY = 18
    API_VERSION = 3
    RESPONSE_TYPE = FeaturesResponse
    SCHEMA = _structure(("client_software_name", CompactString()), ("client_software_version", CompactString()))

    def parse_response_header(self, read_buffer: Any) -> ResponseHeader_v0:
        """The header of version 0, whatever the version, so that clients of any age can read an answer (KIP-511)."""
        return ResponseHeader_v0.decode(read_buffer)


class FeaturesRequest(Request[FeaturesRequestV3]):  # type: ignore[misc]
    """The features of the cluster."""

    API_KEY = 18

    def build(self, request_struct_class: type[FeaturesRequestV3]) -> FeaturesRequestV3:
        return request_struct_class("outfitter", __version__, {})


_FINALIZED = 2
_FEATURES = _array(("name", CompactString()), ("max_level", Int16), ("min_level", Int16))


def features(response: Any) -> dict[str, int]:
    """The level of each feature that is switched on in the cluster."""
    tagged = response.tags.get(_FINALIZED)
    return {} if tagged is None else {name: level for name, level, *_ in _FEATURES.decode(BytesIO(tagged))}


class _HiddenAuthenticate0(SaslAuthenticateRequest_v0):  # type: ignore[misc]
    def __repr__(self) -> str:
        return _HIDDEN


class _HiddenAuthenticate1(SaslAuthenticateRequest_v1):  # type: ignore[misc]
    def __repr__(self) -> str:
        return _HIDDEN


_HIDDEN = "SaslAuthenticateRequest(…)"


class SaslAuthenticateRequest(Request[_HiddenAuthenticate0 | _HiddenAuthenticate1]):  # type: ignore[misc]
    """A step of a log-in. aiokafka's own class writes passwords and tokens to debug logs."""

    API_KEY = 36

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def build(self, request_struct_class: type[RequestStruct]) -> RequestStruct:
        return request_struct_class(self._payload)

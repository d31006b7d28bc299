"""What a broker's answer must have before anybody reads it: one place for all requests, ours and aiokafka's.

A sound broker answers for exactly the topics, partitions and names in the request. The only exception is a throttled
fetch, whose answer has no topics (KIP-219). Any other answer counts as none: its connection is closed, and whoever
asked may ask again. So no answer can end a process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from io import BytesIO
from typing import Any

from aiokafka import errors as kafka_errors
from aiokafka.protocol.types import Array, Schema

_PRODUCE, _FETCH, _OFFSETS, _METADATA, _COORDINATOR, _INIT_PRODUCER_ID, _END_TXN = 0, 1, 2, 3, 10, 22, 26
LEAST_VERSIONS = {_PRODUCE: 3, _FETCH: 4, _OFFSETS: 2, _COORDINATOR: 1, 11: 2, 12: 1, 13: 1, 14: 1, 19: 2}
"""The versions from which on answers have the fields that we read, `throttle_time_ms` among them. Kafka 2.8 has all."""
_ENDS_WITH_EPOCH = 5
"""The version of EndTxn from which on its answer has the next producer id and epoch."""
_MAY_BE_NULL = frozenset({"aborted_transactions"})

_Keys = Callable[[Any], Iterable[Hashable]]


class UnusableAnswerError(kafka_errors.KafkaConnectionError):  # type: ignore[misc]  # aiokafka has no types
    """An answer that nobody can rely on. aiokafka's clients treat it as a broken connection."""

    def __str__(self) -> str:
        return str(self.args[0])


def decoded(request: Any, data: BytesIO) -> Any:
    """The answer to `request`, a request of one version.

    Raises:
        UnusableAnswerError: it does not have the form of its version, or is not about what was asked.
    """
    name = type(request).__name__.partition("Request")[0]
    try:
        answer = request.RESPONSE_TYPE.decode(data)
    except Exception as error:  # whatever these bytes can do
        raise UnusableAnswerError(f"its answer to {name} cannot be decoded: {error!r}") from error
    why = next(_faults(request, answer), None)
    if why is not None:
        raise UnusableAnswerError(f"its answer to {name} cannot be used: {why}")
    return answer


def throttled_s(answer: Any) -> float:
    """The seconds for which the broker reads no request from the connection."""
    return max(0, getattr(answer, "throttle_time_ms", None) or 0) / 1000


def row_of(answer: Any) -> Any:
    """The row of the only partition in the request. None: it is not there, because the fetch was throttled."""
    return next((row for _, rows, *_ in answer.topics for row in rows), None)


def _faults(request: Any, answer: Any) -> Iterator[str]:
    """What is wrong with the answer, in words."""
    schema = answer.SCHEMA
    values = [answer.get_item(name) for name in schema.names]
    missing = [name for name, kind, value in zip(schema.names, schema.fields, values, strict=True)
               if _has_null(name, kind, value)]  # fmt: skip
    if missing:
        yield f"it has no {missing[0]}"
        return
    key = request.API_KEY
    yield from _FAULTS[key](answer) if key in _FAULTS else ()
    if key in _ABOUT:
        asked_of, answered_of = _ABOUT[key]
        asked, answered = list(asked_of(request)), list(answered_of(answer))
        is_throttled_fetch = key == _FETCH and not answered and throttled_s(answer) > 0
        if asked and not is_throttled_fetch and sorted(map(repr, asked)) != sorted(map(repr, answered)):
            yield f"it is about {_listed(answered)}, and the request about {_listed(asked)}"


def _has_null(name: str, kind: Any, value: Any) -> bool:
    """Whether an array that must be there is null."""
    if isinstance(kind, Schema):
        return any(_has_null(*part) for part in zip(kind.names, kind.fields, value, strict=True))
    if not isinstance(kind, Array) or name in _MAY_BE_NULL:
        return False
    if value is None:
        return True
    return isinstance(kind.array_of, Schema | Array) and any(_has_null(name, kind.array_of, item) for item in value)


def _listed(things: list[Hashable]) -> str:
    return ", ".join(repr(thing)[:100] for thing in things[:3]) + (", …" if things[3:] else "") or "nothing"


def _rows(topics: Any) -> Iterator[Hashable]:
    """The partitions in a request or answer: of each topic a list of numbers, or of rows that begin with the number."""
    for topic, partitions, *_ in topics:
        for row in partitions:
            yield topic, row if isinstance(row, int) else row[0]


def _metadata_asked(request: Any) -> list[Hashable]:
    """The topics' names; none if the request is for all topics."""
    return [topic if isinstance(topic, str) else topic[1] for topic in request.topics or ()]


_BY_PARTITION: tuple[_Keys, _Keys] = lambda request: _rows(request.topics), lambda answer: _rows(answer.topics)
_ABOUT: dict[int, tuple[_Keys, _Keys]] = {
    _PRODUCE: _BY_PARTITION,
    _FETCH: _BY_PARTITION,
    _OFFSETS: _BY_PARTITION,
    _METADATA: (_metadata_asked, lambda answer: [name for _, name, *_ in answer.topics]),
    19: (
        lambda request: [topic for topic, *_ in request.create_topic_requests],
        lambda answer: [topic for topic, *_ in answer.topic_errors],
    ),
    24: (lambda request: _rows(request.topics), lambda answer: _rows(answer.errors)),
    32: (
        lambda request: [(kind, name) for kind, name, *_ in request.resources],
        lambda answer: [(kind, name) for _, _, kind, name, *_ in answer.resources],
    ),
    37: (
        lambda request: [topic for topic, *_ in request.topic_partitions],
        lambda answer: [topic for topic, *_ in answer.topic_errors],
    ),
    61: _BY_PARTITION,
    65: (
        lambda request: request.transactional_ids,
        lambda answer: [name for _, name, *_ in answer.transaction_states],
    ),
}
"""By API key: what a request asks about, and what an answer is about."""


def _failed_fetch(answer: Any) -> Iterator[str]:
    code = getattr(answer, "error_code", 0)
    if code:
        yield f"error {code}, {kafka_errors.for_code(code).__name__}"


def _unusable_brokers(answer: Any) -> Iterator[str]:
    if len({node_id for node_id, *_ in answer.brokers}) < len(answer.brokers):
        yield "it has two brokers of one number"
    for _, host, port, *_ in answer.brokers:
        yield from _unusable_address(host, port)


def _unusable_coordinator(answer: Any) -> Iterator[str]:
    if answer.error_code == 0:
        yield from _unusable_address(answer.host, answer.port)


def _unusable_address(host: Any, port: int) -> Iterator[str]:
    if not host or not 0 < port < 2**16:
        yield f"{host!r}, port {port} is no address"


def _unusable_producer_id(answer: Any) -> Iterator[str]:
    has_one = answer.API_KEY != _END_TXN or answer.API_VERSION >= _ENDS_WITH_EPOCH
    if has_one and answer.error_code == 0 and (answer.producer_id < 0 or answer.producer_epoch < 0):
        yield f"{answer.producer_id}/{answer.producer_epoch} is no producer id with its epoch"


_FAULTS: dict[int, Callable[[Any], Iterator[str]]] = {
    _FETCH: _failed_fetch,
    _METADATA: _unusable_brokers,
    _COORDINATOR: _unusable_coordinator,
    _INIT_PRODUCER_ID: _unusable_producer_id,
    _END_TXN: _unusable_producer_id,
}

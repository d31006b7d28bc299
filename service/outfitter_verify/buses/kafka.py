"""Kafka as a source, through confluent-kafka: all registrations, and the committed records of the three other topics.

It joins no group, commits nothing and needs only Read on the four topics.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outfitter_verify.buses import CONTROL, TOPICS, UnreadableError
from outfitter_verify.buses.addresses import brokers
from outfitter_verify.logs import Control, Log, Partition, Reading, Record

try:
    from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition
    from confluent_kafka.admin import AdminClient
except ModuleNotFoundError:
    raise UnreadableError(
        "verifying what is on Kafka needs confluent-kafka, another client than the one under test: "
        "the extra `verify` brings it (service/install.md says how to install one)"
    ) from None

_NAMES = {
    "security-protocol": "security.protocol",
    "sasl-mechanism": "sasl.mechanism",
    "sasl-username": "sasl.username",
    "sasl-password": "sasl.password",
    "ca-file": "ssl.ca.location",
    "cert-file": "ssl.certificate.location",
    "key-file": "ssl.key.location",
}
_SECRETS = {"sasl-password-file": "sasl.password", "key-password-file": "ssl.key.password"}
_TOKEN = "sasl-token-file"  # noqa: S105 - a name
TOKEN_LIFE_S = 300.0
"""Seconds after which librdkafka reads the token's file again at the latest, because we set this as the token's end."""
_FATAL = (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED)
_GROUP = (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._STATE)
_PASSING = (
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
)
"""Errors that end once a leader has moved or a broker is back. `KafkaError.retriable` is only about transactions."""
_STUCK_S = 3.0
"""Seconds without a record while the leader answers, after which the client cannot pass the next one."""
_DAMAGED = (KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError.INVALID_MSG, KafkaError._UNDERFLOW)
_AGAIN_S = 0.1
"""Seconds between two requests."""


def settings(bus: str, login: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Any]:
    """librdkafka's settings for `kafka://host:port[,…]`, `login`, and `environment`'s `OUTFITTER_KAFKA_…` variables.

    Raises:
        UnreadableError: an invalid address, or a secret's file that cannot be read.
    """
    prefix = "OUTFITTER_KAFKA_"
    names = (*_NAMES, *_SECRETS, _TOKEN)
    variables = {name: environment.get(prefix + name.upper().replace("-", "_")) for name in names}
    given = {name: value for name, value in (variables | dict(login)).items() if value}
    settings: dict[str, Any] = {"bootstrap.servers": _servers(bus)}
    for name, setting in _SECRETS.items():
        if name in given:
            settings[setting] = _secret(given[name])
    settings |= {setting: given[name] for name, setting in _NAMES.items() if name in given}
    if str(settings.get("security.protocol", "")).startswith("SASL"):
        settings.setdefault("sasl.mechanism", "SCRAM-SHA-512")
    if _TOKEN in given:
        settings["oauth_cb"] = lambda _: (_secret(given[_TOKEN]), time.time() + TOKEN_LIFE_S)
    return settings


def _servers(bus: str) -> str:
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in brokers(bus))


def _secret(path: str) -> str:
    try:
        return Path(path).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path}: {error}") from error


class KafkaSource:
    """The four topics of a cluster on Kafka. `patience_s` bounds each wait."""

    def __init__(self, settings: Mapping[str, Any], cluster: str, *, patience_s: float) -> None:
        self._cluster = cluster
        self._patience_s = patience_s
        self._trouble: KafkaError | None = None
        common: dict[str, Any] = {
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "check.crcs": True,
            "allow.auto.create.topics": False,
            "fetch.wait.max.ms": 50,
            "log_level": 0,
            **settings,
            "group.id": f"outfitter-verify-{secrets.token_hex(6)}",
            "error_cb": self._note_error,
        }
        self._settings = dict(settings)
        self._everything = Consumer({**common, "isolation.level": "read_uncommitted"})
        self._committed = Consumer({**common, "isolation.level": "read_committed"})

    def __enter__(self) -> KafkaSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._everything.close()
        self._committed.close()

    def _note_error(self, error: KafkaError) -> None:
        if self._trouble is None or error.code() in _FATAL:
            self._trouble = error

    def reading(self) -> Reading:
        """The current topics, read partition by partition on demand."""
        names = [f"{self._cluster}.{topic}" for topic in TOPICS]
        counts = {name: self._partitions(name) for name in names}
        if len(set(counts.values())) > 1:
            raise UnreadableError(f"the topics' partition counts differ: {counts}")
        partitions = counts[names[0]]
        logs = (self._partition(names, number) for number in range(partitions))
        return Reading(self._cluster, partitions, self._topic_id(names[0]), markers=True, logs=logs)

    # --- metadata --------------------------------------------------------------------------------------

    def _partitions(self, topic: str) -> int:
        deadline = time.monotonic() + self._patience_s
        while True:
            self._everything.poll(0)  # calls `_note_error` for errors
            try:
                metadata = self._everything.list_topics(topic, timeout=2.0).topics[topic]
            except KafkaException as error:
                fatal = self._trouble is not None and self._trouble.code() in _FATAL
                if fatal or time.monotonic() > deadline:
                    why = self._trouble or error.args[0]
                    raise UnreadableError(f"Kafka does not answer: {why.str()}") from error
                continue
            if metadata.error is None:
                return len(metadata.partitions)
            if metadata.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise UnreadableError(f"there is no topic {topic}: is {self._cluster!r} the right cluster?")
            if metadata.error.code() not in _PASSING or time.monotonic() > deadline:
                raise UnreadableError(f"{topic}: {metadata.error.str()}")
            time.sleep(_AGAIN_S)

    def _topic_id(self, topic: str) -> str | None:
        """The topic's id as Kafka's tools print it; None if the broker does not say it."""
        admin = AdminClient({**self._settings, "log_level": 0})
        try:
            futures = admin.describe_topics(TopicCollection([topic]), request_timeout=self._patience_s)
            topic_id = str(futures[topic].result(self._patience_s).topic_id)
        except (KafkaException, TimeoutError):
            return None
        return topic_id.replace("+", "-").replace("/", "_").rstrip("=")

    # --- records ---------------------------------------------------------------------------------------

    def _partition(self, names: list[str], number: int) -> Partition:
        """Read the ledger first, so that the other topics have everything that it refers to."""
        registrations, allocations, history, dead_letters = names
        ledger = self._log(self._committed, allocations, number)
        return Partition(
            registrations=self._log(self._everything, registrations, number),
            allocations=ledger,
            history=self._log(self._committed, history, number),
            dead_letters=self._log(self._committed, dead_letters, number),
            control=self._control(),
        )

    def _control(self) -> Control:
        """The topic of orders, which may be missing, as may the right to read it."""
        topic = f"{self._cluster}.{CONTROL}"
        try:
            self._partitions(topic)
            before = self._topic_id(topic)
            log = self._log(self._everything, topic, 0)
        except (UnreadableError, KafkaException) as error:
            return Control(why=f"{topic} cannot be read: {error}")
        topic_id = self._topic_id(topic)
        return Control(log, topic_id if topic_id == before else None)

    def _log(self, consumer: Consumer, topic: str, number: int) -> Log:
        """All records up to the current end. Waits for open transactions."""
        deadline = time.monotonic() + self._patience_s
        while True:
            start, end = self._bounds(topic, number, deadline)
            records: list[Record] = []
            unseen: list[tuple[int, int]] = []
            position = start
            try:
                while position < end:
                    try:
                        for record in self._records(consumer, topic, number, position, end, deadline):
                            records.append(record)  # noqa: PERF402 - records before an error count
                        break
                    except _StuckError as stuck:
                        position = stuck.position
                        if not self._reads(consumer, topic, number, position):
                            position = self._beyond(consumer, topic, number, stuck.position, end)
                            unseen.append((stuck.position, position))
                        deadline = time.monotonic() + self._patience_s
            except LookupError:
                continue  # the log's start has moved on
            return Log(topic, number, start, end, records, unseen)

    def _beyond(self, consumer: Consumer, topic: str, number: int, stuck: int, end: int) -> int:
        """The first offset behind `stuck` from which the client can read again, found by trying: the next good record
        of the same batch, or the next batch."""
        last_stuck, step = stuck, 1
        while (candidate := min(stuck + step, end)) < end and not self._reads(consumer, topic, number, candidate):
            last_stuck, step = candidate, step * 2
        while candidate - last_stuck > 1:
            middle = (last_stuck + candidate) // 2
            if self._reads(consumer, topic, number, middle):
                candidate = middle
            else:
                last_stuck = middle
        return candidate

    def _reads(self, consumer: Consumer, topic: str, number: int, position: int) -> bool:
        """Whether the client can read from `position` on."""
        deadline = time.monotonic() + _STUCK_S
        consumer.assign([TopicPartition(topic, number, position)])
        while time.monotonic() < deadline:
            message = consumer.poll(_AGAIN_S)
            error = message.error() if message is not None else None
            if message is not None and (error is None or error.code() == KafkaError._PARTITION_EOF):
                return True
            if error is not None and error.code() in _DAMAGED:
                return False
        return False

    def _bounds(self, topic: str, number: int, deadline: float) -> tuple[int, int]:
        while True:
            try:
                start, end = self._everything.get_watermark_offsets(
                    TopicPartition(topic, number), timeout=self._patience_s, cached=False
                )
            except KafkaException as error:
                why: KafkaError = error.args[0]
                if why.code() not in _PASSING or time.monotonic() > deadline:
                    raise UnreadableError(f"{topic}/{number}: {why.str()}") from error
                time.sleep(_AGAIN_S)
            else:
                return start, end

    def _answers(self, topic: str, number: int) -> bool:
        try:
            self._everything.get_watermark_offsets(TopicPartition(topic, number), timeout=_STUCK_S, cached=False)
        except KafkaException:
            return False
        return True

    def _records(
        self, consumer: Consumer, topic: str, number: int, start: int, end: int, deadline: float
    ) -> Iterator[Record]:
        # Workers can write registrations that brokers accept and librdkafka never passes, so skip these. In managers'
        # topics wait instead, because a transaction may be open.
        may_stick = consumer is self._everything
        position = start
        answered_at = time.monotonic()
        consumer.assign([TopicPartition(topic, number, start)])
        while position < end:
            first = consumer.poll(0.5)
            if first is not None:
                answered_at = time.monotonic()
            # also get what is there already: `consume` with a time limit would wait for the full number
            for message in [first, *consumer.consume(5000, timeout=0)] if first is not None else []:
                error = message.error()
                if error is None:
                    deadline = time.monotonic() + self._patience_s  # slowly, under a quota, is well
                    position = _offset(message) + 1
                    if position <= end:
                        yield Record(position - 1, message.key(), message.value(), message.timestamp()[1])
                elif error.code() == KafkaError._PARTITION_EOF:
                    position = _offset(message)
                elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    raise LookupError(topic)
                elif error.code() in _DAMAGED and may_stick:
                    raise _StuckError(position)
                elif error.code() in _PASSING:
                    self._note_error(error)
                elif error.code() not in _GROUP:
                    raise UnreadableError(f"{topic}/{number}: {error.str()}")
            silent = may_stick and position < end and time.monotonic() - answered_at > _STUCK_S
            if silent and self._answers(topic, number):
                raise _StuckError(position)
            if position < end and time.monotonic() > deadline:
                trouble = f" ({self._trouble.str()})" if self._trouble is not None else ""
                raise UnreadableError(
                    f"{topic}/{number} cannot be read from {position} to {end} within {self._patience_s:g} s: is a "
                    f"transaction open there, or are brokers away?{trouble}"
                )
        consumer.unassign()


class _StuckError(Exception):
    """The client cannot read records at `position`, although the leader answers."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def _offset(message: Message) -> int:
    offset = message.offset()
    if offset is None:
        raise UnreadableError(f"a message of {message.topic()} without an offset")
    return offset

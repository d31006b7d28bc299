"""The scope of a processor: the hosts that it serves, and so its own messages and records in the partition.

In host scope a manager serves one host and skips all others of the partition; the partition's sweeper answers
unroutable messages (sweeper/). In cluster scope a manager serves every host that the partition function puts into its
partition, and answers unroutable messages as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from outfitter_proto.bus import Message
from outfitter_proto.keys import CHECKPOINT, checkpoint_key, host_key, host_of, prefixes_of, writer_names, writer_of
from outfitter_proto.names import InvalidNameError, check_name
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import NobodysCode

CACHED_KEYS = 10_000
"""Most keys whose refusal is cached."""

LONGEST_KEY = 253
"""The most bytes of a key: those of a host's name."""

NO_KEY = (
    "it has no key: key registrations with the host's name (console producer: parse.key=true), "
    "partitioned as Java does (librdkafka: partitioner=murmur2_random)"
)


class Unroutable(NamedTuple):
    """Why a message is unroutable: a `code` for programs, and a `reason` with the remedy for people."""

    code: NobodysCode
    reason: str


def unroutable(message: Message, partitions: int) -> Unroutable | None:
    """Why a message is unroutable in its partition out of `partitions`, or None."""
    if message.key is None:
        return _without_key(message)
    return misdirected(message.key, message.partition, partitions)


def misdirected(key: bytes, partition: int, partitions: int) -> Unroutable | None:
    """Why a message with `key` is unroutable in `partition` out of `partitions`, or None."""
    if len(key) > LONGEST_KEY:
        return Unroutable(
            NobodysCode.BAD_KEY, f"its key names no host: it has {len(key)} bytes, at most {LONGEST_KEY} do"
        )
    try:
        host = check_name(key.decode(), "host")
    except (UnicodeDecodeError, InvalidNameError) as error:
        return Unroutable(NobodysCode.BAD_KEY, f"its key names no host: {error}")
    right = partition_of(host, partitions)
    if right == partition:
        return None
    return Unroutable(
        NobodysCode.WRONG_PARTITION,
        f"host {host!r} belongs to partition {right} of {partitions}, not to {partition}: partition registrations "
        "by their key as Java does (librdkafka: partitioner=murmur2_random)",
    )


def _without_key(message: Message) -> Unroutable:
    if message.unreadable is None:
        return Unroutable(NobodysCode.NO_KEY, NO_KEY)
    return Unroutable(
        NobodysCode.UNREADABLE,
        f"{message.unreadable}: nothing in it was read. Send its registrations again, each as a record of its own, "
        "uncompressed or with gzip, snappy, lz4 or zstd",
    )


class Scope(ABC):
    """The hosts of one processor."""

    scope: str
    """`host` or `cluster`, as in checkpoints."""
    host: str | None
    """The one host that it serves; None: many."""
    refused: dict[str, str]
    """Its hosts that it does not serve, and why: this version cannot work on their part of the ledger."""

    def admit_all(self) -> None:
        """Refuse no host, because the ledger is read again."""
        self.refused = {}

    def refuse(self, host: str, reason: str) -> bool:
        """Stop serving `host`. Returns False if it is the only host."""
        if host == self.host:
            return False
        self.refused[host] = f"host {host!r} is not served: {reason}"
        return True

    @abstractmethod
    def serves(self, message: Message) -> bool:
        """Whether the message is about a host of this processor."""

    @abstractmethod
    def refusal(self, message: Message) -> str | None:
        """Why a message that it does not serve becomes a dead letter here; None: another manager answers it."""

    @abstractmethod
    def owns(self, key: bytes) -> bool:
        """Whether the ledger's record under `key` belongs to this processor."""

    @abstractmethod
    def stray(self, key: bytes, partitions: int) -> str | None:
        """The host of a ledger key in another partition, if that host belongs to this processor's partition out of so
        many `partitions`; else None."""

    @abstractmethod
    def rival(self, key: bytes) -> str | None:
        """The writer of a checkpoint's `key`, if it serves this processor's hosts in the other scope; else None."""


class HostScope(Scope):
    """One host (host scope)."""

    scope = "host"

    def __init__(self, host: str, writer: str) -> None:
        """`writer`: the name of the host's writer, whose checkpoint is this processor's."""
        self.host: str | None = host
        self.refused = {}
        self._key = host.encode()
        self._exact = {host_key(host).encode(), checkpoint_key(writer).encode()}
        self._prefixes = prefixes_of(host)

    def serves(self, message: Message) -> bool:
        return message.key == self._key

    def refusal(self, message: Message) -> str | None:
        del message  # the sweeper answers unroutable messages
        return None

    def owns(self, key: bytes) -> bool:
        return key.startswith(self._prefixes) or key in self._exact

    def stray(self, key: bytes, partitions: int) -> str | None:
        del partitions  # its keys are this host's in every partition
        return self.host if self.owns(key) else None

    def rival(self, key: bytes) -> str | None:
        return _writer(key, "partition")


class PartitionScope(Scope):
    """Every host of one partition out of `partitions` (cluster scope)."""

    scope = "cluster"
    host = None

    def __init__(self, partition: int, partitions: int, writer: str) -> None:
        """`writer`: the name of the partition's writer, whose checkpoint is this processor's."""
        self._partition = partition
        self._partitions = partitions
        self._checkpoint = checkpoint_key(writer).encode()
        self._refusals: dict[bytes, str | None] = {}
        self.refused = {}

    def admit_all(self) -> None:
        super().admit_all()
        self._refusals.clear()

    def serves(self, message: Message) -> bool:
        return message.key is not None and self._refusal_of(message.key) is None

    def refusal(self, message: Message) -> str | None:
        return _without_key(message).reason if message.key is None else self._refusal_of(message.key)

    def owns(self, key: bytes) -> bool:
        return not key.startswith(CHECKPOINT) or key == self._checkpoint

    def stray(self, key: bytes, partitions: int) -> str | None:
        host = host_of(key)
        return host if host is not None and partition_of(host, partitions) == self._partition else None

    def rival(self, key: bytes) -> str | None:
        return _writer(key, "host")

    def _refusal_of(self, key: bytes) -> str | None:
        """Why a message with `key` is not served, or None."""
        try:
            return self._refusals[key]
        except KeyError:
            if len(key) > LONGEST_KEY:
                return self._why_not(key)
            if len(self._refusals) >= CACHED_KEYS:
                self._refusals.clear()
            reason = self._refusals[key] = self._why_not(key)
            return reason

    def _why_not(self, key: bytes) -> str | None:
        unroutable = misdirected(key, self._partition, self._partitions)
        return unroutable.reason if unroutable is not None else self.refused.get(key.decode())


def _writer(key: bytes, kind: str) -> str | None:
    writer = writer_of(key)
    return writer if writer is not None and writer_names(writer).kind == kind else None

"""Which hosts a processor serves, and so which of its partition's messages and records are its own.

A host's manager serves that host and passes over all others of the partition in silence; who owns a whole partition
serves every host that the partition function puts there, and answers for what is nobody's. In host scope the
partition's sweeper does (sweeper.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from outfitter_proto.bus import Message
from outfitter_proto.keys import CHECKPOINT, checkpoint_key, host_key, host_of, prefixes_of, writer_names, writer_of
from outfitter_proto.names import InvalidNameError, check_name
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Era, Growth, NobodysCode

REMEMBERED_KEYS = 10_000
"""How many keys' verdicts are remembered at most."""

LONGEST_KEY = 253
"""Bytes: a name's length."""

NO_KEY = (
    "it has no key: key registrations with the host's name (console producer: parse.key=true), "
    "partitioned as Java does (librdkafka: partitioner=murmur2_random)"
)


class Nobodys(NamedTuple):
    """Why a message is nobody's: the `code` for programs, the `reason` for people, with what to do about it."""

    code: NobodysCode
    reason: str


def nobodys(message: Message, partitions: int) -> Nobodys | None:
    """Why no manager reads a message in its partition out of `partitions` as its own, whoever there is."""
    if message.key is None:
        return _without_key(message)
    return misdirected(message.key, message.partition, partitions)


def misdirected(key: bytes, partition: int, partitions: int) -> Nobodys | None:
    """Why no manager reads a message with `key` in `partition` out of `partitions` as its own."""
    if len(key) > LONGEST_KEY:
        return Nobodys(NobodysCode.BAD_KEY, f"its key names no host: it has {len(key)} bytes, at most {LONGEST_KEY} do")
    try:
        host = check_name(key.decode(), "host")
    except (UnicodeDecodeError, InvalidNameError) as error:
        return Nobodys(NobodysCode.BAD_KEY, f"its key names no host: {error}")
    right = partition_of(host, partitions)
    if right == partition:
        return None
    return Nobodys(
        NobodysCode.WRONG_PARTITION,
        f"host {host!r} belongs to partition {right} of {partitions}, not to {partition}: partition registrations "
        "by their key as Java does (librdkafka: partitioner=murmur2_random)",
    )


def _without_key(message: Message) -> Nobodys:
    if message.unreadable is None:
        return Nobodys(NobodysCode.NO_KEY, NO_KEY)
    return Nobodys(
        NobodysCode.UNREADABLE,
        f"{message.unreadable}: nothing in it was read. Send its registrations again, each as a record of its own, "
        "uncompressed or with gzip, snappy, lz4 or zstd",
    )


def was_moved(message: Message, partition: int, partitions: int, grown: Growth | UnsetType) -> bool:
    """Whether a message in `partition` out of `partitions` was right where it is when it was sent, and is answered in
    another partition since some were added."""
    if grown is UNSET or message.key is None:
        return False
    later = [partitions]
    for each in (Era(partitions=grown.partitions, until=grown.until or 0), *(grown.earlier or ())):
        if message.offset < each.until:
            wrong = any(_is_wrong(message.key, partition, number) for number in later)
            if wrong and not _is_wrong(message.key, partition, each.partitions):
                return True
        later.append(each.partitions)
    return False


def _is_wrong(key: bytes, partition: int, partitions: int) -> bool:
    """Whether a host's messages belong elsewhere among so many partitions; 0: how many is not known."""
    found = misdirected(key, partition, partitions) if partitions else None
    return found is not None and found.code is NobodysCode.WRONG_PARTITION


class Scope(ABC):
    """The hosts of one processor."""

    scope: str
    """`host` or `cluster`, as in checkpoints."""
    host: str | None
    """The one host that it serves, or None: many."""
    grown: Growth | UnsetType = UNSET
    """What was in the input before partitions were added."""
    refused: dict[str, str]
    """Hosts that are not served although they are its own, and why: their part of the ledger cannot be worked on."""

    def admit_all(self) -> None:
        """The ledger is read anew: nobody is refused before something is found."""
        self.refused = {}

    def refuse(self, host: str, reason: str) -> bool:
        """Serve `host` no more; False where there is no other host to go on with."""
        if host == self.host:
            return False
        self.refused[host] = f"host {host!r} is not served: {reason}"
        return True

    def note_growth(self, grown: Growth | UnsetType) -> None:
        """Take over what the checkpoint says of the partitions that were added."""
        self.grown = grown

    @abstractmethod
    def serves(self, message: Message) -> bool:
        """Whether the message is about a host of this processor."""

    @abstractmethod
    def refusal(self, message: Message) -> str | None:
        """Why a message that it does not serve goes to the dead letters here, or None: it is somebody else's."""

    @abstractmethod
    def owns(self, key: bytes) -> bool:
        """Whether the ledger's record under `key` is this processor's."""

    @abstractmethod
    def stray(self, key: bytes, partitions: int) -> str | None:
        """The host that a ledger record's key is about, if this processor's partition is its place out of so many;
        None: it is somebody else's. Asked of what lies in other partitions."""

    @abstractmethod
    def rival(self, key: bytes) -> str | None:
        """The writer whose checkpoint `key` is, if that one serves hosts of this processor in the other scope."""


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
        del message  # what is nobody's is the sweeper's
        return None

    def owns(self, key: bytes) -> bool:
        return key.startswith(self._prefixes) or key in self._exact

    def stray(self, key: bytes, partitions: int) -> str | None:
        del partitions  # wherever it is, it is this host's
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
        if message.key is None or self._judge(message.key) is not None:
            return False
        return self.grown is UNSET or not was_moved(message, self._partition, self._partitions, self.grown)

    def refusal(self, message: Message) -> str | None:
        if was_moved(message, self._partition, self._partitions, self.grown):
            return None
        return _without_key(message).reason if message.key is None else self._judge(message.key)

    def owns(self, key: bytes) -> bool:
        return not key.startswith(CHECKPOINT) or key == self._checkpoint

    def stray(self, key: bytes, partitions: int) -> str | None:
        host = host_of(key)
        return host if host is not None and partition_of(host, partitions) == self._partition else None

    def rival(self, key: bytes) -> str | None:
        return _writer(key, "host")

    def _judge(self, key: bytes) -> str | None:
        """Why a message with `key` is not served, or None."""
        try:
            return self._refusals[key]
        except KeyError:
            if len(key) > LONGEST_KEY:
                return self._why_not(key)
            if len(self._refusals) >= REMEMBERED_KEYS:
                self._refusals.clear()
            found = self._refusals[key] = self._why_not(key)
            return found

    def _why_not(self, key: bytes) -> str | None:
        found = misdirected(key, self._partition, self._partitions)
        return found.reason if found is not None else self.refused.get(key.decode())


def _writer(key: bytes, kind: str) -> str | None:
    writer = writer_of(key)
    return writer if writer is not None and writer_names(writer).kind == kind else None

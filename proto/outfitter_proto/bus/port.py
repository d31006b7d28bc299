"""The bus port: the operations of a message bus that managers and workers need.

Two adapters implement it, `kafka` and `embedded`; one contract suite (tests/bus) runs against both. The words are
Kafka's: topics have partitions, and partitions have records at growing offsets, with holes. A compacted topic keeps at
least the last record of every key. A record whose value is None is a tombstone.

The adapter's time limits bound every await. Every exception from an adapter is a `BusError`, except cancellation.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from msgspec import Struct

if TYPE_CHECKING:
    from outfitter_proto.bus.patience import Patience


class BusError(Exception):
    """A failure of the bus. The message names the bus, the object and, if known, the remedy."""


class BusUnavailableError(BusError):
    """The bus is unreachable, full or read-only for now. Nothing was lost: try again later."""


class FencedError(BusError):
    """Another writer has taken this writer's identity. The commit is not visible and never will be."""


class CommitUnknownError(BusError):
    """It is unknown whether the commit happened. Never retry it: open a new writer and read the ledger."""


class OffsetOutOfRangeError(BusError):
    """The requested offset does not exist any more, or not yet. The partition has `start` to `end` (exclusive)."""

    def __init__(self, message: str, *, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class UnknownTopicError(BusError):
    """The topic does not exist. The message says how to create it."""


class BusConfigurationError(BusError):
    """The bus cannot be used as configured (wrong URL, a network file system, a refused log-in)."""


class MissingBusError(BusConfigurationError):
    """There is no bus at the URL, and `create` was False."""


class BusAccessError(BusConfigurationError):
    """The bus refuses access. Nothing was written.

    At a start it is a configuration error to report at once. A running process tries again, because somebody may be
    replacing credentials or may have removed rights by mistake.
    """


class BusAuthenticationError(BusAccessError):
    """The bus or this process failed to authenticate: certificates, passwords, tokens."""


class BusAuthorizationError(BusAccessError):
    """A right is missing. The message names it and, if known, the principal."""


class DamagedTopicError(BusConfigurationError):
    """A topic has a batch that cannot be decoded, and the reader is not lenient. The message says where."""


class TooLargeError(BusError):
    """A record or a batch is larger than the topic allows. `topic`: which one; `size`: the bytes of what it refused.
    None: unknown."""

    def __init__(self, message: str, *, topic: str | None = None, size: int | None = None) -> None:
        super().__init__(message)
        self.topic = topic
        self.size = size


class MemberReplacedError(BusError):
    """Another process has joined the group under this member's replica name and has replaced it."""


class Entry(Struct, frozen=True, gc=False):
    """A record to write. A struct, because it is six times as fast to create as a named tuple, and there are many."""

    key: bytes | None
    """None: no key."""
    value: bytes | None
    """None: a tombstone."""


class Create(enum.Enum):
    """What connecting to an embedded bus may create: nothing, its file in a directory that exists, or both."""

    NOTHING = enum.auto()
    FILE = enum.auto()
    DIRECTORY = enum.auto()


class Message(Struct, frozen=True, gc=False):
    """A record that was read, or a batch that cannot be decoded."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    """None: it has none, or is an unreadable batch."""
    value: bytes | None
    """None: a tombstone. Of an unreadable batch: its bytes."""
    timestamp_ms: int
    """Milliseconds since the epoch, set by the bus or the sender."""
    unreadable: str | None = None
    """Why the batch cannot be decoded. None: this is a record."""
    first: int | None = None
    """The offset at which the unreadable batch begins."""


class TopicInfo(NamedTuple):
    """The bus's description of a topic."""

    name: str
    id: str
    """Distinguishes it from a topic of the same name that was deleted."""
    partitions: int
    """Their number."""
    replication: int
    """The number of copies of each partition."""
    config: Mapping[str, str]
    """The settings that differ or matter, by Kafka's names."""


class TopicLayout(NamedTuple):
    """A topic's current id and number of partitions. A topic that was deleted and created again has another id."""

    id: str
    partitions: int


class TopicSpec(NamedTuple):
    """A topic to create."""

    name: str
    partitions: int
    """Their number."""
    config: Mapping[str, str]
    """Settings by Kafka's names."""
    replication: int | None = None
    """The number of copies of each partition. None: the bus's default."""


class Obstacle(NamedTuple):
    """What keeps clients from working with a bus that answers: a setting of its brokers, or another property."""

    kind: str
    """What cannot work: a `transactional-id`, a `group`, or nothing at all, as `brokers` are out of reach."""
    setting: str
    found: str
    """Its value."""
    wanted: str
    """The valid ones."""
    why: str
    """Why it matters."""
    remedy: str
    """What to do."""


class Right(NamedTuple):
    """An access right, by Kafka's names: `Right("Read", "topic", "outfitter.allocations")`."""

    operation: str
    kind: str
    """`topic`, `transactional-id`, `group` or `cluster`."""
    name: str
    """The object's. Empty for the cluster."""


class Closable(ABC):
    """An object that `async with` closes at its end."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it. Repeatable and bounded."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class Reader(Closable):
    """A cursor over one partition, and a context manager that closes it. Not safe for concurrent use."""

    position: int
    """The next offset to read. It skips holes and commit markers, so compare it and not the offset of a message."""
    has_answered: bool = True
    """Whether the bus has answered this reader since its last error; False before the first answer. Without that an
    empty list proves nothing."""
    late_s: float = 0.0
    """For how many seconds the bus had owed this reader an answer when the last `fetch` returned; 0: it owed none. It
    may be away, and no request has failed yet."""

    @abstractmethod
    async def fetch(self, *, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
        """Return the next records; an empty list if none comes within `timeout` seconds.

        May be called again after any error or cancellation: it skips no record.

        Raises:
            OffsetOutOfRangeError: `position` does not exist; `seek` first.
            BusUnavailableError: the bus did not answer.
        """

    @abstractmethod
    async def seek(self, offset: int) -> None:
        """Read from `offset` next."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close connections. Repeatable, bounded; an unreachable bus raises nothing."""


class Writer(Closable):
    """The holder of a writer identity, until another writer opens it."""

    partition: int
    """The number of the partition, of every topic, to which commits go."""

    @abstractmethod
    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        """Write `parts` (topic, entries) atomically into this writer's partition, in the given order.

        The adapter requests the commit only after the bus has acknowledged all of them. The last part (the ledger's)
        is one indivisible record batch, if the bus has record batches. On return committed readers see everything. One
        call at a time. Empty parts are allowed.

        Raises:
            FencedError: another writer has the identity.
            CommitUnknownError: the outcome is unknown.
            TooLargeError: a record or the ledger's part is larger than the topic allows; nothing was written.
            BusUnavailableError: it certainly failed; nothing was written.

        After FencedError, CommitUnknownError or BusUnavailableError the writer is unusable: open a new one. After
        TooLargeError `must_reopen` decides: it is True if the bus, and not the adapter, refused the size. Cancellation
        leaves the outcome unknown and the writer unusable.
        """

    @property
    @abstractmethod
    def must_reopen(self) -> bool:
        """True after an error, and if a request of an earlier commit could still take effect, because it got no answer.
        Open a new writer before the next commit."""

    @property
    @abstractmethod
    def max_part_bytes(self) -> int:
        """Limit of the last part of a commit, in bytes of keys and values."""

    @property
    @abstractmethod
    def tenure(self) -> str:
        """What `Bus.tenure` says of the identity until somebody else takes it. It may change with each commit. After a
        failed or unknown commit, the bus may say something else although nobody has taken it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Abort an open transaction and close. Repeatable, bounded; an unreachable bus raises nothing."""


class Membership(Closable):
    """One member of a group that divides a topic's partitions among its members, in the words of Kafka's groups.

    It assigns partitions and reads no data, so a slow member does not delay the others. Ownership is not exclusion: a
    frozen owner learns late that its partitions have moved. Use a `Writer`, which fences, for anything that must not
    happen twice.
    """

    @property
    @abstractmethod
    def partitions(self) -> frozenset[int]:
        """The partitions assigned to this member, as far as it knows. Empty before the first assignment, while the
        member is expelled, and after the end. Unchanged while the bus is away, when nothing is assigned to others."""

    @abstractmethod
    async def changed(self) -> frozenset[int]:
        """Wait until `partitions` differs from the last returned value (first: the empty set); return it.

        After an expulsion (silence for longer than the session) it always returns an empty set once, even if the same
        partitions came back at once: another member may have had them in between. For one caller.

        Raises:
            MemberReplacedError: another process has this member's replica name. Close this member.
            BusConfigurationError: the member cannot join the group, for example because a right is missing.
        """

    @abstractmethod
    async def confirmed(self, partition: int) -> bool:
        """Whether `partition` is this member's. True only if the group's coordinator answered a request sent after this
        call. False means no or unknown. Bounded, raises nothing."""

    def on_trouble(self, note: Callable[[BusError | None], object]) -> None:
        """Call `note` with an error while the group has not answered this member for some seconds, and with None when
        it answers again. A bus whose groups cannot fail to answer never calls it."""

    @abstractmethod
    async def leave(self) -> None:
        """Leave the group for good, also as a replica: its partitions move at once. If the bus is away, they move when
        the session ends. Bounded and repeatable."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the member. Bounded, repeatable; an unreachable bus raises nothing.

        A replica (a member with a name) does not leave: a process that joins under its name within the session gets
        its partitions, and other members see no change. Members without a name leave.
        """


class Bus(Closable):
    """A connection to one bus. The constructor connects to nothing; `async with bus:` connects and closes."""

    url: str
    local: bool = False
    """True for the bus of a single machine. A manager creates its topics, because it has no administrator."""

    @property
    def patience(self) -> Patience:
        """The clock for time limits of whoever waits for the bus. It stands still while the bus holds us back."""
        from outfitter_proto.bus.patience import Patience  # whoever only imports `outfitter` needs no anyio

        return Patience()

    @abstractmethod
    async def start(self) -> None:
        """Connect and check that the bus is usable.

        Raises:
            BusUnavailableError: no answer; the message has the address.
            BusConfigurationError: the bus is not usable; the message names the remedy.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close all connections of this bus itself. Repeatable, bounded."""

    @abstractmethod
    async def topic(self, name: str) -> TopicInfo:
        """Describe a topic.

        Raises:
            UnknownTopicError: the topic does not exist.
        """

    async def layouts(self, names: Collection[str]) -> dict[str, TopicLayout]:
        """The current layouts of these topics, without those that do not exist or that we have no right to describe.
        Cheap enough to call before each message.

        Raises:
            BusUnavailableError: the bus did not answer.
        """
        layouts: dict[str, TopicLayout] = {}
        for name in names:
            try:
                info = await self.topic(name)
            except (UnknownTopicError, BusAuthorizationError):
                continue
            layouts[name] = TopicLayout(info.id, info.partitions)
        return layouts

    async def brokers(self) -> int:
        """The current number of brokers; 1 for a bus without brokers."""
        return 1

    @abstractmethod
    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create the missing topics and return their names. Existing topics stay unchanged."""

    @abstractmethod
    async def publish(self, topic: str, partition: int, entry: Entry) -> int:
        """Write one record outside any transaction; return its offset once it is acknowledged.

        Raises:
            TooLargeError: the record is larger than the topic allows.
            UnknownTopicError: the topic or the partition does not exist.
            BusUnavailableError: it is unknown whether the record was written.
        """

    @abstractmethod
    async def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset and the one after the last (the high watermark, with uncommitted records)."""

    @abstractmethod
    async def offset_at(self, topic: str, partition: int, moment_ms: int) -> int:
        """The offset of the first record whose time (see `Message.timestamp_ms`) is not before `moment_ms`; the end of
        the partition as it was at the call, if there is none.

        Raises:
            UnknownTopicError: the topic or the partition does not exist.
            BusUnavailableError: the bus did not answer.
        """

    @abstractmethod
    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        """A reader from offset `start` (None: the first offset).

        `committed`: read only records of committed transactions, in the order of their offsets; else all records.
        `lenient`: what stands for a batch that cannot be decoded is one message (see `Message.unreadable`), as it is
        for a reader that is not `committed`; else such a batch is a `DamagedTopicError` at each `fetch`.
        """

    @abstractmethod
    async def open_writer(self, identity: str, partition: int, *, topics: Collection[str] = ()) -> Writer:
        """Take a writer identity (Kafka: a transactional id) and fence its holder.

        On return every transaction of an earlier holder is decided: committed or aborted for good. `topics`: those to
        which holders of this identity write. A decision may not have reached all partitions of a transaction yet. The
        adapter completes it in this partition of `topics`, and nowhere else (see `kafka.writing`).
        """

    @abstractmethod
    async def tenure(self, identity: str) -> str | None:
        """`Writer.tenure` of a writer identity's current holder; None if the bus does not know it. If it equals that of
        a writer, nobody has taken the identity since that one was opened. Changes nothing.

        Raises:
            BusUnavailableError: the bus did not answer.
        """

    async def has_committed(self, identity: str) -> bool:  # noqa: ARG002
        """Whether the bus knows that the last transaction of a writer identity was committed. If so, the call waits
        until every partition shows it. False proves nothing, because the bus forgets in time, or never knew. Changes
        nothing.

        Raises:
            BusUnavailableError: the bus did not answer, or the commit is not complete in time.
        """
        return False

    @abstractmethod
    async def join(
        self, group: str, topic: str, *, replica: str | None, session_timeout: float, heartbeat_interval: float
    ) -> Membership:
        """Join `group`, which divides the partitions of `topic` evenly among its members and moves few of them.

        Returns at once; `Membership.changed` returns the first assignment. All members of a group name the same topic.
        On the bus of a single machine a group has one member, with all partitions, for as long as its process lives.

        Args:
            replica: a name that survives restarts (KIP-345's static member). A process that joins under it within the
                session continues as that member. None: a new member each time.
            session_timeout: seconds of silence after which a member is expelled and others get its partitions.
            heartbeat_interval: seconds between heartbeats, at most a third of the session. A member learns of a change
                within this time.

        Raises:
            UnknownTopicError: the topic does not exist.
            BusUnavailableError: the bus did not answer.
            BusConfigurationError: the group has the one member that this bus allows.
        """

    @abstractmethod
    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:
        """Wait until all current records of the partition are decided; return the offset after them.

        A committed reader whose `position` has reached that offset has seen all that was committed before this call.

        `taking`: the writer identity that the caller is about to take, which ends the open transaction of its holder.
        If no other transaction is open, the call does not wait and returns the offset before that transaction. After
        taking the identity, the caller must read the records that others committed behind that offset.

        Raises:
            BusUnavailableError: a transaction stays open for longer than a transaction of ours can; the message names
                its writer.
        """

    async def open_transaction(self, topic: str, partition: int) -> str | None:  # noqa: ARG002
        """Whose open transaction hides the newest records of a partition now, and how to end it, in words. None: none
        does. Managers' own transactions last milliseconds.

        Raises:
            BusError: the bus did not answer.
        """
        return None

    async def missing_rights(self, rights: Sequence[Right]) -> list[str]:  # noqa: ARG002
        """The ones among `rights` that we lack, a sentence each, with the remedy. Changes nothing, fences nobody.

        On a bus without rights none is missing. A right that cannot be checked counts as granted.

        Raises:
            BusError: the bus did not answer.
        """
        return []

    async def obstacles(self, *, writer: str, sessions: Mapping[str, float]) -> list[Obstacle]:  # noqa: ARG002
        """What keeps a manager from working with a bus that answers, for a writer identity and for members of groups
        with these sessions in seconds. May take some seconds. Changes nothing, fences nobody.

        Raises:
            BusError: the bus did not answer.
        """
        return []

    async def clamps_acknowledgements(self) -> bool:
        """Whether a topic with min.insync.replicas above the number of its copies can be written all the same.

        Raises:
            BusError: the bus did not answer.
        """
        return False

    @property
    def refusals(self) -> int:
        """The number of connections that failed to authenticate; see `BusAuthenticationError`. 0 without log-in."""
        return 0

    async def maintain(self) -> None:
        """Do retention and compaction, if the bus leaves them to its users. Kafka's brokers do their own.

        A manager calls it about once a minute, concurrently with its commits.

        Raises:
            BusUnavailableError: the bus is unavailable now; finished work stays done.
        """

    async def __aenter__(self) -> Self:
        await self.start()
        return self

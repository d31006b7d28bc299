"""The bus port: the few things the service and the workers ask of a message bus.

Two adapters implement it, `kafka` and `embedded`; one contract-test suite (tests/bus) runs against both.
The words are Kafka's: topics have partitions, partitions have records at growing offsets (with holes), a
compacted topic keeps at least the last record of every key, a record with a value of None is a tombstone.

All awaits are bounded by the adapter's own time limits. Every exception that leaves an adapter is a
`BusError`, except cancellation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Self

from msgspec import Struct


class BusError(Exception):
    """Something the bus could not do. The message names the bus, the thing and, where known, the remedy."""


class BusUnavailableError(BusError):
    """The bus cannot be reached, is full or read-only for now: try again later; nothing was lost."""


class FencedError(BusError):
    """Another writer has taken this writer's identity: nothing of the commit is visible, nor ever will be."""


class CommitUnknownError(BusError):
    """Nobody can say whether the commit happened. Never retry it: open a new writer and read the ledger."""


class OffsetOutOfRangeError(BusError):
    """The asked offset is no longer there (or not yet). `start` and `end` are what there is."""

    def __init__(self, message: str, *, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class UnknownTopicError(BusError):
    """The topic does not exist; the message says how to make it."""


class BusConfigurationError(BusError):
    """The bus is there but not as it must be (wrong URL, a network file system, a refused log-in)."""


class MissingBusError(BusConfigurationError):
    """There is no bus there, and whoever asked makes none."""


class BusAccessError(BusConfigurationError):
    """The bus does not let us do it. At a start that is a mistake to be told at once; later, credentials are being
    exchanged or rights were taken away by mistake, so whoever runs already tries on. Nothing was written."""


class BusAuthenticationError(BusAccessError):
    """The bus and we do not believe each other to be who we say: certificates, passwords, tokens."""


class BusAuthorizationError(BusAccessError):
    """A right is missing; the message names it, and the principal as far as it is known."""


class TooLargeError(BusError):
    """A record is larger than the topic takes."""


class MemberReplacedError(BusError):
    """Another process has joined the group under this member's replica name: it is the member now."""


class Entry(Struct, frozen=True, gc=False):
    """A record to write. Many are made: a struct is made in a sixth of a named tuple's time."""

    key: bytes | None
    value: bytes | None


class Message(Struct, frozen=True, gc=False):
    """A record that was read. `timestamp_ms` is milliseconds since the epoch, as the bus or the sender set it.

    `unreadable` says why it is no record at all but the bytes of a batch, from offset `first` on, that cannot be read:
    it has no key then.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    unreadable: str | None = None
    first: int | None = None


class TopicInfo(NamedTuple):
    """What the bus says of a topic. `config` holds the settings that differ or matter, by Kafka's names."""

    name: str
    id: str
    partitions: int
    replication: int
    config: Mapping[str, str]


class TopicShape(NamedTuple):
    """Which topic a name stands for now (a topic that is deleted and made anew has another id), and its partitions."""

    id: str
    partitions: int


class TopicSpec(NamedTuple):
    """A topic to make. `replication` None means the bus's default."""

    name: str
    partitions: int
    config: Mapping[str, str]
    replication: int | None = None


class Right(NamedTuple):
    """Something that a bus may allow or not, by Kafka's names: `Right("Read", "topic", "outfitter.allocations")`.

    `kind` is topic, transactional-id, group or cluster.
    """

    operation: str
    kind: str
    name: str


class Reader(ABC):
    """A cursor over one partition. Not safe for concurrent use; `aclose` when done (also a context manager)."""

    position: int
    """The next offset to be read. It passes holes and commit markers, so compare it, never an offset seen."""
    heard: bool = True
    """False until the bus has answered this reader for the first time: an empty list says nothing before."""

    @abstractmethod
    async def fetch(self, *, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
        """Return the next records, at least one if any comes within `timeout` seconds, else an empty list.

        May be called again after any error, cancellation included: no record is skipped.

        Raises:
            OffsetOutOfRangeError: `position` is not there; `seek` first.
            BusUnavailableError: the bus did not answer.
        """

    @abstractmethod
    async def seek(self, offset: int) -> None:
        """Read from `offset` next."""

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of connections. Repeatable, bounded, never raises for a bus that is away."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class Writer(ABC):
    """The one holder of a writer identity: whoever opened it last. Commits go to one partition number."""

    partition: int

    @abstractmethod
    async def commit(self, batches: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        """Write all of `batches` (topic, entries) atomically into this writer's partition, in the order given.

        All of them are acknowledged before the commit is asked for; the last batch (the ledger's) is one
        indivisible record batch where the bus knows such a thing. When this returns, all is visible to
        committed readers. One call at a time. Empty batches are allowed.

        Raises:
            FencedError: another writer has the identity.
            CommitUnknownError: the outcome is unknown.
            TooLargeError: a record or the ledger batch is larger than the topic takes; nothing was written.
            BusUnavailableError: it failed for certain; nothing was written.

        After FencedError, CommitUnknownError or BusUnavailableError the writer is spent: open a new one. After
        TooLargeError `tainted` tells: it is, if the bus itself refused what the adapter had let pass.
        Cancelling leaves the outcome unknown and the writer spent.
        """

    @property
    @abstractmethod
    def tainted(self) -> bool:
        """True when a request of a past commit was retried or failed inside the client, so that a late copy of
        it could still act: open a new writer before the next commit."""

    @property
    @abstractmethod
    def max_batch_bytes(self) -> int:
        """How many bytes of keys and values the last batch of a commit may hold."""

    @property
    @abstractmethod
    def tenure(self) -> str:
        """What tells this holding of its identity from every earlier and later one; see `Bus.tenure`."""

    @abstractmethod
    async def aclose(self) -> None:
        """Abort what is open and let go. Repeatable, bounded, never raises for a bus that is away."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class Membership(ABC):
    """One member of a group that shares a topic's partitions out among its members. It says who owns which partition,
    and reads no data: nothing that its holder does can hold up the others.

    Ownership is not exclusion: an owner that is frozen or cut off learns late that its partitions have moved. Whatever
    must not happen twice goes through a `Writer`, which fences. The words are those of Kafka's consumer groups.
    """

    @property
    @abstractmethod
    def partitions(self) -> frozenset[int]:
        """Those assigned now, as far as this member has heard. Empty before the first assignment, while it is
        expelled, and after the end. While the bus is away it stays as it was: nobody else is given them either."""

    @abstractmethod
    async def changed(self) -> frozenset[int]:
        """Wait until `partitions` differs from what was returned last (at first: from the empty set); return it.

        That this member was expelled (silent for longer than its session) is always told, by an empty set, even
        when the same partitions came back at once: somebody else may have had them in between. For one caller.

        Raises:
            MemberReplacedError: another process has this member's replica name. It is over: close this one.
            BusConfigurationError: the group cannot be joined so, for instance for want of a right.
        """

    @abstractmethod
    async def confirmed(self, partition: int) -> bool:
        """Ask whether `partition` is this member's: True only if the group's coordinator has answered a question that
        was sent after this call. False means no, or nobody knows; bounded, raises nothing."""

    @abstractmethod
    async def leave(self) -> None:
        """Leave the group for good, also as a replica: its partitions move at once. Bounded and repeatable. While
        the bus is away the session's end does it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Let go. A replica (a member with a name) does not leave: who joins under its name within the session has
        its partitions, and nobody else sees a change. Others leave. Bounded, repeatable, never raises for a bus that
        is away."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class Bus(ABC):
    """A connection to one bus. Constructing connects to nothing; `async with bus:` does, and closes."""

    url: str
    local: bool = False
    """True for the bus of a single machine: no administrator makes its topics, so a manager does."""

    @abstractmethod
    async def start(self) -> None:
        """Connect and check that this is a bus we can use.

        Raises:
            BusUnavailableError: nobody there, with the address that was tried.
            BusConfigurationError: it is there and not usable; the message names the remedy.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close every connection this bus opened itself. Repeatable, bounded."""

    @abstractmethod
    async def topic(self, name: str) -> TopicInfo:
        """Describe a topic. Raises `UnknownTopicError`."""

    async def shapes(self, names: Collection[str]) -> dict[str, TopicShape]:
        """The shapes of these topics, as they are now; those that do not exist, or that we may not ask for, are left
        out. Cheap: it may be asked before each message.

        Raises:
            BusUnavailableError: the bus did not answer.
        """
        found: dict[str, TopicShape] = {}
        for name in names:
            try:
                info = await self.topic(name)
            except (UnknownTopicError, BusAuthorizationError):
                continue
            found[name] = TopicShape(info.id, info.partitions)
        return found

    async def brokers(self) -> int:
        """How many brokers there are now to hold copies of a partition; a bus without brokers counts as one."""
        return 1

    @abstractmethod
    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Make the topics that do not exist and return their names; those that exist stay as they are."""

    async def add_partitions(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions, so that it has so many; the new ones are empty, the others stay as they are.
        One that has so many already stays as it is. Who uses the topic learns of it when he asks for its shape.

        Raises:
            UnknownTopicError.
            BusConfigurationError: it has more already, and there is no way back.
        """
        raise BusConfigurationError(f"{self.url}: topic {topic!r} cannot be given {partitions} partitions")

    @abstractmethod
    async def publish(self, topic: str, partition: int, entry: Entry) -> int:
        """Write one record outside any transaction; return its offset once it is acknowledged.

        Raises:
            TooLargeError, UnknownTopicError, BusUnavailableError (then it may or may not have been written).
        """

    @abstractmethod
    async def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset there is and the one after the last (the high watermark, uncommitted included)."""

    @abstractmethod
    async def open_reader(self, topic: str, partition: int, *, start: int | None, committed: bool) -> Reader:
        """A reader from offset `start` (None: the first there is).

        `committed`: only records of committed transactions, in the order of their offsets; else all.
        """

    @abstractmethod
    async def open_writer(self, identity: str, partition: int, *, topics: Collection[str] = ()) -> Writer:
        """Take a writer identity (Kafka: a transactional id), fencing whoever had it.

        When this returns, every transaction of an earlier holder is decided: committed or aborted for good. `topics`
        are those that holders of this identity write to: only there, in this partition, is what a decision has not
        reached ended now, and as it was decided (see `kafka.producer`).
        """

    @abstractmethod
    async def tenure(self, identity: str) -> str | None:
        """Whose a writer identity is now: `Writer.tenure` of whoever took it last; None where the bus does not tell.
        Where that is still one's own, nobody has taken the identity since. Asking changes nothing.

        Raises:
            BusUnavailableError: the bus did not answer.
        """

    async def has_committed(self, identity: str) -> bool:  # noqa: ARG002
        """Whether the last that the bus knows of a writer identity is a commit: then it wrote something once, whatever
        there is of it now. False says nothing: the bus forgets in time, or has never told. Asking changes nothing.

        Raises:
            BusUnavailableError: the bus did not answer.
        """
        return False

    @abstractmethod
    async def join(
        self, group: str, topic: str, *, replica: str | None, session_timeout: float, heartbeat_interval: float
    ) -> Membership:
        """Become a member of `group`, which shares out the partitions of `topic`, evenly and moving few of them.

        Returns at once; `Membership.changed` tells the first assignment. All members of a group name the same topic.

        Args:
            replica: a name that stays over restarts (KIP-345's static member): who joins under it within the session
                goes on as the member that had it. None: a new member each time.
            session_timeout: seconds of silence after which a member is expelled and its partitions are given to others.
            heartbeat_interval: seconds between signs of life; a third of the session at most. A change is heard of
                within this time.

        Raises:
            UnknownTopicError, BusUnavailableError.
        """

    @abstractmethod
    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:
        """Wait until everything that is in the partition now is decided; return the offset after it.

        A committed reader whose `position` has reached that offset has seen all that was committed before
        this call. Who is about to take the writer identity `taking`, and so to end what its last holder has open, need
        not wait for that: where all that is undecided is its own, the offset is the one before that, and what others
        committed behind it is to be read once the identity is taken.

        Raises:
            BusUnavailableError: somebody's transaction stays open for longer than any of ours may; says whose.
        """

    async def missing_rights(self, wanted: Sequence[Right]) -> list[str]:  # noqa: ARG002
        """Which of these we do not have, a sentence each, with the remedy. Asking changes nothing and fences nobody; a
        bus without rights of its own misses none. What cannot be asked for counts as there.

        Raises:
            BusError: nobody answers.
        """
        return []

    @property
    def refusals(self) -> int:
        """How many connections came to nothing because the bus and we did not believe each other; see
        `BusAuthenticationError`. A bus without log-in has none."""
        return 0

    async def maintain(self) -> None:  # noqa: B027 - a bus with a broker has nothing to do here
        """Retention, compaction and the like, where the bus leaves them to its users; a manager calls it about
        once a minute, and beside its commits. Kafka's broker does its own: there it does nothing.

        Raises:
            BusUnavailableError: not now; what was done stays done.
        """

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

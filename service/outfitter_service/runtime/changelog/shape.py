"""The shape of a cluster's topics: how many partitions they have, and which topics they are.

A ledger holds in one place only: in the topic that it was written to, and in the partitions that the count of that time
gave its hosts. Where either is another one now, what is read there may lack live allocations, and their devices would
be lent again. So a manager compares before it takes a partition and while it serves, and ends rather than guess.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, Struct, structs

from outfitter_proto.bus import Bus, Message, UnknownTopicError
from outfitter_proto.bus.reading import read_to
from outfitter_proto.names import Topics, transactional_id
from outfitter_proto.records import Checkpoint
from outfitter_service.runtime.changelog.restore import Restored
from outfitter_service.runtime.input.assignment import Assignment

LOOK_S = 30.0
"""How often a manager that serves looks at the shape of its topics: one small question."""

MOVING = 0
"""What a checkpoint names as the number of partitions while the records of its hosts are being moved."""


class TopicsChangedError(RuntimeError):
    """The topics are other ones than those that the ledger was written for. The message says what to do."""


class Shape(Struct, frozen=True, kw_only=True):
    """All topics' number of `partitions`, and the ids of `registrations`, `ledger`, `history` and `dead_letters`; None:
    there is no such topic, we may not ask for it, or it is nobody's concern. `ledger_start` is the first offset of the
    partition that is looked at."""

    partitions: int
    registrations: str
    ledger: str
    ledger_start: int = 0
    history: str | None
    dead_letters: str | None


async def shape(bus: Bus, topics: Topics, *, history: bool = True) -> Shape:
    """The shape of a cluster's topics now.

    Raises:
        TopicsChangedError: they have different numbers of partitions.
        UnknownTopicError: one that no manager can do without is not there.
        BusError: the bus did not answer.
    """
    wanted = [name for name in topics if history or name != topics.history]
    found = await bus.shapes(wanted)
    for name in (topics.registrations, topics.allocations):
        if name not in found:
            await bus.topic(name)  # says why
            raise UnknownTopicError(f"{bus.url}: there is no topic {name!r} now")
    counts = {name: each.partitions for name, each in found.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise TopicsChangedError(
            f"the topics have different numbers of partitions ({shown}), and a host has one place in all of them. "
            f"{growing(max(counts.values()))}"
        )
    ids = {name: each.id for name, each in found.items()}
    return Shape(
        partitions=counts[topics.allocations],
        registrations=ids[topics.registrations],
        ledger=ids[topics.allocations],
        history=ids.get(topics.history),
        dead_letters=ids.get(topics.dead_letters),
    )


def growing(partitions: int) -> str:
    """How to go on where partitions were added."""
    return (
        f"Stop all managers of this cluster and run `outfitter topics grow --partitions {partitions}`, which moves "
        "each host's records to where they belong; then start the managers again"
    )


class Ground:
    """What one processor's ledger stands on. `shape` is the topics' at the last `look`."""

    def __init__(self, assignment: Assignment, *, history: bool, adopt: bool) -> None:
        """`history`: whether the cluster has that topic. `adopt`: take the ledger as it stands, whichever topic it is
        in."""
        self._assignment = assignment
        self._bus = assignment.bus
        self._topics = assignment.topics
        self._partition = assignment.partition
        self._identity = transactional_id(assignment.identity.cluster, assignment.identity.writer)
        self._partitions = assignment.partitions
        self._history = history
        self._adopt = adopt
        self._shape: Shape | None = None
        self._was_written = False
        self._history_end = 0
        self._looked_elsewhere = False

    @property
    def shape(self) -> Shape:
        if self._shape is None:
            raise RuntimeError("nobody has looked at the topics yet")
        return self._shape

    async def look(self) -> Shape:
        """Compare the topics with what they were at the last look; the first one of all comes before the writer
        identity is taken. History and dead letters may be made anew, and registrations, too, for they are found to be
        other ones by their position.

        Raises:
            TopicsChangedError: partitions were added, the ledger is another topic, or records were deleted from it.
            BusError: the bus did not answer, or a topic is not there now.
        """
        found = await shape(self._bus, self._topics, history=self._history)
        found = structs.replace(found, ledger_start=await self._ledger_start())
        if self._partitions not in (None, found.partitions):
            raise TopicsChangedError(
                f"the topics of this cluster have {found.partitions} partitions, and had {self._partitions} when this "
                f"manager started: the places of hosts are other ones now. {growing(found.partitions)}"
            )
        known = self._shape
        if known is None:
            self._was_written = await self._bus.has_committed(self._identity)
            is_known = await self._bus.tenure(self._identity) is not None
            if is_known and found.history is not None:
                _, self._history_end = await self._bus.offsets(self._topics.history, self._partition)
        elif known.ledger != found.ledger:
            raise TopicsChangedError(
                f"topic {self._topics.allocations} was deleted and made anew while this manager served (its id was "
                f"{known.ledger}, and is {found.ledger} now): the ledger lacks what was granted before. {_ADOPTING}"
            )
        elif found.ledger_start > known.ledger_start:
            raise self._deleted(found.ledger_start)
        self._partitions, self._shape = found.partitions, found
        return found

    async def _ledger_start(self) -> int:
        """The first offset of the ledger on a broker. Compaction does not move it there."""
        if self._bus.local:
            return 0
        start, _ = await self._bus.offsets(self._topics.allocations, self._partition)
        return start

    def _deleted(self, start: int) -> TopicsChangedError:
        return TopicsChangedError(
            f"the records of {self._place} before offset {start} were deleted, by another cleanup.policy than compact "
            f"or by hand: grants may be missing. {_ADOPTING}"
        )

    async def judge(self, restored: Restored, *, taken: bool) -> None:
        """Whether what was replayed may be worked on here. Unless the writer identity is `taken`, what its last holder
        committed may be undecided and not be among it: then that is judged once it is.

        Raises:
            TopicsChangedError: it is of other topics, records were deleted from it, or those of these hosts lie
                elsewhere.
            BusError: that cannot be told now.
        """
        # deleted while it was replayed counts as well
        self._shape = structs.replace(self.shape, ledger_start=await self._ledger_start())
        self._compare(restored.checkpoint)
        if restored.checkpoint is not None:
            return
        if not self._looked_elsewhere:
            await self._look_elsewhere()
            self._looked_elsewhere = True
        if self._adopt or restored.ledger.hosts or restored.ledger.records:
            return
        if not taken and (await self._bus.offsets(self._topics.allocations, self._partition))[1] > restored.end:
            return
        if self._was_written or await self._is_in_history():
            raise TopicsChangedError(
                f"a manager has written as {self._identity!r} before, and {self._place} holds nothing of it: the topic "
                f"was made anew, or restored without it. {_ADOPTING}"
            )
        if other := await self._written_without_the_ledger():
            raise TopicsChangedError(
                f"managers have written to {other}, and {self._place} is empty, to which they write at the same time: "
                f"the topic was made anew, or restored without its records. {_ADOPTING}"
            )

    async def _written_without_the_ledger(self) -> str | None:
        """A place that nobody writes to without a commit in this partition of the ledger, where there never was any.
        It tells of a ledger made anew when the bus has forgotten who wrote to it, until somebody writes to that."""
        for name, id_ in (
            (self._topics.history, self.shape.history),
            (self._topics.dead_letters, self.shape.dead_letters),
        ):
            if id_ is None:
                continue
            if not await self._holds(name, lambda _: True):
                continue
            # asked last: somebody may write to both at this moment
            _, end = await self._bus.offsets(self._topics.allocations, self._partition)
            return f"{name}/{self._partition}" if end == 0 else None
        return None

    def _compare(self, checkpoint: Checkpoint | None) -> None:
        """A checkpoint of a version that named neither is taken for one of these topics."""
        if checkpoint is None:
            return
        there, id_, start = checkpoint.partitions, checkpoint.ledger_id, checkpoint.ledger_start or 0
        if id_ is not UNSET and id_ != self.shape.ledger and not self._adopt:
            raise TopicsChangedError(
                f"the ledger in {self._place} was written to another topic of that name (its id was {id_}, and is "
                f"{self.shape.ledger} now), which was deleted or is restored from a copy: grants may be missing. "
                f"{_ADOPTING}"
            )
        if self.shape.ledger_start > start and not self._adopt:
            raise self._deleted(self.shape.ledger_start)
        if there is not UNSET and there != self.shape.partitions:
            was = (
                "is being moved between partitions"
                if there == MOVING
                else f"was written when there were {there} of them"
            )
            raise TopicsChangedError(
                f"the topics have {self.shape.partitions} partitions, and the ledger in {self._place} {was}. "
                f"{growing(self.shape.partitions)}"
            )

    async def _look_elsewhere(self) -> None:
        """A ledger that looks new: perhaps the records of these hosts lie where another number put them."""
        for partition in range(self.shape.partitions):
            if partition == self._partition:
                continue
            strays = await self._strays(partition)
            if strays:
                raise TopicsChangedError(
                    f"the topics have {self.shape.partitions} partitions, by which {self._place} is the place of "
                    f"{', '.join(strays[:3])}{' and others' if len(strays) > 3 else ''}; but what was granted there is "
                    f"in {self._topics.allocations}/{partition}: partitions were added, or the topic was restored with "
                    f"another number. {growing(self.shape.partitions)}"
                )

    async def _strays(self, partition: int) -> list[str]:
        """The hosts of this scope with records in another partition."""
        topic = self._topics.allocations
        found: dict[bytes, str] = {}
        end = await self._bus.stable_end(topic, partition)
        async with await self._bus.open_reader(topic, partition, start=None, committed=True) as reader:
            async for messages in read_to(reader, end):
                for message in messages:
                    host = self._assignment.scope.stray(message.key or b"", self.shape.partitions)
                    if host is None:
                        continue
                    if message.value is None:
                        found.pop(message.key or b"", None)
                    else:
                        found[message.key or b""] = host
        return sorted(set(found.values()))

    async def _is_in_history(self) -> bool:
        """Whether history had a commit of this writer at the first look. The bus tells of the last transaction alone,
        and that one was perhaps aborted because the ledger was being deleted. A rival's later commit does not count:
        the ledger may have been replayed before it."""
        if self.shape.history is None or not self._history_end:
            return False
        writer = self._assignment.identity.writer.encode()
        return await self._holds(self._topics.history, lambda message: message.key == writer, before=self._history_end)

    async def _holds(self, topic: str, wanted: Callable[[Message], bool], *, before: int | None = None) -> bool:
        """Whether such a message is committed in this partition of a topic, as far as that is decided while the writer
        identity is not taken; `before` an offset, if that is given."""
        end = await self._bus.stable_end(topic, self._partition, taking=self._identity)
        end = end if before is None else min(end, before)
        async with await self._bus.open_reader(topic, self._partition, start=None, committed=True) as reader:
            async for messages in read_to(reader, end):
                if any(wanted(message) for message in messages if message.offset < end):
                    return True
        return False

    @property
    def _place(self) -> str:
        return f"{self._topics.allocations}/{self._partition}"


_ADOPTING = (
    "Make sure that no worker runs whose allocation `outfitter status` does not show: its devices would be lent again. "
    "Then start once with --adopt-ledger"
)

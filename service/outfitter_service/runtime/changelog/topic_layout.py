"""The layout of a cluster's topics: their number of partitions, and their ids.

A ledger is complete only in the topic that it was written to, and with the number of partitions of that time. If either
has changed, live allocations may be missing, and their devices would be granted again. So a manager checks before it
takes a partition and while it serves, and ends rather than guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime

from msgspec import UNSET, Struct, structs

from outfitter_proto.bus import Bus, Message, UnknownTopicError
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_ledger
from outfitter_proto.keys import CHECKPOINT
from outfitter_proto.names import Topics, transactional_id
from outfitter_proto.records import Checkpoint
from outfitter_service.runtime.changelog.restore import Restored
from outfitter_service.runtime.input.assignment import Assignment

CHECK_S = 30.0
"""Seconds between two checks while a manager serves: one small request."""

INCOMPLETE = 0
"""The number of partitions in a checkpoint while `outfitter restore` writes the ledger. Version 0.2 wrote it as well
while it moved records between partitions."""

_BACKUP = "backup/"


class TopicsChangedError(RuntimeError):
    """The ledger was written for other topics. The message says what to do."""


class ClusterLayout(Struct, frozen=True, kw_only=True):
    """All topics' number of `partitions`, and the topics' ids: `registrations`, `ledger`, `history`, `dead_letters`.
    None: the topic does not exist, the manager may not see it, or does not need it. `ledger_start`: the first offset of
    the manager's partition of the ledger."""

    partitions: int
    registrations: str
    ledger: str
    ledger_start: int = 0
    history: str | None
    dead_letters: str | None


async def cluster_layout(bus: Bus, topics: Topics, *, history: bool = True) -> ClusterLayout:
    """The layout of a cluster's topics now.

    Raises:
        TopicsChangedError: they have different numbers of partitions.
        UnknownTopicError: a topic that every manager needs is missing.
        BusError: the bus did not answer.
    """
    layouts = await bus.layouts([name for name in topics if history or name != topics.history])
    for name in (topics.registrations, topics.allocations):
        if name not in layouts:
            await bus.topic(name)  # raises an error that says why
            raise UnknownTopicError(f"{bus.url}: topic {name!r} does not exist now")
    counts = {name: each.partitions for name, each in layouts.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise TopicsChangedError(
            f"the topics have different numbers of partitions ({shown}), and all must have the same number. "
            f"{replacing(max(counts.values()))}"
        )
    ids = {name: each.id for name, each in layouts.items()}
    return ClusterLayout(
        partitions=counts[topics.allocations],
        registrations=ids[topics.registrations],
        ledger=ids[topics.allocations],
        history=ids.get(topics.history),
        dead_letters=ids.get(topics.dead_letters),
    )


def backup_id(at: datetime) -> str:
    """The ledger's id in the checkpoints of a restored backup, made at that moment: no topic has it."""
    return f"{_BACKUP}{at:%Y-%m-%dT%H:%M:%SZ}"


def is_restored(checkpoint: Checkpoint) -> bool:
    """Whether a backup was restored, and the checkpoint's manager has not adopted it yet."""
    return checkpoint.ledger_id is not UNSET and checkpoint.ledger_id.startswith(_BACKUP)


def restored_of(checkpoint: Checkpoint) -> datetime | None:
    """The moment of the backup that was restored and is not adopted yet; None: none is, or it has no moment."""
    if checkpoint.ledger_id is UNSET or not is_restored(checkpoint):
        return None
    with suppress(ValueError):
        return datetime.fromisoformat(checkpoint.ledger_id.removeprefix(_BACKUP))
    return None


def unfinished(checkpoint: Checkpoint) -> str | None:
    """Why records of this checkpoint's manager may be missing from the ledger, and what to do; None: none are."""
    if checkpoint.partitions != INCOMPLETE:
        return None
    return _HALF_MOVED if checkpoint.instance.startswith("topics-grow") else _HALF_RESTORED


_HALF_RESTORED = (
    "`outfitter restore` has not completed this ledger: delete its topic, create it again, and restore the backup again"
)
_HALF_MOVED = (
    "version 0.2 has not moved all records of this ledger to their new partitions: finish it with version 0.2 "
    "(`outfitter topics grow`, with the same number)"
)


def replacing(partitions: int) -> str:
    """What people must do after partitions were added."""
    return (
        "Stop all managers of this cluster, run `outfitter backup`, and restore the file into a new ledger with "
        f'{partitions} partitions (service/recover.md, "A wrong number of partitions")'
    )


class TopicCheck:
    """Checks the topics of one processor. `layout`: the topics' layout at the last `check`."""

    def __init__(self, assignment: Assignment, *, history: bool, adopt: bool) -> None:
        """`history`: whether the cluster has that topic. `adopt`: accept the ledger as it is, whichever topic it was
        written to."""
        self._assignment = assignment
        self._bus = assignment.bus
        self._topics = assignment.topics
        self._partition = assignment.partition
        self._identity = transactional_id(assignment.identity.cluster, assignment.identity.writer)
        self._partitions = assignment.partitions
        self._history = history
        self._adopt = adopt
        self._layout: ClusterLayout | None = None
        self._was_written = False
        self._history_end = 0
        self._strays_checked = False

    @property
    def layout(self) -> ClusterLayout:
        """The topics' layout at the last `check`."""
        if self._layout is None:
            raise RuntimeError("the topics have not been checked yet")
        return self._layout

    async def check(self) -> ClusterLayout:
        """Compare the topics with those of the last check. The first check comes before fencing.

        Only the ledger's topic must be unchanged. Others may be recreated; of registrations the input's position
        tells.

        Raises:
            TopicsChangedError: partitions were added, the ledger's topic was replaced, or records were deleted from it.
            BusError: the bus did not answer, or a topic is missing.
        """
        now = await cluster_layout(self._bus, self._topics, history=self._history)
        now = structs.replace(now, ledger_start=await self._ledger_start())
        if self._partitions not in (None, now.partitions):
            raise TopicsChangedError(
                f"the topics of this cluster have {now.partitions} partitions, and had {self._partitions} when this "
                f"manager started: hosts may belong to other partitions now. {replacing(now.partitions)}"
            )
        before = self._layout
        if before is None:
            self._was_written = await self._bus.has_committed(self._identity)
            has_writer = await self._bus.tenure(self._identity) is not None
            if has_writer and now.history is not None:
                _, self._history_end = await self._bus.offsets(self._topics.history, self._partition)
        elif before.ledger != now.ledger:
            raise TopicsChangedError(
                f"topic {self._topics.allocations} was deleted and recreated while this manager served (its id was "
                f"{before.ledger}, and is {now.ledger} now): the ledger lacks the earlier grants. {_ADOPTING}"
            )
        elif now.ledger_start > before.ledger_start:
            raise TopicsChangedError(f"{self._deleted(now.ledger_start)}. {_ADOPTING}")
        self._partitions, self._layout = now.partitions, now
        return now

    async def _ledger_start(self) -> int:
        """The first offset of the ledger on a broker. Compaction does not move it there."""
        if self._bus.local:
            return 0
        start, _ = await self._bus.offsets(self._topics.allocations, self._partition)
        return start

    def _deleted(self, start: int) -> str:
        return (
            f"the records of {self._topic_partition} before offset {start} were deleted, by hand or by a "
            "cleanup.policy other than compact: grants may be missing"
        )

    async def check_restored(self, restored: Restored, *, taken: bool) -> str | None:
        """Check whether a restored ledger may be used. `taken`: this manager has fenced the writer. Before that, the
        last holder's final transaction may still be open; then the check comes after fencing. Returns why grants may be
        missing from a ledger that is adopted; None: there is no reason.

        Raises:
            TopicsChangedError: the ledger was written for other topics, records were deleted from it, or these hosts'
                records are in another partition.
            BusError: the check failed.
        """
        # records may have been deleted during the restore
        self._layout = structs.replace(self.layout, ledger_start=await self._ledger_start())
        if restored.checkpoint is not None:
            doubt = self._compare(restored.checkpoint)
        else:
            doubt = await self._check_new(restored, taken=taken)
        if doubt is not None and not self._adopt:
            raise TopicsChangedError(f"{doubt}. {_ADOPTING}")
        return doubt

    async def _check_new(self, restored: Restored, *, taken: bool) -> str | None:
        """Whether a ledger without a checkpoint of this writer should have one; see `check_restored`."""
        self._refuse_unfinished(restored.neighbours)
        if not self._strays_checked:
            await self._refuse_strays()
            self._strays_checked = True
        if restored.ledger.hosts or restored.ledger.records:
            return None
        # the restore has each commit that was complete before it, whoever writes to the partition meanwhile
        is_complete = taken or self._was_written
        if not is_complete and (await self._bus.offsets(self._topics.allocations, self._partition))[1] > restored.end:
            return None
        if self._was_written or await self._is_in_history():
            return (
                f"a manager has written as {self._identity!r} before, and {self._topic_partition} holds nothing of it: "
                "the topic was recreated, or restored without it"
            )
        if written := await self._written_without_the_ledger():
            return (
                f"managers have written to {written}, and {self._topic_partition} is empty although they write to both "
                "together: the topic was recreated, or restored without its records"
            )
        return None

    async def _written_without_the_ledger(self) -> str | None:
        """A topic partition with records although this partition of the ledger never had a commit; else None. Each
        commit writes to both. So the ledger was recreated; this shows even if the bus has forgotten the writer.

        A manager needs no right to read these topics, unless the ledger is empty and they are not."""
        ledger = self._topics.allocations, self._partition
        if (await self._bus.offsets(*ledger))[1] > 0:
            return None
        for name, topic_id in (
            (self._topics.history, self.layout.history),
            (self._topics.dead_letters, self.layout.dead_letters),
        ):
            if topic_id is None:
                continue
            if not await self._holds(name, lambda _: True):
                continue
            # asked again, because a manager may write to both at this moment
            return f"{name}/{self._partition}" if (await self._bus.offsets(*ledger))[1] == 0 else None
        return None

    def _compare(self, checkpoint: Checkpoint) -> str | None:
        """Compare the topics with those in the checkpoint; see `check_restored`. A checkpoint of an old version names
        none, and passes."""
        if (reason := unfinished(checkpoint)) is not None:
            raise TopicsChangedError(f"{self._topic_partition}: {reason}")
        doubt = self._doubt(checkpoint)
        if doubt is not None and not self._adopt:
            return doubt
        partitions = checkpoint.partitions
        if partitions is not UNSET and partitions != self.layout.partitions:
            raise TopicsChangedError(
                f"the topics have {self.layout.partitions} partitions, and the ledger in {self._topic_partition} "
                f"was written when there were {partitions}. {replacing(self.layout.partitions)}"
            )
        return doubt

    def _doubt(self, checkpoint: Checkpoint) -> str | None:
        """Why a ledger with this checkpoint may lack grants, or None."""
        ledger_id, start = checkpoint.ledger_id, checkpoint.ledger_start or 0
        if ledger_id is not UNSET and ledger_id.startswith(_BACKUP):
            return (
                f"the ledger in {self._topic_partition} was restored from a backup of "
                f"{ledger_id.removeprefix(_BACKUP)}: later grants are missing"
            )
        if ledger_id is not UNSET and ledger_id != self.layout.ledger:
            return (
                f"the ledger in {self._topic_partition} was written to another topic of that name (its id was "
                f"{ledger_id}, and is {self.layout.ledger} now), which was deleted or restored from a copy: grants may "
                "be missing"
            )
        return self._deleted(self.layout.ledger_start) if self.layout.ledger_start > start else None

    async def _refuse_strays(self) -> None:
        """The ledger looks new: make sure that no other partition has these hosts' records."""
        for partition in range(self.layout.partitions):
            if partition == self._partition:
                continue
            strays = await self._strays(partition)
            if strays:
                raise TopicsChangedError(
                    f"the topics have {self.layout.partitions} partitions, so that {self._topic_partition} is the "
                    f"place of {', '.join(strays[:3])}{' and others' if len(strays) > 3 else ''}, but their grants are "
                    f"in {self._topics.allocations}/{partition}: partitions were added, or the topic was restored with "
                    f"another number. {replacing(self.layout.partitions)}"
                )

    def _refuse_unfinished(self, checkpoints: Mapping[bytes, bytes]) -> None:
        """Refuse a ledger that is not written to its end: this writer's records may be missing yet. `checkpoints`:
        encoded records of others, by key."""
        for key, value in checkpoints.items():
            if not key.startswith(CHECKPOINT):
                continue
            with suppress(WireError):  # its own writer says what is damaged
                record = decode_ledger(value, key=key)
                if isinstance(record, Checkpoint) and (reason := unfinished(record)) is not None:
                    raise TopicsChangedError(f"{self._topics.allocations}: {reason}")

    async def _strays(self, partition: int) -> list[str]:
        """The hosts of this scope with records in another partition."""
        topic = self._topics.allocations
        hosts: dict[bytes, str] = {}
        checkpoints: dict[bytes, bytes] = {}
        end = await self._bus.stable_end(topic, partition)
        async with await self._bus.open_reader(topic, partition, start=None, committed=True) as reader:
            async for messages in read_to(reader, end):
                for message in messages:
                    if message.key is not None and message.key.startswith(CHECKPOINT):
                        checkpoints[message.key] = message.value or b""
                    host = self._assignment.scope.stray(message.key or b"", self.layout.partitions)
                    if host is None:
                        continue
                    if message.value is None:
                        hosts.pop(message.key or b"", None)
                    else:
                        hosts[message.key or b""] = host
        self._refuse_unfinished(checkpoints)
        return sorted(set(hosts.values()))

    async def _is_in_history(self) -> bool:
        """Whether history had a commit of this writer at the first check.

        The bus knows only the last transaction, which may have been aborted because somebody was deleting the ledger. A
        rival's later commit does not count: this manager may have restored the ledger before it.
        """
        if self.layout.history is None or not self._history_end:
            return False
        writer = self._assignment.identity.writer.encode()
        return await self._holds(self._topics.history, lambda message: message.key == writer, before=self._history_end)

    async def _holds(self, topic: str, matches: Callable[[Message], bool], *, before: int | None = None) -> bool:
        """Whether a message that `matches` is committed in this partition of a topic. `before`: only before this
        offset. An open transaction of this writer is not waited for."""
        end = await self._bus.stable_end(topic, self._partition, taking=self._identity)
        end = end if before is None else min(end, before)
        async with await self._bus.open_reader(topic, self._partition, start=None, committed=True) as reader:
            async for messages in read_to(reader, end):
                if any(matches(message) for message in messages if message.offset < end):
                    return True
        return False

    @property
    def _topic_partition(self) -> str:
        return f"{self._topics.allocations}/{self._partition}"


_ADOPTING = (
    "Make sure that `outfitter status` shows each running worker's allocation: else its devices are granted again. "
    "Then start once with --adopt-ledger"
)

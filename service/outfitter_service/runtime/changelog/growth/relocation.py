"""Moves the records of hosts that belong to another partition: copies them there, then deletes them."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.bus import Entry
from outfitter_proto.keys import CHECKPOINT, host_writer, partition_writer, sweeper_writer
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import NO_COMMIT, NO_TOKEN, Checkpoint, Growth, InputPosition
from outfitter_proto.support.printable import counted
from outfitter_service.runtime.changelog.growth.growing_ledger import GrowingLedger
from outfitter_service.runtime.changelog.growth.partition_contents import CannotGrowError, unfinished
from outfitter_service.runtime.changelog.growth.plan import GrowthPlan
from outfitter_service.runtime.changelog.shape import MOVING, is_restored


class Relocation:
    """Moves records, partition by partition. `hosts`: the moved ones; `records`: the number of their records."""

    def __init__(self, ledger: GrowingLedger, plan: GrowthPlan, say: Callable[[str], object]) -> None:
        """`say`: called with a line for each step, for people."""
        self._ledger = ledger
        self._plan = plan
        self._say = say
        self._copied: set[tuple[int, str]] = set()
        self.hosts: set[str] = set()
        self.records = 0

    async def copy(self, partition: int) -> None:
        """Copy records of other partitions' hosts to their partition."""
        contents = await self._ledger.read(partition)
        self._ledger.note_commits(partition, contents)
        owner = contents.checkpoints.get(partition_writer(partition))
        for host, records in contents.strays.items():
            target = partition_of(host, self._ledger.partitions)
            own = contents.checkpoints.get(host_writer(host))
            mark = self._marked(own or owner, target, host, of_host=own is not None or owner is None)
            entries = [Entry(key, value) for key, value in records.items() if not key.startswith(CHECKPOINT)]
            await self._ledger.put(target, mark, entries)
            self._copied.add((partition, host))
            self.hosts.add(host)
            self.records += len(records)
        if contents.strays:
            self._say(f"partition {partition}: {counted(len(contents.strays), 'host')} copied to the new partition")

    def _marked(self, source: Checkpoint | None, target: int, host: str, *, of_host: bool) -> Checkpoint:
        """The checkpoint of the writer in the `target` partition, which says that its records are being moved there.

        `source`: the checkpoint in the old partition. `of_host`: the writer is the host's own, and not the partition's.
        Tokens, commits and numbers of registrations continue from the higher ones of the two partitions.
        """
        writer = host_writer(host) if of_host else partition_writer(target)
        existing = self._ledger.checkpoints.get((target, writer))
        position = existing.input if existing is not None else self._beginning(target, of_host=of_host)
        before = source or self._ledger.first_checkpoint(writer, "host", position)
        base = before.input.base or 0
        base = max(position.base or 0, base + before.input.reach if source is not None else base)
        return structs.replace(
            before,
            writer=writer,
            commit=max(existing.commit if existing is not None else NO_COMMIT, before.commit if of_host else NO_COMMIT),
            token=max(existing.token if existing is not None else NO_TOKEN, before.token),
            input=structs.replace(position, base=base or UNSET),
            snapshot=UNSET,
            partitions=MOVING,
            ledger_id=self._ledger_id(before, existing),
            ledger_start=self._ledger.start(target),
            grown=UNSET if of_host else self._grown(target, existing),
        )

    def _ledger_id(self, before: Checkpoint, existing: Checkpoint | None) -> str:
        """The topic of the ledger in these checkpoints. If one of them waits to be adopted, both do."""
        if existing is not None and existing.ledger_id is not UNSET and is_restored(existing):
            return existing.ledger_id
        return before.ledger_id if before.ledger_id is not UNSET else self._plan.ledger_id

    def _grown(self, target: int, existing: Checkpoint | None) -> Growth | UnsetType:
        """The growth in the `existing` checkpoint, or in that of the partition's earlier keeper."""
        keeper = existing or self._ledger.keeper(target)
        return keeper.grown if keeper is not None else UNSET

    def _beginning(self, target: int, *, of_host: bool) -> InputPosition:
        """Where a new writer's input begins in the `target` partition: after the messages that its sweeper has
        answered. A host's input begins after all messages from before the host could belong to the partition."""
        swept = self._ledger.checkpoints.get((target, sweeper_writer(target)))
        at = 0
        own = self._plan.input_id, self._plan.ledger_id
        if swept is not None and (swept.input.topic_id, swept.ledger_id or own[1]) == own:
            at = swept.input.claimed or swept.input.to
        keeper = self._ledger.keeper(target)
        if of_host and keeper is not None and keeper.grown is not UNSET:
            at = max(at, keeper.grown.since or 0)
        begin: int | UnsetType = at or UNSET
        return InputPosition(topic_id=self._plan.input_id, partition=target, from_=at, to=at, begin=begin)

    async def delete(self, partition: int) -> None:
        """Delete the records that were copied to their new partition."""
        contents = await self._ledger.read(partition)
        owner = contents.checkpoints.get(partition_writer(partition))
        for host in contents.strays:
            checkpoint = contents.checkpoints.get(host_writer(host)) or owner
            is_written = checkpoint is not None and self._ledger.is_written_since(partition, checkpoint)
            if is_written or (partition, host) not in self._copied:
                raise CannotGrowError(f"a manager still writes for host {host!r}: stop it, and run this again")
        for host, records in contents.strays.items():
            own = contents.checkpoints.get(host_writer(host))
            deleted = [Entry(key, None) for key in records if not key.startswith(CHECKPOINT)]
            if own is None and owner is not None:
                commit = self._ledger.checkpoints.get((partition, owner.writer), owner).commit
                await self._ledger.put(partition, structs.replace(owner, commit=commit), deleted)
                continue
            await self._ledger.delete_host(partition, host, deleted)

    async def finish(self, partition: int) -> None:
        """Mark each writer's records in this partition as complete, so that its manager may start."""
        contents = await self._ledger.read(partition)
        for writer in unfinished(contents, self._ledger.partitions):
            await self._ledger.put(
                partition, structs.replace(contents.checkpoints[writer], partitions=self._ledger.partitions)
            )

    async def check(self) -> None:
        """Check that all records are in their partition.

        Raises:
            CannotGrowError: they are not, because a manager runs.
        """
        for partition in range(self._ledger.partitions):
            contents = await self._ledger.read(partition)
            wrong = unfinished(contents, self._ledger.partitions)
            if contents.strays or wrong:
                raise CannotGrowError(
                    f"partition {partition} still has records of {', '.join([*contents.strays, *wrong][:5])} that "
                    "belong elsewhere: a manager is running. Stop it, and run this again"
                )

"""The records of hosts that belong to another partition: copied there first, then deleted where they were."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.bus import Entry
from outfitter_proto.keys import CHECKPOINT, host_writer, partition_writer, sweeper_writer
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import NO_COMMIT, NO_TOKEN, Checkpoint, Growth, InputPosition
from outfitter_service.runtime.changelog.growth.growing_ledger import GrowingLedger
from outfitter_service.runtime.changelog.growth.plan import GrowthPlan
from outfitter_service.runtime.changelog.growth.stock import CannotGrowError, unfinished
from outfitter_service.runtime.changelog.shape import MOVING


class Relocation:
    """Moves records, partition by partition. `hosts`: those that were moved; `records`: how many of their records."""

    def __init__(self, ledger: GrowingLedger, plan: GrowthPlan, say: Callable[[str], object]) -> None:
        """`say` is told of each step, for people."""
        self._ledger = ledger
        self._plan = plan
        self._say = say
        self._copied: set[tuple[int, str]] = set()
        self.hosts: set[str] = set()
        self.records = 0

    async def copy(self, partition: int) -> None:
        """Write what lies here of other partitions' hosts to where it belongs."""
        found = await self._ledger.look(partition)
        self._ledger.note_commits(partition, found)
        owner = found.checkpoints.get(partition_writer(partition))
        for host, records in found.strays.items():
            place = partition_of(host, self._ledger.partitions)
            own = found.checkpoints.get(host_writer(host))
            mark = self._marked(own or owner, place, host, of_host=own is not None or owner is None)
            entries = [Entry(key, value) for key, value in records.items() if not key.startswith(CHECKPOINT)]
            await self._ledger.put(place, mark, entries)
            self._copied.add((partition, host))
            self.hosts.add(host)
            self.records += len(records)
        if found.strays:
            self._say(f"partition {partition}: {len(found.strays)} hosts copied to where they belong")

    def _marked(self, known: Checkpoint | None, place: int, host: str, *, of_host: bool) -> Checkpoint:
        """The checkpoint of whoever writes in the new place, saying that it is being moved there. Its tokens, commits
        and numbers of registrations go on from the higher ones."""
        writer = host_writer(host) if of_host else partition_writer(place)
        there = self._ledger.checkpoints.get((place, writer))
        position = there.input if there is not None else self._beginning(place, of_host=of_host)
        before = known or self._ledger.first_checkpoint(writer, "host", position)
        base = before.input.base or 0
        base = max(position.base or 0, base + before.input.reach if known is not None else base)
        return structs.replace(
            before,
            writer=writer,
            commit=max(there.commit if there is not None else NO_COMMIT, before.commit if of_host else NO_COMMIT),
            token=max(there.token if there is not None else NO_TOKEN, before.token),
            input=structs.replace(position, base=base or UNSET),
            snapshot=UNSET,
            partitions=MOVING,
            ledger_id=before.ledger_id if before.ledger_id is not UNSET else self._plan.ledger_id,
            ledger_start=self._ledger.start(place),
            grown=UNSET if of_host else self._grown(place, there),
        )

    def _grown(self, place: int, there: Checkpoint | None) -> Growth | UnsetType:
        """What `there` says of the growth, or whoever kept that partition before, if this is a partition's first."""
        keeper = there or self._ledger.keeper(place)
        return keeper.grown if keeper is not None else UNSET

    def _beginning(self, place: int, *, of_host: bool) -> InputPosition:
        """Where the input of somebody who is new in a partition begins: behind what its sweeper has answered, and a
        host's behind all that was said there before it could be the host's place."""
        swept = self._ledger.checkpoints.get((place, sweeper_writer(place)))
        at = 0
        if swept is not None and swept.input.topic_id == self._plan.input_id:
            at = swept.input.claimed or swept.input.to
        keeper = self._ledger.keeper(place)
        if of_host and keeper is not None and keeper.grown is not UNSET:
            at = max(at, keeper.grown.since or 0)
        begin: int | UnsetType = at or UNSET
        return InputPosition(topic_id=self._plan.input_id, partition=place, from_=at, to=at, begin=begin)

    async def delete(self, partition: int) -> None:
        """Delete here what was copied to where it belongs."""
        found = await self._ledger.look(partition)
        owner = found.checkpoints.get(partition_writer(partition))
        for host in found.strays:
            writer = found.checkpoints.get(host_writer(host)) or owner
            written = writer is not None and self._ledger.is_written_since(partition, writer)
            if written or (partition, host) not in self._copied:
                raise CannotGrowError(f"a manager writes for host {host!r} all the time: stop it, and run this again")
        for host, records in found.strays.items():
            own = found.checkpoints.get(host_writer(host))
            deleted = [Entry(key, None) for key in records if not key.startswith(CHECKPOINT)]
            if own is None and owner is not None:
                commit = self._ledger.checkpoints.get((partition, owner.writer), owner).commit
                await self._ledger.put(partition, structs.replace(owner, commit=commit), deleted)
                continue
            await self._ledger.delete_host(partition, host, deleted)

    async def finish(self, partition: int) -> None:
        """Say of each writer whose records are all here that they are: from now on its manager may start."""
        found = await self._ledger.look(partition)
        for writer in unfinished(found, self._ledger.partitions):
            await self._ledger.put(
                partition, structs.replace(found.checkpoints[writer], partitions=self._ledger.partitions)
            )

    async def check(self) -> None:
        """Whether all is where it belongs."""
        for partition in range(self._ledger.partitions):
            found = await self._ledger.look(partition)
            wrong = unfinished(found, self._ledger.partitions)
            if found.strays or wrong:
                raise CannotGrowError(
                    f"partition {partition} still has records of {', '.join([*found.strays, *wrong][:5])} that belong "
                    "elsewhere: a manager is at work. Stop it, and run this again"
                )

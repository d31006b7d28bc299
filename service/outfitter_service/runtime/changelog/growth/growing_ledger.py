"""The ledger of a cluster while partitions are added: its checkpoints, and commits as its writers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.bus import Bus, Entry
from outfitter_proto.codec import encode
from outfitter_proto.keys import checkpoint_key, host_writer, partition_writer, sweeper_writer, writer_names
from outfitter_proto.names import Topics, topics, transactional_id
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import NO_COMMIT, NO_TOKEN, Checkpoint, CommitNumber, InputPosition
from outfitter_service.runtime.changelog.growth.partition_contents import PartitionContents, read_contents
from outfitter_service.runtime.changelog.shape import GROWING

FILL = 0.8
"""A commit fills this part of the largest possible ledger batch."""


class GrowingLedger:
    """The ledger of one cluster. `partitions`: their future number. `checkpoints`: by partition and writer, as last
    read or written."""

    def __init__(self, bus: Bus, cluster: str, partitions: int, *, history: bool) -> None:
        """`history`: whether the cluster has that topic."""
        self._bus = bus
        self._history = history
        self._instance = f"{GROWING}-{secrets.token_hex(4)}"
        self._commits: dict[tuple[int, str], CommitNumber] = {}
        """The last commit by partition and writer that was copied, or that this process wrote."""
        self.cluster = cluster
        self.topics: Topics = topics(cluster)
        self.partitions = partitions
        self.checkpoints: dict[tuple[int, str], Checkpoint] = {}

    @property
    def names(self) -> list[str]:
        """The topics that the cluster has."""
        return [name for name in self.topics if self._history or name != self.topics.history]

    async def add_partitions(self, *names: str) -> None:
        """Give these topics the future number of partitions."""
        for name in names:
            if name in self.names:
                await self._bus.add_partitions(name, self.partitions)

    # --- reading ---

    async def read(self, partition: int, partitions: int | None = None) -> PartitionContents:
        """Read one partition, with the records that belong to another one out of `partitions` (default: the future
        number)."""
        contents = await read_contents(self._bus, self.topics.allocations, partition, partitions or self.partitions)
        for writer, checkpoint in contents.checkpoints.items():
            self.checkpoints[partition, writer] = checkpoint
        return contents

    def keeper(self, partition: int) -> Checkpoint | None:
        """The checkpoint of the writer that answers unroutable messages of a partition, or None."""
        owner = self.checkpoints.get((partition, partition_writer(partition)))
        return owner or self.checkpoints.get((partition, sweeper_writer(partition)))

    def moving(self, partition: int) -> Iterable[str]:
        """The hosts with a manager's checkpoint in this partition that belong to another one."""
        for number, writer in self.checkpoints:
            host = writer_names(writer).host
            if number == partition and host is not None and partition_of(host, self.partitions) != partition:
                yield host

    def start(self, partition: int) -> int | UnsetType:
        """The first offset of this partition, by its writers' last checkpoints."""
        starts = [each.ledger_start or 0 for (number, _), each in self.checkpoints.items() if number == partition]
        return max(starts, default=0) or UNSET

    def first_checkpoint(self, writer: str, scope: str, position: InputPosition) -> Checkpoint:
        """The checkpoint of a writer that has none, before its first commit."""
        return Checkpoint(
            writer=writer, instance=self._instance, cluster=self.cluster, scope=scope,
            commit=NO_COMMIT, token=NO_TOKEN, input=position, at=datetime.now(UTC),
        )  # fmt: skip

    # --- other writers ---

    def note_commits(self, partition: int, contents: PartitionContents) -> None:
        """Note the commits up to which a partition's records are copied."""
        for writer, checkpoint in contents.checkpoints.items():
            self._commits[partition, writer] = checkpoint.commit

    def is_written_since(self, partition: int, checkpoint: Checkpoint) -> bool:
        """Whether another process has committed as the checkpoint's writer since its records were copied."""
        return self._commits.get((partition, checkpoint.writer)) != checkpoint.commit

    # --- writing ---

    async def delete_host(self, partition: int, host: str, entries: list[Entry]) -> None:
        """Commit these deletions as the host's writer, and delete its checkpoint."""
        writer = host_writer(host)
        await self._write(partition, writer, [*entries, Entry(checkpoint_key(writer).encode(), None)])
        self.checkpoints.pop((partition, writer), None)

    async def put(self, partition: int, checkpoint: Checkpoint, entries: Iterable[Entry] = ()) -> None:
        """Commit these records as the checkpoint's writer, and behind them the checkpoint with the next number."""
        number = checkpoint.commit
        nothing_read = structs.replace(checkpoint.input, from_=checkpoint.input.to)

        def end() -> Entry:
            nonlocal number
            number = CommitNumber(number + 1)
            last = structs.replace(
                checkpoint,
                commit=number,
                instance=self._instance,
                input=nothing_read,
                at=datetime.now(UTC),
                beat_s=UNSET,
            )
            self.checkpoints[partition, checkpoint.writer] = last
            self._commits[partition, checkpoint.writer] = number
            return Entry(last.key.encode(), encode(last))

        await self._write(partition, checkpoint.writer, [*entries], end)

    async def _write(
        self, partition: int, writer: str, entries: list[Entry], end: Callable[[], Entry] | None = None
    ) -> None:
        """Commit entries in as many batches as needed. `end`: makes the last entry of each."""
        written = self.topics.written(history=self._history)
        async with await self._bus.open_writer(
            transactional_id(self.cluster, writer), partition, topics=written
        ) as bus_writer:
            while True:
                batch: list[Entry] = []
                size = 0
                while entries and (not batch or size < bus_writer.max_batch_bytes * FILL):
                    entry = entries[0]
                    size += len(entry.key or b"") + len(entry.value or b"") + 32
                    if batch and size >= bus_writer.max_batch_bytes * FILL:
                        break
                    batch.append(entries.pop(0))
                if end is not None:
                    batch.append(end())
                await bus_writer.commit([(self.topics.allocations, batch)])
                if not entries:
                    return

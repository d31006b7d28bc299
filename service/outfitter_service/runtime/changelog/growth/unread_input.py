"""Sends registrations that no manager has read to their host's new partition."""

from __future__ import annotations

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.bus import Bus, Entry
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_registration
from outfitter_proto.keys import host_writer, partition_writer, sweeper_writer
from outfitter_proto.names import InvalidNameError, check_name
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint, Era, Growth, Heartbeat, InputPosition
from outfitter_service.runtime.changelog.growth.growing_ledger import GrowingLedger
from outfitter_service.runtime.changelog.growth.plan import GrowthPlan


class UnreadInput:
    """The input of all partitions. `registrations`: how many were sent again."""

    def __init__(self, bus: Bus, ledger: GrowingLedger, plan: GrowthPlan) -> None:
        self._bus = bus
        self._ledger = ledger
        self._plan = plan
        self.registrations = 0

    async def announce(self, partition: int) -> None:
        """Record that partitions are being added, and the offset before which no client can have known them. Fences a
        manager that serves the partition."""
        first, end = await self._bus.offsets(self._ledger.topics.registrations, partition)
        keeper = self._ledger.keeper(partition) or self._new_sweeper(partition, first)
        mark = keeper.grown
        if mark is UNSET or mark.partitions != self._plan.before:
            mark = Growth(partitions=self._plan.before, since=self._plan.unread(keeper), earlier=_eras(mark) or UNSET)
        if self._plan.input_partitions == self._plan.before:
            mark = structs.replace(mark, since=end)
        await self._ledger.put(partition, structs.replace(keeper, grown=mark))

    async def carry(self, partition: int) -> None:
        """Send unread registrations of moved hosts again, as far as that is not done, and then record it."""
        keeper = self._ledger.keeper(partition)
        if keeper is None or keeper.grown is UNSET:
            return
        first, end = await self._bus.offsets(self._ledger.topics.registrations, partition)
        start = keeper.grown.until
        if start is UNSET:
            writers = {host_writer(host) for host in self._ledger.moving(partition)}
            checkpoints = [self._ledger.checkpoints[partition, writer] for writer in writers]
            start = min(self._plan.unread(checkpoint) for checkpoint in [keeper, *checkpoints])
        start = max(first, start)
        async with await self._bus.open_reader(
            self._ledger.topics.registrations, partition, start=start, committed=False
        ) as reader:
            async for messages in read_to(reader, end):
                for message in messages:
                    if message.offset < end and self._needs_answer(
                        message.key, message.offset, message.value, partition
                    ):
                        host = (message.key or b"").decode()
                        entry = Entry(message.key, message.value)
                        await self._bus.publish(
                            self._ledger.topics.registrations, partition_of(host, self._ledger.partitions), entry
                        )
                        self.registrations += 1
        await self._ledger.put(partition, structs.replace(keeper, grown=structs.replace(keeper.grown, until=end)))

    def _needs_answer(self, key: bytes | None, offset: int, value: bytes | None, partition: int) -> bool:
        """Whether a message belonged to this partition, belongs to another one now, and needs an answer. Heartbeats
        need none."""
        try:
            host = check_name((key or b"").decode(), "host")
        except (UnicodeDecodeError, InvalidNameError):
            return False
        if partition_of(host, self._ledger.partitions) == partition:
            return False
        if self._plan.before and partition_of(host, self._plan.before) != partition:
            return False
        try:
            if isinstance(decode_registration(value, key=key), Heartbeat):
                return False
        except WireError:
            pass  # an invalid message becomes a dead letter there
        for writer in (host_writer(host), partition_writer(partition), sweeper_writer(partition)):
            checkpoint = self._ledger.checkpoints.get((partition, writer))
            if checkpoint is not None:
                ahead = (checkpoint.input.ahead or {}).get(host, 0)
                return offset >= max(self._plan.unread(checkpoint), ahead)
        return True

    def _new_sweeper(self, partition: int, first: int) -> Checkpoint:
        """The first checkpoint of a partition's sweeper. `first`: the first offset of its input."""
        position = InputPosition(topic_id=self._plan.input_id, partition=partition, from_=first, to=first)
        return self._ledger.first_checkpoint(sweeper_writer(partition), "sweeper", position)


def _eras(grown: Growth | UnsetType) -> list[Era]:
    """The eras before partitions were added, the newest first."""
    if grown is UNSET:
        return []
    newest = [Era(partitions=grown.partitions, until=grown.until)] if grown.until is not UNSET else []
    return [*newest, *(grown.earlier or [])]

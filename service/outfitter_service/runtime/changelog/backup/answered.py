"""How far registrations are answered, by the last checkpoints of a ledger."""

from __future__ import annotations

from collections.abc import Iterable

from outfitter_proto.keys import host_writer, partition_writer, sweeper_writer
from outfitter_proto.records import Checkpoint


class Answered:
    """The positions of all writers in one registrations topic."""

    def __init__(self, checkpoints: Iterable[Checkpoint], topic_id: str) -> None:
        """`topic_id`: the topic's id. Positions in another topic count for nothing."""
        inputs = {(each.input.partition, each.writer): each.input for each in checkpoints}
        self._inputs = {place: each for place, each in inputs.items() if each.topic_id == topic_id}

    def until(self, host: str, partition: int) -> int:
        """The offset before which all messages of a host in this partition are answered."""
        own = self._inputs.get((partition, host_writer(host)))
        owner = self._inputs.get((partition, partition_writer(partition)))
        if own is None and owner is None:
            return self.of(sweeper_writer(partition), partition)
        ends = [each.to for each in (own, owner) if each is not None]
        return max([*ends, (owner.ahead or {}).get(host, 0) if owner is not None else 0])

    def of(self, writer: str, partition: int) -> int:
        """The offset that a writer reads next in this partition; 0: it has read nothing there."""
        position = self._inputs.get((partition, writer))
        return position.to if position is not None else 0

    def start(self, partition: int) -> int:
        """The first offset of this partition that may need an answer."""
        positions = {writer: each.to for (number, writer), each in self._inputs.items() if number == partition}
        if positions.keys() & {partition_writer(partition), sweeper_writer(partition)}:
            return min(positions.values())
        return 0  # hosts without a manager may have asked

"""Checks the topics' layout while a partition is served: the bus does not report that a topic was recreated, or
has more partitions."""

from __future__ import annotations

import anyio
import structlog
from msgspec import Struct, structs

from outfitter_proto.bus import BusError, OffsetOutOfRangeError
from outfitter_service.runtime.changelog.snapshots import Snapshots
from outfitter_service.runtime.changelog.topic_layout import ClusterLayout, TopicCheck
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.input_reader import Cursor, InputReader

log = structlog.get_logger("outfitter.topics")


class TopicWatch(Struct, frozen=True):
    """Watches one processor's topics. The watch has no large objects, because a cancelled task may stay in memory for a
    while."""

    assignment: Assignment
    topic_check: TopicCheck
    """Compares their layout."""
    input_reader: InputReader
    """Learns that the registrations topic was recreated."""
    snapshots: Snapshots
    """Learns that history was recreated."""
    every_s: float
    """Seconds between two checks."""

    async def run(self, cursor: Cursor, before: ClusterLayout) -> None:
        """Check repeatedly, until cancelled. `cursor`: the processor's, which moves on meanwhile. `before`: the topics'
        layout at the start.

        Raises:
            TopicsChangedError: the ledger was written for other topics.
        """
        while True:
            await anyio.sleep(self.every_s)
            try:
                now = await self.topic_check.check()
                if now.registrations != cursor.topic_id and self.input_reader.lost is None:
                    start, end = await self.assignment.input_bounds()
                    message = f"the registrations topic was recreated (its id was {cursor.topic_id})"
                    self.input_reader.replace_topic(OffsetOutOfRangeError(message, start=start, end=end))
            except BusError as error:
                log.debug("cannot check the topics", error=str(error))
                continue
            self._report(before, now)
            # a topic that is missing, or that this manager may not see, may come back unchanged
            history, letters = now.history or before.history, now.dead_letters or before.dead_letters
            before = structs.replace(now, history=history, dead_letters=letters)

    def _report(self, before: ClusterLayout, now: ClusterLayout) -> None:
        if None not in (now.history, before.history) and now.history != before.history:
            log.warning("the history topic was recreated: its earlier entries are gone", id=now.history)
            self.snapshots.restart()
        if None not in (now.dead_letters, before.dead_letters) and now.dead_letters != before.dead_letters:
            log.warning("the dead letters' topic was recreated: the earlier ones are gone", id=now.dead_letters)

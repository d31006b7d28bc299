"""Looks at the shape of the topics while a partition is served: what is made anew or grows tells nobody."""

from __future__ import annotations

import anyio
import structlog
from msgspec import structs

from outfitter_proto.bus import BusError, OffsetOutOfRangeError
from outfitter_service.runtime.changelog.shape import Ground, Shape
from outfitter_service.runtime.changelog.snapshots import Snapshots
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.input_reader import Cursor, InputReader

log = structlog.get_logger("outfitter.topics")


class TopicWatch:
    """One processor's. It holds nothing large: what was cancelled may stay in memory for a while."""

    def __init__(
        self, assignment: Assignment, ground: Ground, input_reader: InputReader, snapshots: Snapshots, *, every_s: float
    ) -> None:
        """`every_s`: seconds between two looks."""
        self._assignment = assignment
        self._ground = ground
        self._input_reader = input_reader
        self._snapshots = snapshots
        self._every_s = every_s

    async def run(self, place: Cursor, known: Shape) -> None:
        """Look now and then, until cancelled; `place` is followed as it moves on.

        Raises:
            TopicsChangedError: the ledger does not stand where it was written any more.
        """
        while True:
            await anyio.sleep(self._every_s)
            try:
                found = await self._ground.look()
                if found.registrations != place.topic_id and self._input_reader.lost is None:
                    start, end = await self._assignment.input_bounds()
                    message = f"the registrations topic was made anew (its id was {place.topic_id})"
                    self._input_reader.begin_anew(OffsetOutOfRangeError(message, start=start, end=end))
            except BusError as error:
                log.debug("cannot look at the topics", error=str(error))
                continue
            self._tell(known, found)
            # what was not there, or may not be asked for, may come back as it was
            history, letters = found.history or known.history, found.dead_letters or known.dead_letters
            known = structs.replace(found, history=history, dead_letters=letters)

    def _tell(self, known: Shape, found: Shape) -> None:
        if None not in (found.history, known.history) and found.history != known.history:
            log.warning("the history topic was made anew: what it told before is gone", id=found.history)
            self._snapshots.begin_anew()
        if None not in (found.dead_letters, known.dead_letters) and found.dead_letters != known.dead_letters:
            log.warning("the dead letters' topic was made anew: those before are gone", id=found.dead_letters)

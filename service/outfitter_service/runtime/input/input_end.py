"""Measures the end of a partition's input, for the lag, and for the judgement of silence and deaths."""

from __future__ import annotations

import anyio
import structlog
from msgspec import Struct

from outfitter_proto.bus import BusError
from outfitter_service.runtime.input.assignment import Assignment

log = structlog.get_logger("outfitter.input")

MEASURE_S = 5.0
"""Seconds between two measurements of the input's end. The prefetch is bounded, so only the bus knows the lag."""


class _Known(Struct):
    """How far the input reaches at least, of the topic that is read."""

    end: int


class InputEnd:
    """The end of one partition's input, as the bus last reported it. Callers may `request_sample`."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._known = _Known(0)
        self._requested = anyio.Event()

    def reset(self, start: int) -> None:
        """The input is read from `start` on."""
        self._known = _Known(start)

    async def run(self) -> None:
        """Keep the end up to date, until cancelled."""
        while True:
            try:
                await self.sample()
            except BusError as error:
                log.debug("cannot measure the end of the input", error=str(error))
            await anyio.sleep(MEASURE_S)

    async def sample(self) -> int:
        """The offset after the last message, now.

        Raises:
            BusError: the bus did not answer, or for another topic than the one that is read: somebody deleted it and
                made it anew. Its end would say that messages are decided which nobody has read.
        """
        known = self._known
        first, end = await self._assignment.input_bounds()
        if known is not self._known or end < known.end:
            name, partition = self._assignment.topics.registrations, self._assignment.partition
            raise BusError(f"{name}/{partition} has the offsets {first} to {end}, and it reached to {known.end}")
        known.end = end
        return end

    def lag(self, position: int, read_to: int) -> int:
        """How many records of the input, of any host, are not decided. `position`: the next offset to decide.
        `read_to`: the next offset to fetch; the input reaches at least to it."""
        return max(self._known.end, read_to) - position

    def request_sample(self) -> None:
        """Have the end sampled soon."""
        self._requested.set()

    async def wait_for_request(self) -> None:
        """Wait until a sample is requested. Later requests wait for a sample of their own."""
        await self._requested.wait()
        self._requested = anyio.Event()

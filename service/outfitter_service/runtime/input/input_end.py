"""The end of a partition's input, as far as the bus says: for the lag, and for the judgement of silence and deaths."""

from __future__ import annotations

import anyio
import structlog

from outfitter_proto.bus import BusError
from outfitter_service.runtime.input.assignment import Assignment

log = structlog.get_logger("outfitter.input")

MEASURE_S = 5.0
"""Seconds between two look-ups of the input's end: the prefetch is bounded, so that only the bus knows the lag."""


class InputEnd:
    """The end of one partition's input, known from the last look-up. Callers may `ask` for a sample soon."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._end = 0
        self._requested = anyio.Event()

    def reset(self, start: int) -> None:
        """The input is read from `start` on."""
        self._end = start

    async def run(self) -> None:
        """Keep the end up to date, until cancelled."""
        while True:
            try:
                self._end = await self.sample()
            except BusError as error:
                log.debug("cannot tell how far the input reaches", error=str(error))
            await anyio.sleep(MEASURE_S)

    async def sample(self) -> int:
        """The offset after the last message, now.

        Raises:
            BusError: the bus did not answer.
        """
        _, end = await self._assignment.input_bounds()
        return end

    def lag(self, position: int, read_to: int) -> int:
        """How many records, of whomever, are known from `position` on, where those before `read_to` were read."""
        return max(self._end, read_to) - position

    @property
    def is_asked(self) -> bool:
        """Whether a caller waits for the next sample."""
        return self._requested.is_set()

    def request_sample(self) -> None:
        """Request a sample soon."""
        self._requested.set()

    async def wait_for_request(self) -> None:
        """Wait until a sample is requested. Later requests wait for a sample of their own."""
        await self._requested.wait()
        self._requested = anyio.Event()

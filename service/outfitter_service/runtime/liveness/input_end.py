"""Samples the input's end whenever a lease may have expired or an owner has died."""

from __future__ import annotations

import anyio

from outfitter_service.runtime.input.assignment import Assignment


class InputEnd:
    """The end of one partition's input."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._asked = anyio.Event()

    @property
    def is_asked(self) -> bool:
        """Whether a caller waits for the next sample."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Request a sample soon."""
        self._asked.set()

    async def asked(self) -> None:
        """Wait until a sample is requested. Later requests wait for a sample of their own."""
        await self._asked.wait()
        self._asked = anyio.Event()

    async def sample(self) -> int:
        """The offset after the last message, now.

        Raises:
            BusError: the bus did not answer.
        """
        _, end = await self._assignment.input_bounds()
        return end

"""What wakes a processor's cycle: whoever has something for it rings, and needs to know nothing else of it.

So nothing that a processor is made of holds the processor, or its cycle, and these are gone as soon as nobody needs
them. The collector would come to a ledger, which is millions of objects that live long, after days.
"""

from __future__ import annotations

import anyio


class Bell:
    """Rung by anybody, at any time, and heard by one; what is rung while nobody listens is heard next time."""

    def __init__(self) -> None:
        self._rung = anyio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, at_most: float) -> None:
        """Wait until it was rung since the last time, `at_most` so many seconds."""
        with anyio.move_on_after(at_most):
            await self._rung.wait()
        self._rung = anyio.Event()

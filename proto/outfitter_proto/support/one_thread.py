"""Blocking calls that may hang in the kernel, in a thread: files of /proc, of a driver, of a network's file system."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


class StillHangsError(TimeoutError):
    """An earlier call hangs. No other one is made meanwhile."""


class OneThread:
    """Makes calls one after the other. While one hangs no other one is made, so that it costs one thread."""

    def __init__(self) -> None:
        self._turn = anyio.CapacityLimiter(1)
        self._busy = threading.Lock()
        self._hangs = False

    async def run(self, call: Callable[[], T], *, within_s: float) -> T:
        """Make a call. A call that was only cancelled ends soon, so the next one waits for it.

        Raises:
            StillHangsError: see there.
            TimeoutError: it does not end within that time. The messages are predicates, such as `does not answer`.
        """
        try:
            with anyio.fail_after(within_s):
                return await anyio.to_thread.run_sync(
                    self._made, call, within_s, abandon_on_cancel=True, limiter=self._turn
                )
        except TimeoutError as error:
            if error.args:
                raise
            self._hangs = True
            raise TimeoutError(f"does not answer within {within_s:g} s") from error

    def _made(self, call: Callable[[], T], within_s: float) -> T:
        if not self._busy.acquire(timeout=0 if self._hangs else within_s):
            raise StillHangsError("still does not answer")
        try:
            return call()
        finally:
            self._hangs = False
            self._busy.release()

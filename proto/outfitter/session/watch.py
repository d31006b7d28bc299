"""The newest state of one allocation: the background thread writes it, user code reads it in any thread or event loop.

A reader may miss intermediate states, but never the last one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from outfitter.errors import AllocationEndedError, LeaseLostError
from outfitter.session.lease import Lease
from outfitter_proto.records import FINAL_STATES, Allocation


class WatchSnapshot(NamedTuple):
    """One state of a watch."""

    version: int
    """Grows with each change."""
    record: Allocation | None
    """The newest one. None: there is none yet."""
    error: Exception | None
    """Why it is closed, if it was an error."""
    closed: bool
    """No more changes will come."""

    @property
    def answered(self) -> bool:
        """True once the manager has answered, or an error stands for its answer."""
        return self.record is not None or self.error is not None

    @property
    def ended(self) -> bool:
        """True once the manager has ended the allocation."""
        if isinstance(self.error, AllocationEndedError):
            return True
        return self.record is not None and self.record.state in FINAL_STATES

    @property
    def over(self) -> bool:
        """True once no more records will come: the allocation has ended, or the session has failed."""
        return self.error is not None or self.ended


class AllocationWatch:
    """The newest record of one allocation, its lease, and the readers that wait for a change of either."""

    def __init__(self, lease: Lease | None = None) -> None:
        self.lease = lease or Lease()
        self._changed = threading.Condition()
        self._snapshot = WatchSnapshot(0, None, None, False)
        self._wakers: dict[Callable[[], None], None] = {}

    def read(self) -> WatchSnapshot:
        return self._snapshot

    def post(self, record: Allocation) -> None:
        """Set the newest record and wake all readers."""
        self._put(record=record)

    def touch(self) -> None:
        """Wake all readers, because the lease has changed."""
        self._put()

    def close(self, error: Exception | None = None) -> None:
        """Mark the watch as closed. The first error stays."""
        self._put(error=error, closed=True)

    def _put(self, *, record: Allocation | None = None, error: Exception | None = None, closed: bool = False) -> None:
        with self._changed:
            old = self._snapshot
            self._snapshot = WatchSnapshot(
                old.version + 1, record or old.record, old.error or error, closed or old.closed
            )
            self._changed.notify_all()
            for wake in self._wakers:
                # An event loop that was closed without cancelling its waiters cannot be woken.
                with contextlib.suppress(RuntimeError):
                    wake()

    def wait(self, seen: int, timeout: float | None = None) -> WatchSnapshot:
        """Block until the version differs from `seen`, or for `timeout` seconds; return the newest state."""
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot.version != seen, timeout)
            return self._snapshot

    async def changed(self, seen: int) -> WatchSnapshot:
        """Wait, on any asyncio event loop, until the version differs from `seen`; return the newest state."""
        import asyncio  # not at the top, to keep `import outfitter` cheap

        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(event.set)

        with self._changed:
            if self._snapshot.version != seen:
                return self._snapshot
            self._wakers[wake] = None
        try:
            await event.wait()
        finally:
            with self._changed:
                self._wakers.pop(wake, None)
        return self._snapshot


def lease_lost(allocation_watch: AllocationWatch) -> LeaseLostError:
    """The error for a lease at risk."""
    left, record = allocation_watch.lease.remaining or 0.0, allocation_watch.read().record
    when = f"ends in {left:.1f} s" if left > 0 else f"ended {-left:.1f} s ago"
    return LeaseLostError(
        f"no heartbeat of {record.key if record else 'this worker'} was acknowledged for most of its lease, "
        f"which {when}: stop using its devices"
    )

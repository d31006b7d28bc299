"""The background of a context: one thread with an event loop of its own, in which its session lives.

So heartbeats go on while user code blocks its event loop, or computes in Python. The thread ends with the
context; it is a daemon, since a worker that is asked to end must not be kept alive by what it borrowed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Protocol

import anyio

from outfitter.errors import ContextStateError, LeaseLostError, OutfitterError
from outfitter.session.settings import Settings
from outfitter.session.watch import AllocationWatch
from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import BusError, connect

LEAVE_WITHIN = 8.0
"""Seconds that leaving a context waits for its thread: more than deregistering and closing the bus may take."""

log = logging.getLogger("outfitter")


LOOK_UP_S = 0.5
"""How long a thread waits at a stretch."""


def wait_for(ready: Future[None]) -> None:
    """Wait until `ready` is done, and raise what it raises. It looks up now and then: a signal that arrives just before
    Python's main thread falls asleep on a lock is handled only when something else wakes it."""
    while not futures.wait([ready], timeout=LOOK_UP_S).done:
        pass
    ready.result()


def warn_slow(context: object) -> None:
    """Leaving has outlasted `LEAVE_WITHIN`; the thread goes on by itself, and ends with the process at the latest."""
    log.warning("%r: leaving takes longer than %g s and goes on in the background", context, LEAVE_WITHIN)


class Backend(Protocol):
    """What a context asks of whatever gets its devices. Each call comes once, `start` first."""

    allocation_watch: AllocationWatch

    def start(self) -> Future[None]:
        """Begin; the future is done when the devices may be used, or holds the error why not."""
        ...

    def stop(self, reason: str) -> Future[None]:
        """Give everything back, also while `start` is under way; the future is done when that is over."""
        ...


class SessionThread:
    """A `Backend` that runs a `WorkerSession` in a thread of its own."""

    def __init__(
        self,
        settings: Settings,
        *,
        manager_patience: float | None,
        on_lease_at_risk: Callable[[LeaseLostError], object] | None,
    ) -> None:
        self.allocation_watch = AllocationWatch()
        self._settings = settings
        self._patience = manager_patience
        self._on_lease_at_risk = on_lease_at_risk
        self._ready: Future[None] = Future()
        self._done: Future[None] = Future()
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._session: WorkerSession | None = None
        self._cancel: Callable[[], object] | None = None

    def start(self) -> Future[None]:
        for future in (self._ready, self._done):
            future.set_running_or_notify_cancel()  # so that cancelling a waiter does not cancel the future
        name = f"outfitter-{self._settings.registration.worker}"
        threading.Thread(target=self._main, name=name, daemon=True).start()
        return self._ready

    def stop(self, reason: str) -> Future[None]:
        with self._lock:
            self._reason = reason
            if self._session is not None:
                self._session.leaving_reason = reason
            if self._cancel is not None:
                self._cancel()
        return self._done

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            anyio.run(self._serve)
        except (OutfitterError, BusError) as verdict:
            error = verdict.with_traceback(None)  # the frames of this thread say nothing to whoever entered
        except BaseException as raised:  # noqa: BLE001  # handed to the thread that waits
            error = raised
        if not self._ready.done():
            self._ready.set_exception(error or ContextStateError("the context was left before it had its devices"))
        elif error is not None:
            log.error("the allocation is not followed any more: %s", error)
        self.allocation_watch.close(error if isinstance(error, Exception) else None)
        self._done.set_result(None)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:
            with self._lock:
                if self._reason is not None:
                    return
                self._cancel = lambda: loop.call_soon_threadsafe(scope.cancel)
            try:
                await self._hold()
            finally:
                with self._lock:
                    self._cancel = None

    async def _hold(self) -> None:
        session = WorkerSession(
            bus := connect(self._settings.bus, create=not self._settings.attach),
            self._settings.registration,
            cluster=self._settings.cluster,
            allocation_watch=self.allocation_watch,
            attach=self._settings.attach,
            manager_patience=self._patience,
            on_lease_at_risk=self._on_lease_at_risk,
        )
        with self._lock:
            self._session = session
        async with bus, session:
            await session.wait()
            self._ready.set_result(None)
            await anyio.sleep_forever()

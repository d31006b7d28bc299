"""A context's background thread, which runs its session on an event loop of its own.

So heartbeats continue while user code computes or blocks its own event loop. The thread ends with the context, or
later if the bus is away then: it deregisters when the bus is back. It is a daemon, because an allocation must not keep
a worker from exiting.
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
from outfitter.session.late_deregistration import deregister_late
from outfitter.session.settings import SessionSettings
from outfitter.session.watch import AllocationWatch
from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import WORKER, BusError, Create, connect

LEAVE_WITHIN = 8.0
"""Seconds that leaving a context waits for its thread: longer than deregistering and closing the bus take."""

log = logging.getLogger("outfitter")


WAIT_SLICE_S = 0.5
"""Seconds of one piece of a wait; see `wait_for`."""


def wait_for(ready: Future[None]) -> None:
    """Wait until `ready` is done, and raise its error.

    The wait is cut into pieces: Python handles a signal that arrives just before the main thread blocks on a lock only
    at the next wake-up.
    """
    while not futures.wait([ready], timeout=WAIT_SLICE_S).done:
        pass
    ready.result()


def warn_slow(context: object) -> None:
    """Log that leaving takes longer than `LEAVE_WITHIN`. The thread continues until it is done or the process ends."""
    log.warning("%r: leaving takes longer than %g s and goes on in the background", context, LEAVE_WITHIN)


class Backend(Protocol):
    """How a context gets its devices. The context calls each method once, `start` first."""

    allocation_watch: AllocationWatch

    def start(self) -> Future[None]:
        """Start. The future is done once the devices may be used; otherwise it has the error."""
        ...

    def stop(self, reason: str) -> Future[None]:
        """Give everything back, also during `start`. The future is done once that has happened."""
        ...


class SessionThread:
    """A `Backend` that runs a `WorkerSession` in a thread of its own. See there for the arguments."""

    def __init__(
        self,
        settings: SessionSettings,
        *,
        manager_patience: float | None,
        waits_on: bool = True,
        on_lease_at_risk: Callable[[LeaseLostError], object] | None,
    ) -> None:
        self.allocation_watch = AllocationWatch()
        self._settings = settings
        self._patience = manager_patience
        self._waits_on = waits_on
        self._on_lease_at_risk = on_lease_at_risk
        self._ready: Future[None] = Future()
        self._done: Future[None] = Future()
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._session: WorkerSession | None = None
        self._cancel: Callable[[], object] | None = None

    def start(self) -> Future[None]:
        for future in (self._ready, self._done):
            future.set_running_or_notify_cancel()  # then cancelling a waiter does not cancel the future
        name = f"outfitter-{self._settings.registration.worker}"
        threading.Thread(target=self._main, name=name, daemon=True).start()
        return self._ready

    def stop(self, reason: str) -> Future[None]:
        with self._lock:
            self._reason = reason
            if self._session is not None:
                self._session.leave_because(reason)
            if self._cancel is not None:
                self._cancel()
        return self._done

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            anyio.run(self._run)
        except (OutfitterError, BusError) as answer:
            error = answer.with_traceback(None)  # this thread's frames do not help the caller
        except BaseException as raised:  # noqa: BLE001  # handed to the thread that waits
            error = raised
        if not self._ready.done():
            self._ready.set_exception(error or ContextStateError("the context was left before it had its devices"))
        elif error is not None:
            log.error("the session reads no more records of its allocation: %s", error)
        self.allocation_watch.close(error if isinstance(error, Exception) else None)
        self._done.set_result(None)
        if self._session is not None and self._session.is_left_registered:
            anyio.run(deregister_late, self._publish_deregistration, self._session.key)

    async def _publish_deregistration(self) -> None:
        settings = self._settings
        async with connect(settings.bus, create=Create.NOTHING) as bus:
            session = WorkerSession(bus, settings.registration, cluster=settings.cluster)
            await session.publish_deregistration(self._reason)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:
            with self._lock:
                if self._reason is not None:
                    return
                self._cancel = lambda: loop.call_soon_threadsafe(scope.cancel)
            try:
                await self._run_session()
            finally:
                with self._lock:
                    self._cancel = None

    async def _run_session(self) -> None:
        session = WorkerSession(
            bus := connect(
                self._settings.bus,
                create=Create.NOTHING if self._settings.attach else Create.FILE,
                client=f"{WORKER}{self._settings.registration.host}",
            ),
            self._settings.registration,
            cluster=self._settings.cluster,
            allocation_watch=self.allocation_watch,
            attach=self._settings.attach,
            manager_patience=self._patience,
            waits_on=self._waits_on,
            on_lease_at_risk=self._on_lease_at_risk,
        )
        with self._lock:
            self._session = session
        async with bus, session:
            await session.wait()
            self._ready.set_result(None)
            await anyio.sleep_forever()

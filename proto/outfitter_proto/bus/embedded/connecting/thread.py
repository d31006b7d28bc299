"""A thread that runs jobs one after another, always with a known outcome.

A job waits for its turn (a lock) and then runs to its end. Its caller can abandon it before it runs. After that, even a
cancelled caller waits for it. The thread is a daemon, so that a process can exit while another one holds the lock.
"""

from __future__ import annotations

import asyncio
import enum
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final, Generic, TypeVar

import anyio

T = TypeVar("T")

TIME_LIMIT_S: Final = 10.0
"""Time limit for a job's turn, and again for its end: far above the slowest commit (0.25 s)."""


class TurnTimeoutError(Exception):
    """The job did not get its turn within the time limit and will never run."""


class EndTimeoutError(Exception):
    """The job has not ended within the time limit. It still runs, and its outcome is unknown."""


class _Stage(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ABANDONED = enum.auto()


class _Call(Generic[T]):
    """A queued job. `turn`: the lock under which it runs. `after`: called with its result outside of the lock."""

    def __init__(self, job: Callable[[], T], turn: AbstractContextManager[object], after: Callable[[T], None]) -> None:
        self.finished = asyncio.Event()
        self.error: BaseException | None = None
        self.result: T
        self._job = job
        self._turn = turn
        self._after = after
        self._loop = asyncio.get_running_loop()
        self._stage = _Stage.WAITING
        self._guard = threading.Lock()

    def abandon(self) -> bool:
        """Abandon the job. False: it is too late, because the job runs or has run."""
        return self._leave_waiting(_Stage.ABANDONED)

    def perform(self) -> None:
        try:
            with self._turn:
                if not self._leave_waiting(_Stage.RUNNING):
                    return
                self.result = self._job()
            self._after(self.result)
        except BaseException as error:  # noqa: BLE001 - the caller raises it again
            self.error = error
        with suppress(RuntimeError):  # the caller's event loop has ended
            self._loop.call_soon_threadsafe(self.finished.set)

    def _leave_waiting(self, stage: _Stage) -> bool:
        with self._guard:
            if self._stage is not _Stage.WAITING:
                return False
            self._stage = stage
            return True


class JobThread:
    """Runs jobs one at a time, in the order of the calls."""

    def __init__(self, name: str, *, at_end: Callable[[], None]) -> None:
        """`at_end`: called in the thread after the last job."""
        self._at_end = at_end
        self._queue: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the queued jobs, and call `at_end`."""
        self._queue.put(None)

    async def run(
        self,
        job: Callable[[], T],
        *,
        turn: AbstractContextManager[object],
        after: Callable[[T], None],
        limit: float = TIME_LIMIT_S,
    ) -> T:
        """Run `job` within `turn`, then call `after` with its result outside of `turn`; return the result.

        A cancellation before the job's turn prevents it. A later one takes effect after the job has ended.

        Raises:
            TurnTimeoutError: it never ran.
            EndTimeoutError: it still runs.
            Exception: the error of the job or of `turn`.
        """
        call = _Call(job, turn, after)
        self._queue.put(call)  # type: ignore[arg-type]  # the queue ignores the type of results
        abandoned = False
        try:
            with anyio.move_on_after(limit):
                await call.finished.wait()
        finally:
            if not call.finished.is_set():
                abandoned = call.abandon()
                if not abandoned:
                    with anyio.move_on_after(limit, shield=True):
                        await call.finished.wait()
        if abandoned:
            raise TurnTimeoutError
        if not call.finished.is_set():
            raise EndTimeoutError
        error, call.error = call.error, None
        if error is None:
            return call.result
        try:
            raise error
        finally:
            del error  # else the frames in its traceback would keep it and all their objects alive

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.perform()
            del call  # do not keep a result alive until the next job
        self._at_end()

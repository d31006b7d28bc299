"""A thread that runs one caller's job after another, with an outcome that is never in doubt.

A job waits for its turn, then runs to its end: until it runs its caller can give it up, afterwards the caller
waits for it even when cancelled. It is not a pool, and it is a daemon, so that a process can end while another one
sits on the lock.
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
"""How long a job waits for its turn, and again for its end: far above a commit's worst (a quarter second)."""


class TurnTimeoutError(Exception):
    """The job did not get its turn within the time limit and never will run."""


class EndTimeoutError(Exception):
    """The job has begun and had not ended by the time limit. It goes on; nobody knows its outcome."""


class _Stage(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ABANDONED = enum.auto()


class _Call(Generic[T]):
    """A job on its way through the thread."""

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
        """Give the job up. False: too late, it runs or has run."""
        return self._leave_waiting(_Stage.ABANDONED)

    def perform(self) -> None:
        try:
            with self._turn:
                if not self._leave_waiting(_Stage.RUNNING):
                    return
                self.result = self._job()
            self._after(self.result)
        except BaseException as error:  # noqa: BLE001 - it is raised again where the job was asked for
            self.error = error
        with suppress(RuntimeError):  # the caller's loop has ended, and the caller with it
            self._loop.call_soon_threadsafe(self.finished.set)

    def _leave_waiting(self, stage: _Stage) -> bool:
        with self._guard:
            if self._stage is not _Stage.WAITING:
                return False
            self._stage = stage
            return True


class JobThread:
    """Runs jobs one at a time, in the order they were asked for."""

    def __init__(self, name: str, *, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._queue: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the jobs already asked for, with `at_end`."""
        self._queue.put(None)

    async def run(
        self,
        job: Callable[[], T],
        *,
        turn: AbstractContextManager[object],
        after: Callable[[T], None],
        limit: float = TIME_LIMIT_S,
    ) -> T:
        """Run `job` inside `turn`, then `after` with its result outside of it; return the result.

        Cancelled before its turn, the job never runs. Cancelled later, it ends first; then the cancellation goes on.

        Raises:
            TurnTimeoutError: it never ran. EndTimeoutError: it still runs. Or whatever the job or `turn` raised.
        """
        call = _Call(job, turn, after)
        self._queue.put(call)  # type: ignore[arg-type]  # the queue is indifferent to its jobs' results
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
            del error  # or the frames of its traceback, this one among them, would hold it, and all that they work with

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.perform()
            del call  # do not keep a result alive until the next job
        self._at_end()

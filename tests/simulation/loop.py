"""An asyncio event loop without a clock and without I/O: time is a number, and a seed decides who runs next.

Every callback belongs to a `Process` (by its context variables, which tasks, timers and futures inherit). A process
that is stopped keeps its callbacks until it goes on, one that is dead for ever: that is how managers are frozen and
killed between any two of their steps. When nobody can run, time jumps to the next timer.

Between processes any order is possible. Within one, callbacks run in the order in which they became ready, except
that a task may be overtaken by another one, as happens to whoever waits for I/O.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any

from anyio._backends import _asyncio as anyio_asyncio

START_S = 1_000.0
OVERTAKING = 0.2
"""How often a task of a process runs although another one became ready before it."""


class Process:
    """What can be stopped and killed apart from everything else: a manager, a worker, or the world around them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: deque[asyncio.Handle] = deque()
        self.stopped = False
        self.dead = False
        self.listed = False
        self.tasks: list[asyncio.Task[Any]] = []

    @property
    def held(self) -> bool:
        return self.stopped or self.dead

    def __repr__(self) -> str:
        return self.name


_PROCESS: ContextVar[Process] = ContextVar("process")


def current() -> Process:
    """The process whose callback is running."""
    return _PROCESS.get()


class Task(asyncio.Task[Any]):
    """A task whose place in a set does not hang on its address: anyio keeps tasks in sets and walks through them."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class Loop(asyncio.BaseEventLoop):
    """See the module. `steps` counts callbacks, `digest` is what two equal runs have in common."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.steps = 0
        self.digest = 0
        self.world = Process("world")
        self._now = START_S
        self._dice = random.Random(f"{seed}/loop").random
        self._runnable: list[Process] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._tasks = 0
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda _, context: self.failures.append(context))
        self.failures: list[dict[str, Any]] = []

    def time(self) -> float:
        return self._now

    # --- processes ---

    def spawn(self, process: Process, main: Callable[[], Any]) -> asyncio.Task[Any]:
        """Begin `main` as the first task of a process."""
        context = Context()
        context.run(_PROCESS.set, process)
        return context.run(lambda: self.create_task(main(), context=context))

    def within(self, process: Process) -> Context:
        """A context of `process` for a callback."""
        context = Context()
        context.run(_PROCESS.set, process)
        return context

    def stop_process(self, process: Process) -> None:
        """SIGSTOP: nothing of it runs until `go_on`; time passes all the same."""
        process.stopped = True

    def go_on(self, process: Process) -> None:
        """SIGCONT."""
        process.stopped = False
        self._list(process)

    def kill(self, process: Process) -> None:
        """SIGKILL: nothing of it ever runs again, no `finally` either."""
        process.dead = True

    def raise_up(self, process: Process) -> None:
        """Let a killed process go on, once nobody looks any more, so that its tasks can be ended in an orderly way."""
        process.dead = process.stopped = False
        self._list(process)

    # --- what asyncio asks of a loop ---

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._put(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are passed over when their time comes."""

    def _write_to_self(self) -> None:
        """There is no other thread to wake this one."""

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Task:
        # the hash is needed while the task is made
        self._tasks += 1
        Task.number = self._tasks
        task = Task(coroutine, loop=loop, **options)
        task.number = self._tasks
        process = _PROCESS.get(self.world)
        if len(process.tasks) >= 64:
            process.tasks = [each for each in process.tasks if not each.done()]
        process.tasks.append(task)
        return task

    def _put(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_PROCESS, self.world)  # type: ignore[attr-defined]  # asyncio's own
        process.ready.append(handle)
        if not process.listed:
            self._list(process)

    def _list(self, process: Process) -> None:
        if process.ready and not process.listed and not process.held:
            process.listed = True
            self._runnable.append(process)

    def _run_once(self) -> None:
        """Run one callback of one process; when nobody can run, let time pass until somebody can."""
        runnable = self._runnable
        while not runnable:
            self._pass_time()
        place = int(self._dice() * len(runnable)) if len(runnable) > 1 else 0
        process = runnable[place]
        if process.held or not process.ready:
            process.listed = False
            runnable[place] = runnable[-1]
            runnable.pop()
            return
        handle = self._next(process.ready)
        if not handle._cancelled:  # type: ignore[attr-defined]  # asyncio's own
            self.steps += 1
            self.digest = (self.digest * 31 + place + int(self._now * 1e6)) & 0xFFFFFFFFFFFF
            handle._run()

    def _next(self, ready: deque[asyncio.Handle]) -> asyncio.Handle:
        """The process's oldest callback, or now and then the first one of another of its tasks."""
        if len(ready) > 1 and self._dice() < OVERTAKING:
            place = 1 + int(self._dice() * (min(len(ready), 4) - 1))
            task = _task_of(ready[place])
            if task is not None and all(_task_of(ready[before]) not in (task, None) for before in range(place)):
                handle = ready[place]
                del ready[place]
                return handle
        return ready.popleft()

    def _pass_time(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]  # asyncio's own
            heapq.heappop(timers)
        if not timers:
            raise RuntimeError("nobody can run, and nothing will ever happen: the simulation is stuck")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            if not handle._cancelled:  # type: ignore[attr-defined]  # asyncio's own
                self._put(handle)


def _task_of(handle: asyncio.Handle) -> object | None:
    found = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]  # asyncio's own
    return found if isinstance(found, asyncio.Task) else None


class _Scope(anyio_asyncio.CancelScope):
    """A cancel scope whose place in a set does not hang on its address."""

    __slots__ = ("number",)
    made = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _Scope.made += 1
        self.number = _Scope.made

    def __hash__(self) -> int:
        return self.number


@contextmanager
def running(seed: int) -> Iterator[Loop]:
    """A loop for one run. All dice of the process are thrown by `seed`; anyio walks its sets in the same order."""
    loop = Loop(seed)
    dice, scope = random.getstate(), anyio_asyncio.CancelScope
    random.seed(f"{seed}/runtime")
    _Scope.made = 0
    anyio_asyncio.CancelScope = _Scope  # type: ignore[misc]
    try:
        yield loop
    finally:
        anyio_asyncio.CancelScope = scope  # type: ignore[misc]
        random.setstate(dice)
        loop.close()

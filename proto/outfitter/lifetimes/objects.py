"""Leaves a context when the object that uses it is gone.

The garbage collector runs a finalizer in any thread, between any two lines: also in the context's own thread, or while
the thread holds a lock of the session or of logging. So the finalizer only puts the context into a queue, which is
reentrant. A thread of this module reads the queue and leaves the contexts. At the interpreter's exit it leaves all of
them, and the main thread waits for that.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import types
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from outfitter.session.backend import LEAVE_WITHIN

T = TypeVar("T")

GONE = "its object is gone"
AT_EXIT = "the interpreter ends"

Leave = Callable[[str], Future[None] | None]
"""Begins to leave a context, with the reason for people. The future is done once the context has been left. None: it
was left before."""

log = logging.getLogger("outfitter")


class ObjectLifetimes:
    """The objects of one process that use contexts. The methods are for that process only."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._leaves: dict[weakref.finalize[..., object], Leave] = {}
        self._queue: SimpleQueue[tuple[Leave, str] | threading.Event] = SimpleQueue()
        threading.Thread(target=self._work, name="outfitter lifetimes", daemon=True).start()
        atexit.register(self._leave_all)

    def tie(self, obj: object, leave: Leave) -> Callable[[], None]:
        """Call `leave`, which must not refer to `obj`, when `obj` is gone. Return what undoes this.

        Raises:
            TypeError: there are no weak references to `obj`.
        """
        finalizer = weakref.finalize(obj, self._put, leave)
        finalizer.atexit = False  # see `_leave_all`
        self._leaves[finalizer] = leave

        def untie() -> None:
            finalizer.detach()
            self._leaves.pop(finalizer, None)

        return untie

    def _put(self, leave: Leave) -> None:
        """The finalizer. A forked child has copies of the object: their end means nothing."""
        if os.getpid() == self.pid:
            self._queue.put((leave, GONE))

    def _work(self) -> None:
        leaving: list[Future[None]] = []
        while True:
            message = self._queue.get()
            leaving = [left for left in leaving if not left.done()]
            if isinstance(message, threading.Event):
                futures.wait(leaving, LEAVE_WITHIN)
                message.set()
            elif (left := _leave(*message)) is not None:
                leaving.append(left)
            del message  # else it would keep the context until the next one

    def _leave_all(self) -> None:
        if os.getpid() != self.pid:
            return
        for leave in list(self._leaves.values()):
            self._queue.put((leave, AT_EXIT))
        all_left = threading.Event()
        self._queue.put(all_left)
        all_left.wait(LEAVE_WITHIN)


def _leave(leave: Leave, reason: str) -> Future[None] | None:
    try:
        return leave(reason)
    except Exception:  # the other contexts must be left, too
        log.exception("a context could not be left")
        return None


_lifetimes: ObjectLifetimes | None = None
_lock = threading.Lock()


def tie(obj: object, leave: Leave) -> Callable[[], None]:
    """As `ObjectLifetimes.tie`, in this process."""
    global _lifetimes
    try:
        weakref.ref(obj)
    except TypeError:
        raise TypeError(
            f"{type(obj).__name__!r} objects have no weak references, so nobody sees their end: "
            "add '__weakref__' to the __slots__ of the class, or pass an object that uses the devices as long"
        ) from None
    with _lock:
        if _lifetimes is None or _lifetimes.pid != os.getpid():
            _lifetimes = ObjectLifetimes()
    return _lifetimes.tie(obj, leave)


def without_reference(obj: object, function: Callable[[T], object]) -> Callable[[T], object]:
    """`function`, in a form that does not keep `obj` alive if it is a method of `obj`."""
    if not isinstance(function, types.MethodType) or function.__self__ is not obj:
        return function
    method = weakref.WeakMethod(function)

    def call(argument: T) -> object:
        bound = method()
        return bound(argument) if bound is not None else None

    return call

"""The workers for which this process is in a context: a second context for one of them would end the first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from outfitter.errors import ContextStateError, UsedAfterForkError
from outfitter.session.settings import SessionSettings
from outfitter_proto.bus.schemes import is_local

if TYPE_CHECKING:
    from outfitter.session.backend import Backend

_Slot = tuple[int, str, str, str, str]

_claimed: set[_Slot] = set()
"""Workers of this process that have entered a context: pid, bus, cluster, host, worker."""
_lock = threading.Lock()

AFTER_FORK = (
    "hand the infos to the child, or start it with multiprocessing's 'spawn' method and make a context of its own there"
)


def claim(settings: SessionSettings, make_backend: Callable[[], Backend]) -> Backend:
    """Claim the worker until the returned backend, which `make_backend` makes, is stopped.

    Raises:
        ContextStateError: another context of this process has claimed the worker.
        UsedAfterForkError: this process inherited an open embedded bus: SQLite's locks do not survive a fork.
    """
    slot = (os.getpid(), settings.bus, settings.cluster, settings.registration.host, settings.registration.worker)
    with _lock:
        if is_local(settings.bus) and any(pid != slot[0] and bus == settings.bus for pid, bus, *_ in _claimed):
            raise UsedAfterForkError(
                f"this process was forked from one that is in a context on {settings.bus}: {AFTER_FORK}"
            )
        if slot in _claimed and not settings.attach:
            raise ContextStateError(
                f"this process is in a context for worker {settings.registration.worker!r} already, and a second one "
                "would end it: give each its own worker= name, or share one through for_operator() or shared="
            )
        backend = make_backend()
        _claimed.add(slot)
    return _ClaimedWorker(slot, backend)


class _ClaimedWorker:
    """A `Backend` that ends the claim when it is stopped."""

    def __init__(self, slot: _Slot, backend: Backend) -> None:
        self.allocation_watch = backend.allocation_watch
        self._slot = slot
        self._backend = backend

    def start(self) -> Future[None]:
        return self._backend.start()

    def stop(self, reason: str) -> Future[None]:
        with _lock:
            _claimed.discard(self._slot)
        return self._backend.stop(reason)

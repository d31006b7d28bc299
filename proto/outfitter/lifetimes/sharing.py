"""One registration for all contexts of a process that share a name.

The first context that enters registers, the others wait for the same answer, and the last that leaves gives back. An
allocation that is refused or over is not joined any more: the next context under that name registers anew.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from outfitter.errors import InvalidRequestError, LeaseLostError
from outfitter.session.settings import SessionSettings
from outfitter.session.watch import AllocationWatch
from outfitter_proto.records import Register

if TYPE_CHECKING:
    from outfitter.session.backend import Backend

OnLeaseAtRisk = Callable[[LeaseLostError], object]

log = logging.getLogger("outfitter")


class SharedRequest(Struct, frozen=True):
    """What contexts under one name must have in common."""

    bus: str
    cluster: str
    registration: Register
    """Without what differs between contexts that ask for the same: generated names, and labels."""
    attach: bool
    wait_for_manager: bool | float
    ends_with: object

    def differences(self, other: SharedRequest) -> list[str]:
        """The arguments of `RuntimeContext` in which two requests differ."""
        mine = structs.asdict(self) | structs.asdict(self.registration)
        its = structs.asdict(other) | structs.asdict(other.registration)
        return [name.removesuffix("_s") for name in mine if name != "registration" and mine[name] != its[name]]


def request_of(
    settings: SessionSettings, *, worker: str | None, wait_for_manager: bool | float, ends_with: object
) -> SharedRequest:
    """The request in `settings`. `worker`: the name that the caller has given, if any."""
    return SharedRequest(
        settings.bus,
        settings.cluster,
        structs.replace(settings.registration, worker=worker or "", incarnation="", labels={}),
        settings.attach,
        wait_for_manager,
        ends_with,
    )


class Shares:
    """The shared registrations of a process, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[tuple[int, str], _Registration] = {}

    def join(
        self,
        name: str,
        request: SharedRequest,
        settings: SessionSettings,
        make_backend: Callable[[OnLeaseAtRisk], Backend],
        on_lease_at_risk: OnLeaseAtRisk | None,
    ) -> Share:
        """A context's part in the registration under `name`, which is made if there is none.

        Raises:
            InvalidRequestError: the registration under `name` is for another request.
        """
        key = (os.getpid(), name)  # a forked child shares nothing with its parent
        with self._lock:
            registration = self._by_name.get(key)
            if registration is None or registration.over:
                registration = self._by_name[key] = _Registration(request, settings, make_backend)
            elif differences := request.differences(registration.request):
                raise InvalidRequestError(
                    f"this process shares {name!r} already, for another request ({', '.join(differences)} differ): "
                    "give the other request another shared= name",
                    code="invalid-request",
                )
            share = Share(self, registration)
            registration.add(share, on_lease_at_risk)
        return share

    def start(self, registration: _Registration) -> Future[None]:
        """Start the registration's backend if this is the first context that does so. Return when it is ready."""
        with self._lock:
            return registration.start()

    def remove(self, share: Share, registration: _Registration) -> bool:
        """Remove a context from its registration. Return whether it was the last."""
        with self._lock:
            if not registration.remove(share):
                return False
            self._by_name = {key: other for key, other in self._by_name.items() if other is not registration}
            return True


class _Registration:
    """A registration that several contexts share. `Shares` calls all methods but `warn`, under its lock."""

    def __init__(
        self, request: SharedRequest, settings: SessionSettings, make_backend: Callable[[OnLeaseAtRisk], Backend]
    ) -> None:
        self.request = request
        self.settings = settings
        self.backend = make_backend(self.warn)
        self._members: dict[Share, OnLeaseAtRisk | None] = {}
        self._ready: Future[None] | None = None

    def add(self, share: Share, on_lease_at_risk: OnLeaseAtRisk | None) -> None:
        """Add a context, with its callback."""
        self._members[share] = on_lease_at_risk

    def remove(self, share: Share) -> bool:
        """Remove a context. Returns whether it was the last."""
        del self._members[share]
        return not self._members

    def start(self) -> Future[None]:
        """Start the backend, once. Returns when it is ready."""
        if self._ready is None:
            self._ready = self.backend.start()
        return self._ready

    @property
    def over(self) -> bool:
        """Whether a context that enters now would get no devices from it."""
        refused = self._ready is not None and self._ready.done() and self._ready.exception() is not None
        snapshot = self.backend.allocation_watch.read()
        return refused or snapshot.over or snapshot.closed

    def warn(self, error: LeaseLostError) -> None:
        """Tell all members that the lease is at risk."""
        callbacks = [callback for callback in list(self._members.values()) if callback is not None]
        if not callbacks:
            log.error("%s", error)
        for callback in callbacks:
            try:
                callback(error)
            except Exception:  # user code: no error of it may keep the warning from the others
                log.exception("on_lease_at_risk raised")


class Share:
    """One context's part of a shared registration: a `Backend` that starts with the first and stops with the last."""

    def __init__(self, shares: Shares, registration: _Registration) -> None:
        self.settings = registration.settings
        self.allocation_watch: AllocationWatch = registration.backend.allocation_watch
        self._shares = shares
        self._registration = registration

    def start(self) -> Future[None]:
        return self._shares.start(self._registration)

    def stop(self, reason: str) -> Future[None]:
        if self._shares.remove(self, self._registration):
            return self._registration.backend.stop(reason)
        self.allocation_watch.touch()  # so that the iterations of this context end
        done: Future[None] = Future()
        done.set_result(None)
        return done

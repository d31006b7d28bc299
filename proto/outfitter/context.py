"""`RuntimeContext`: how a worker gets its devices, and keeps them for as long as it is in the context.

Constructing one connects to nothing and changes nothing. Entering it, with `with` or `async with`, registers
the worker and waits for its devices; leaving it gives them back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Self

from outfitter.errors import ContextStateError, InvalidRequestError, LeaseLostError, UsedAfterForkError
from outfitter.operators import OperatorContext, OperatorView
from outfitter.session import settings, status
from outfitter.session.status import AllocationStatus
from outfitter.session.watch import AllocationWatch
from outfitter_proto import names
from outfitter_proto.records import Owner

if TYPE_CHECKING:
    from outfitter.session.backend import Backend

_entered: set[tuple[int, str, str, str, str]] = set()
"""Workers of this process that are in a context: process, bus, cluster, host, worker."""
_entered_lock = threading.Lock()

_AFTER_FORK = (
    "hand the infos to the child, or start it with multiprocessing's 'spawn' method and make a context of its own there"
)


class RuntimeContext(OperatorContext):
    """A worker's external resources (Flink: `RuntimeContext`, as far as it is about external resources).

        with RuntimeContext(resources={"gpu": 1}) as context:
            for info in context.get_external_resource_infos("gpu"):
                print(info["uuid"])

    Args:
        resources: devices per resource, `{"gpu": 2}`; None: the amounts that the manager is configured with.
        operators: shares by operator, `{"infer": {"gpu": 1}}`; None: every operator sees all devices.
        operator: whose share this context shows. Else `OUTFITTER_OPERATOR`.
        bus: `kafka://host:9092` or `sqlite:///path`. Else `OUTFITTER_BUS`, else the machine's own file.
        cluster: the manager's cluster. Else `OUTFITTER_CLUSTER`, else `outfitter`.
        host: the machine. Else `OUTFITTER_HOST`, else the hostname in lower case.
        worker: this worker's name. Else `OUTFITTER_WORKER`, else one that is made up.
        lease: seconds this worker may be silent; left out: the manager's default; None: no lease.
        wait: seconds to wait for devices that are busy; None: for ever.
        priority: higher is served first.
        labels: for people who look at the ledger.
        wait_for_manager: True: wait for one for ever; a number: that many seconds instead of 4.
        owner: tell a manager on this machine which process this is, so that its death is seen at once.
        on_lease_at_risk: called, in the background thread, with a `LeaseLostError` when no heartbeat was
            acknowledged for two thirds of the lease. `lease_lost` and every getter say so, too.

    Raises (the constructor):
        InvalidNameError, InvalidRequestError: an argument no manager would take.
    Raises (on entry):
        NoManagerError: nobody answers for this host.
        UnknownResourceError, NoDriverError, ResourceDisabledError, InvalidRequestError, WaitedTooLongError,
        AllocationFailedError: the manager's final answer. AllocationEndedError: ended before it was granted.
        BusUnavailableError, BusConfigurationError, UnknownTopicError: see the bus port.

    Under `outfitter run` the context attaches to the allocation that is there already, and neither registers
    nor releases anything.
    """

    def __init__(
        self,
        resources: Mapping[str, int] | None = None,
        operators: Mapping[str, Mapping[str, int]] | None = None,
        *,
        operator: str | None = None,
        bus: str | None = None,
        cluster: str | None = None,
        host: str | None = None,
        worker: str | None = None,
        lease: float | EllipsisType | None = ...,
        wait: float | None = None,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
        wait_for_manager: bool | float = False,
        owner: bool | Owner = True,
        on_lease_at_risk: Callable[[LeaseLostError], object] | None = None,
    ) -> None:
        self._settings = settings.resolve(
            resources=resources, operators=operators, operator=operator, bus=bus, cluster=cluster, host=host,
            worker=worker, lease=lease, wait=wait, priority=priority, labels=labels, owner=owner,
        )  # fmt: skip
        self._wait_for_manager = wait_for_manager
        self._on_lease_at_risk = on_lease_at_risk
        self._backend: Backend | None = None
        self._left = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        asked = self._settings.registration
        return f"<RuntimeContext {asked.host}/{asked.worker}/{asked.incarnation} on {self._settings.bus}>"

    @property
    def operator(self) -> str | None:
        return self._settings.operator

    @property
    def host(self) -> str:
        return self._settings.registration.host

    @property
    def worker(self) -> str:
        return self._settings.registration.worker

    @property
    def incarnation(self) -> str:
        """The name of this run of the worker; under `outfitter run`, of that of its parent."""
        return self._settings.registration.incarnation

    @property
    def waiting_because(self) -> str | None:
        """Why entering still waits, in the manager's words; None before it has said so, and once it waits no more."""
        record = self._allocation_watch().read().record
        return record.reason if record is not None and status.standing(record) is AllocationStatus.WAITING else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the manager found odd in the registration, a sentence each: fields that it does not know, say."""
        record = self._allocation_watch().read().record
        return tuple(record.warnings or ()) if record is not None else ()

    @property
    def lease_lost(self) -> bool:
        """True while no heartbeat was acknowledged for most of the lease. Never waits, works in every thread."""
        return self._allocation_watch().lease.at_risk

    def for_operator(self, operator: str) -> OperatorView:
        """The same allocation as operator `operator` sees it; usable while this context is."""
        return OperatorView(self, names.check_name(operator, "operator"))

    # --- blocking ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        from outfitter.session.backend import wait_for

        backend = self._begin()
        try:
            wait_for(backend.start())
            self._check_amounts()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        from outfitter.session.backend import LEAVE_WITHIN, warn_slow

        if (backend := self._leave()) is not None:
            try:
                backend.stop(_reason(error)).result(LEAVE_WITHIN)
            except TimeoutError:
                warn_slow(self)

    # --- asyncio -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        import asyncio

        backend = self._begin()
        try:
            await asyncio.wrap_future(backend.start())
            self._check_amounts()
        except BaseException as error:
            await self._aend(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._aend(error)

    async def _aend(self, error: BaseException | None) -> None:
        import asyncio

        import anyio

        from outfitter.session.backend import LEAVE_WITHIN, warn_slow

        if (backend := self._leave()) is not None:
            with anyio.move_on_after(LEAVE_WITHIN, shield=True) as scope:
                await asyncio.wrap_future(backend.stop(_reason(error)))
            if scope.cancelled_caught:
                warn_slow(self)

    # --- inside ------------------------------------------------------------------------------------------

    def _make_backend(self) -> Backend:
        from outfitter.session.backend import SessionThread  # only now is an event loop needed
        from outfitter.session.worker_session import MANAGER_PATIENCE

        patience: float | None = self._wait_for_manager
        if isinstance(self._wait_for_manager, bool):
            patience = None if self._wait_for_manager else MANAGER_PATIENCE
        return SessionThread(self._settings, manager_patience=patience, on_lease_at_risk=self._on_lease_at_risk)

    @property
    def _slot(self) -> tuple[int, str, str, str, str]:
        return (self._pid, self._settings.bus, self._settings.cluster, self.host, self.worker)

    def _begin(self) -> Backend:
        self._check_process()
        if self._backend is not None:
            raise ContextStateError(f"{self!r} was entered before: make a new context for each `with`")
        with _entered_lock:
            self._check_inheritance()
            if self._slot in _entered and not self._settings.attach:
                raise ContextStateError(
                    f"this process is in a context for worker {self.worker!r} already, and a second one would end it: "
                    "give each its own worker= name, or share one through for_operator()"
                )
            self._backend = self._make_backend()
            _entered.add(self._slot)
        return self._backend

    def _leave(self) -> Backend | None:
        """Mark the context as left; None when there is nothing to stop here, as in a forked child."""
        if os.getpid() != self._pid or self._left or self._backend is None:
            return None
        self._left = True
        with _entered_lock:
            _entered.discard(self._slot)
        return self._backend

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterForkError(
                f"{self!r} belongs to process {self._pid} and this is {os.getpid()}, forked from it: {_AFTER_FORK}"
            )

    def _check_inheritance(self) -> None:
        """SQLite forbids a file that was open when the process was forked: its locks are neither held nor free here."""
        bus = self._settings.bus
        if bus.startswith("sqlite:") and any(pid != self._pid and other == bus for pid, other, *_ in _entered):
            raise UsedAfterForkError(f"this process was forked from one that is in a context on {bus}: {_AFTER_FORK}")

    def _check_amounts(self) -> None:
        """Attached to an allocation that somebody else asked for: is it what this code needs?"""
        if not self._settings.attach:
            return
        held = self._allocation_watch().read().record
        for name, asked in (self._settings.registration.resources or {}).items():
            amount = 0 if held is None else held.request.amounts.get(name, 0)
            if amount < asked.amount:
                raise InvalidRequestError(
                    f"{asked.amount} of {name!r} are needed and `outfitter run` asked for {amount}: "
                    f"run it with --resource {name}={asked.amount}",
                    code="invalid-request", record=held,
                )  # fmt: skip

    def _allocation_watch(self) -> AllocationWatch:
        self._check_process()
        if self._backend is None:
            raise ContextStateError(f"{self!r} was not entered: use `with context:` or `async with context:`")
        if self._left:
            raise ContextStateError(f"{self!r} was left, and its devices were given back")
        return self._backend.allocation_watch


def _reason(error: BaseException | None) -> str:
    return "finished" if error is None else f"left by {type(error).__name__}"

"""`RuntimeContext`: a worker has its devices while it is in the context.

The constructor connects to nothing. Entering, with `with` or `async with`, registers the worker and waits for its
devices. Leaving gives them back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Self

from msgspec import structs

from outfitter.errors import ContextStateError, InvalidRequestError, LeaseLostError, UsedAfterForkError
from outfitter.lifetimes import claims, sharing
from outfitter.operators import OperatorContext, OperatorView
from outfitter.session import arguments, identity, settings, status
from outfitter.session.settings import Wanted
from outfitter.session.status import AllocationStatus
from outfitter.session.watch import AllocationWatch
from outfitter_proto import clauses, names
from outfitter_proto.keys import allocation_key
from outfitter_proto.records import Owner
from outfitter_proto.support.processes import process_owner

if TYPE_CHECKING:
    from concurrent.futures import Future

    from outfitter.lifetimes.orphans import EndsWith
    from outfitter.session.backend import Backend


class RuntimeContext(OperatorContext):
    """A worker's external resources (Flink: the part of `RuntimeContext` about external resources).

        with RuntimeContext(resources={"gpu": 1}) as context:
            for info in context.get_external_resource_infos("gpu"):
                print(info["uuid"])

    Args:
        resources: devices per resource, `{"gpu": 2}`, or which of them: `{"gpu": {"amount": 2, "where":
            {"model": "*H100*"}, "same": ["nvlink.group"]}}`. None: the amounts configured in the manager.
        operators: shares by operator, `{"infer": {"gpu": 1}}`. None: every operator sees all devices.
        operator: the operator whose share this context shows. Default: `OUTFITTER_OPERATOR`.
        bus: `kafka://host:9092` or `sqlite:///path`. Default: `OUTFITTER_BUS`, else the machine's own file.
        cluster: the manager's cluster. Default: `OUTFITTER_CLUSTER`, else `outfitter`.
        host: the machine. Default: `OUTFITTER_HOST`, else the hostname in lower case.
        worker: this worker's name. Default: `OUTFITTER_WORKER`, else a generated name.
        lease: seconds this worker may be silent. Default: the manager's. None: no lease.
        wait: seconds to wait for busy devices. None: for ever.
        priority: the manager serves higher numbers first.
        labels: shown to people in the ledger.
        wait_for_manager: True: wait for a manager for ever. A number: wait that many seconds.
            False: wait 4 s, and for longer while the manager shows that it lives.
        owner: name this process in the registration, so that a manager on this machine sees its death at once.
        on_lease_at_risk: called in the background thread, with a `LeaseLostError`, once no heartbeat was
            acknowledged for two thirds of the lease. Then `lease_lost` is True and every getter raises.
        shared: a name. The contexts of this process with this name are one worker, with one allocation: the first that
            enters registers, and the last that leaves gives back. They must ask for the same.
        ends_with: a process without which this one must not go on: its pid, its identity, or a command's name
            (`"java"`), which means this process or its nearest ancestor of that name. When that process is gone while
            this context is entered, this process has two seconds to end by itself, and is ended then.
        survivors: processes that outlive this one keep its devices, if they were started with `child_env`.

    Raises (the constructor):
        InvalidNameError, InvalidRequestError: every manager would refuse this argument.
    Raises (on entry):
        NoManagerError: no manager answers for this host.
        UnknownResourceError, NoDriverError, ResourceDisabledError, InvalidRequestError, WaitedTooLongError,
        AllocationFailedError: the manager's final answer.
        ChoiceIgnoredError: the manager ignores `where` and `same`, as version 0.2 does.
        AllocationEndedError: the allocation ended before the grant.
        BusUnavailableError, BusConfigurationError, UnknownTopicError: see the bus port.
        UnwatchableProcessError: the process of `ends_with` is gone, or cannot be watched.

    Under `outfitter run` the context attaches to the existing allocation. It neither registers nor releases.
    """

    _shares = sharing.Shares()

    def __init__(
        self,
        resources: Mapping[str, Wanted] | None = None,
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
        shared: str | None = None,
        ends_with: EndsWith | None = None,
        survivors: bool = False,
    ) -> None:
        arguments.check_kinds(
            resources=resources, operators=operators, operator=operator, bus=bus, cluster=cluster, host=host,
            worker=worker, labels=labels, wait_for_manager=wait_for_manager, owner=owner,
            on_lease_at_risk=on_lease_at_risk, shared=shared, ends_with=ends_with,
        )  # fmt: skip
        self._settings = settings.resolve(
            resources=resources, operators=operators, operator=operator, bus=bus, cluster=cluster, host=host,
            worker=worker, lease=lease, wait=wait, priority=priority, labels=labels, owner=owner,
            survivors=survivors,
        )  # fmt: skip
        self._wait_for_manager = wait_for_manager
        self._on_lease_at_risk = on_lease_at_risk
        self._shared = None if shared is None else names.check_name(shared, "shared name")
        self._shared_request = sharing.request_of(
            self._settings, worker=worker, wait_for_manager=wait_for_manager, ends_with=ends_with
        )
        # A pid may be another process's by the time of entering; its identity cannot.
        self._ends_with = (process_owner(ends_with) or ends_with) if isinstance(ends_with, int) else ends_with
        self._backend: Backend | None = None
        self._untie: Callable[[], None] | None = None
        self._stopping = threading.Lock()
        self._left = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<RuntimeContext {allocation_key(self.host, self.worker, self.incarnation)} on {self._settings.bus}>"

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
        """The name of this run of the worker. Under `outfitter run` it is the parent's."""
        return self._settings.registration.incarnation

    @property
    def child_env(self) -> dict[str, str]:
        """Variables for a program that this worker starts: `env`, and the names of this allocation and operator.

        A context in that program attaches to this allocation. With `survivors` the manager lends the devices again only
        after that program's end. It does not see processes that fork and execute no program.
        """
        operator = {} if self.operator is None else {"OUTFITTER_OPERATOR": self.operator}
        return {
            **self.env,
            **operator,
            **identity.variables(self._settings.bus, self._settings.cluster, self._settings.registration),
        }

    @property
    def waiting_because(self) -> str | None:
        """The manager's reason why the worker waits. None before the first answer, and after the wait."""
        record = self._allocation_watch().read().record
        return record.reason if record is not None and status.status_of(record) is AllocationStatus.WAITING else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The manager's warnings about the registration, a sentence each (unknown fields, for example)."""
        record = self._allocation_watch().read().record
        return tuple(record.warnings or ()) if record is not None else ()

    @property
    def lease_lost(self) -> bool:
        """True while no heartbeat was acknowledged for two thirds of the lease. Never blocks; for any thread."""
        return self._allocation_watch().lease.at_risk

    def for_operator(self, operator: str) -> OperatorView:
        """The view that `operator` has of this allocation. Usable as long as this context."""
        return OperatorView(self, names.check_name(operator, "operator"))

    def enter_for(self, obj: object) -> Self:
        """Enter as `with` does, and leave when `obj` is gone: for frameworks that do not always call a `close()`.

        `obj` is what uses the devices: the function, operator or plugin. It is gone when nothing refers to it any more
        (in a cycle of references, once the garbage collector has run), or when the interpreter ends. Leaving by hand
        before is fine. A forked child's copy of `obj` leaves nothing.

        Nothing that this context has may refer to `obj`, else it is never gone. `on_lease_at_risk` may be a method
        of `obj`.

        Raises:
            TypeError: there are no weak references to `obj`, so its end cannot be seen. Nothing was registered.
        """
        from outfitter.lifetimes import objects

        untie = objects.tie(obj, self._stop)
        try:
            if self._on_lease_at_risk is not None:
                self._on_lease_at_risk = objects.without_reference(obj, self._on_lease_at_risk)
            self.__enter__()
        except BaseException:
            untie()
            raise
        self._untie = untie
        return self

    def leave(self) -> None:
        """Leave, as at the end of `with`. It blocks, and may be repeated."""
        self._end(None)

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

        if (left := self._stop(_reason(error))) is not None:
            try:
                left.result(LEAVE_WITHIN)
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

        if (left := self._stop(_reason(error))) is not None:
            with anyio.move_on_after(LEAVE_WITHIN, shield=True) as scope:
                await asyncio.wrap_future(left)
            if scope.cancelled_caught:
                warn_slow(self)

    def _allowed_variables(self) -> frozenset[str]:
        return self._settings.allowed_variables

    # --- inside ------------------------------------------------------------------------------------------

    def _make_backend(self, on_lease_at_risk: Callable[[LeaseLostError], object] | None) -> Backend:
        from outfitter.session.backend import SessionThread  # only now is an event loop needed
        from outfitter.session.worker_session import MANAGER_PATIENCE

        patience: float | None = self._wait_for_manager
        is_default = self._wait_for_manager is False
        if isinstance(self._wait_for_manager, bool):
            patience = MANAGER_PATIENCE if is_default else None
        session = SessionThread(
            self._settings, manager_patience=patience, waits_on=is_default, on_lease_at_risk=on_lease_at_risk
        )
        if self._ends_with is None:
            return session
        from outfitter.lifetimes.orphans import OrphanGuard

        return OrphanGuard(session, self._ends_with)

    def _begin(self) -> Backend:
        self._check_process()
        if self._backend is not None:
            raise ContextStateError(f"{self!r} was entered before: make a new context for each `with`")
        if self._shared is None:
            self._backend = self._claim(self._on_lease_at_risk)
        else:
            share = self._shares.join(
                self._shared, self._shared_request, self._settings, self._claim, self._on_lease_at_risk
            )
            self._settings = structs.replace(share.settings, operator=self.operator)
            self._backend = share
        return self._backend

    def _claim(self, on_lease_at_risk: Callable[[LeaseLostError], object] | None) -> Backend:
        return claims.claim(self._settings, lambda: self._make_backend(on_lease_at_risk))

    def _stop(self, reason: str) -> Future[None] | None:
        """Begin to leave. None: there is nothing to leave (left before, never entered, or in a forked child)."""
        if os.getpid() != self._pid or self._backend is None:
            return None
        with self._stopping:  # the finalizer's thread and another one may come at once
            if self._left:
                return None
            self._left = True
        if self._untie is not None:
            self._untie()
        return self._backend.stop(reason)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterForkError(
                f"{self!r} belongs to process {self._pid} and this is {os.getpid()}, forked from it: "
                f"{claims.AFTER_FORK}"
            )

    def _check_amounts(self) -> None:
        """Under `outfitter run`: check that the existing allocation has the amounts that this context and its operators
        need."""
        if not self._settings.attach:
            return
        held = self._allocation_watch().read().record
        for name, request in (self._settings.registration.resources or {}).items():
            amount = 0 if held is None else held.request.amounts.get(name, 0)
            if amount < request.amount:
                raise InvalidRequestError(
                    f"{request.amount} of {name!r} are needed and `outfitter run` asked for {amount}: "
                    f"run it with --resource {name}={request.amount}",
                    code="invalid-request", record=held,
                )  # fmt: skip
            asked = clauses.clauses_of(request.where, request.same)
            infos = held.resources.get(name, []) if held is not None else []
            if (problem := clauses.fault(asked, infos)) is not None:
                raise InvalidRequestError(
                    f"{name!r} is not what is needed ({problem}): run `outfitter run` with --where and --same for "
                    f"{clauses.in_words(asked)}",
                    code="invalid-request", record=held,
                )  # fmt: skip
        shares = (held.request.operators if held is not None else None) or {}
        missing = [
            f"--operator {operator}:{name}={request.amount}"
            for operator, requests in (self._settings.registration.operators or {}).items()
            for name, request in requests.items()
            if name not in shares.get(operator, {}) or shares[operator][name].amount < request.amount
        ]
        if missing:
            raise InvalidRequestError(
                f"`outfitter run` did not ask for these shares of operators: run it with {' '.join(missing)}",
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

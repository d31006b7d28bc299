"""An in-memory fake, for tests of code that gets its devices from a `RuntimeContext`.

    fake = FakeOutfitter({"gpu": [{"index": "0"}, {"index": "1"}]})
    with fake.context(resources={"gpu": 1}) as context:
        my_operator(context)

Its contexts behave as `RuntimeContext`, without a bus or a manager, and without a thread unless `wait=` runs. The fake
has no queue and no exclusivity: every worker gets the devices that the test has listed. It plays no part in the
programs that your code starts: they connect as usual. For code that builds its own context, a test can patch
`RuntimeContext` with `fake.context`, or run within `fake.installed()`. With pytest, see `outfitter.pytest_plugin`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from msgspec import UNSET, UnsetType, structs

from outfitter.context import RuntimeContext
from outfitter.errors import LeaseLostError, NoManagerError
from outfitter.lifetimes.sharing import OnLeaseAtRisk, Shares
from outfitter.session import choosing, status
from outfitter.session.lease import Lease
from outfitter.session.settings import SessionSettings
from outfitter.session.watch import AllocationWatch, lease_lost
from outfitter_proto import clauses, keys, names
from outfitter_proto.clauses import Clauses
from outfitter_proto.records import (
    FINAL_STATES,
    NO_COMMIT,
    Allocation,
    AllocationState,
    CommitNumber,
    OperatorShare,
    ReasonCode,
    Register,
    ResolvedRequest,
    ResourceRequest,
    Source,
    Token,
    Unavailable,
)

if TYPE_CHECKING:
    from outfitter.session.backend import Backend

DEFAULT_LEASE = 30.0

Devices = Iterable[Mapping[str, str]]
Post = Callable[[Allocation], object]


class _Worker(NamedTuple):
    """A registered worker. `post`: gets its records. `number`: its first registration's, from 1."""

    registration: Register
    post: Post
    number: int


class FakeOutfitter:
    """Grants the listed devices to workers, and plays the manager's later answers. Every method is thread-safe.

    Args:
        resources: the devices of each resource, as string properties. The fake generates missing values of `id`,
            `index` and `local_index`.
        env: the environment variables of every allocation.
        shared: resources of which every worker, and every operator that requests one, gets all devices.

    For assertions, `registrations` and `departures` (worker's name, reason) list the messages of workers.
    """

    def __init__(
        self,
        resources: Mapping[str, Devices] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        shared: Collection[str] = (),
    ) -> None:
        self.registrations: list[Register] = []
        self.departures: list[tuple[str, str]] = []
        self._env = dict(env or {})
        self._shared = frozenset(shared)
        self._devices: dict[str, list[dict[str, str]]] = {}
        self._unavailable: dict[str, Unavailable] = {}
        self._verdict: tuple[AllocationState, str | None, str | None] = (AllocationState.ALLOCATED, None, None)
        self._workers: dict[str, _Worker] = {}
        self._watches: dict[str, tuple[AllocationWatch, Callable[[LeaseLostError], object] | None]] = {}
        self.absent = False
        """True: entering a context raises `NoManagerError`."""
        self._shares = Shares()
        self._now = 0.0
        self._commit = NO_COMMIT
        self._lock = threading.Condition()
        for name, devices in (resources or {}).items():
            self.set(name, devices)

    def context(self, *args: Any, **kwargs: Any) -> RuntimeContext:
        """A context on this fake. It takes and checks the arguments of `RuntimeContext`."""
        return _FakeContext(self, *args, **kwargs)

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Within this, each `RuntimeContext` that code of this process enters is one of this fake.

        At the end, those that are still entered are left.
        """
        from unittest import mock  # it imports asyncio

        entered: list[RuntimeContext] = []
        begin = RuntimeContext._begin

        def noted(context: RuntimeContext) -> Backend:
            entered.append(context)
            return begin(context)

        def faked(context: RuntimeContext, on_lease_at_risk: OnLeaseAtRisk | None) -> Backend:
            return _FakeBackend(self, context._settings, on_lease_at_risk)

        replaced: dict[str, Any] = {"_begin": noted, "_make_backend": faked, "_shares": self._shares}
        with mock.patch.multiple(RuntimeContext, **replaced):
            try:
                yield self
            finally:
                for context in entered:
                    context.leave()

    def wait_for(self, condition: Callable[[], object], *, timeout: float = 10.0) -> None:
        """Block until `condition` is true. The fake checks it each time a worker registers or leaves.

        Raises:
            TimeoutError: it was not true within `timeout` seconds.
        """
        with self._lock:
            if not self._lock.wait_for(condition, timeout):
                raise TimeoutError(f"no worker made the condition true within {timeout:g} s")

    # --- the manager's side --------------------------------------------------------------------------------

    def set(self, name: str, devices: Devices) -> None:
        """Set the devices of resource `name`. Workers in a context see the change."""
        names.check_name(name, "resource")
        numbered = [
            {"id": f"{name}:{n}", "index": str(n), "local_index": str(n), **device} for n, device in enumerate(devices)
        ]
        with self._lock:
            self._unavailable.pop(name, None)
            self._devices[name] = numbered
            self._post_all()

    def set_unavailable(self, name: str, reason: str, *, code: str = ReasonCode.NO_DRIVER) -> None:
        """Grant resource `name` without infos from now on: `no-driver`, `disabled`, `driver-failed` …"""
        with self._lock:
            self._devices.pop(name, None)
            self._unavailable[name] = Unavailable(code=code, reason=reason)
            self._post_all()

    def keep_waiting(self, reason: str, *, code: str = ReasonCode.BUSY) -> None:
        """Let all workers wait until `grant`."""
        self._answer_all(AllocationState.PENDING, code, reason)

    def grant(self) -> None:
        """Grant all workers their devices, as a new fake does."""
        self._answer_all(AllocationState.ALLOCATED, None, None)

    def fail(self, reason: str, *, code: str = ReasonCode.DRIVER_FAILED) -> None:
        """Refuse all workers."""
        self._answer_all(AllocationState.FAILED, code, reason)

    def end(self, reason: str = "the lease has ended", *, code: str = ReasonCode.LEASE_EXPIRED) -> None:
        """End the current allocations of all workers. Later workers are not affected."""
        with self._lock:
            verdict = self._verdict
            self._answer_all(AllocationState.ENDED, code, reason)
            self._verdict = verdict

    def put_in_state(self, state: str) -> None:
        """Set `state` in every record, for example a state of a later version."""
        with self._lock:
            for worker in list(self._workers.values()):
                self._post(worker, structs.replace(self._answer(worker), state=state))

    def lose_lease(self) -> None:
        """Fail the heartbeats of all workers with a lease, for the whole lease."""
        with self._lock:
            watches = list(self._watches.values())
            self._now += max((allocation_watch.lease.seconds or 0.0 for allocation_watch, _ in watches), default=0.0)
        for allocation_watch, on_lease_at_risk in watches:
            record = allocation_watch.read().record
            if (
                allocation_watch.lease.at_risk
                and record is not None
                and status.status_of(record) is status.AllocationStatus.YOURS
            ):
                allocation_watch.touch()
                if on_lease_at_risk is not None:
                    on_lease_at_risk(lease_lost(allocation_watch))

    def restore_lease(self) -> None:
        """Let heartbeats get through again."""
        for allocation_watch, _ in list(self._watches.values()):
            allocation_watch.lease.confirm(self._now)
            allocation_watch.touch()

    # --- the workers' side: contexts call it, and tests that play the manager on a bus -------------------------

    def admit(self, registration: Register, post: Post) -> None:
        """Register a worker. `post` gets every record of its allocation, the first one at once."""
        with self._lock:
            self.registrations.append(registration)
            self._lock.notify_all()
            earlier = self._workers.get(_key(registration))
            worker = _Worker(registration, post, earlier.number if earlier else len(self.registrations))
            self._workers[_key(registration)] = worker
            self._post(worker, self._answer(worker))

    def dismiss(self, registration: Register, reason: str) -> None:
        """Deregister a worker."""
        with self._lock:
            self._watches.pop(_key(registration), None)
            worker = self._workers.get(_key(registration))
            if worker is None:
                return  # its allocation is already over
            self.departures.append((registration.worker, reason))
            ended = structs.replace(
                self._answer(worker), state=AllocationState.ENDED, reason=reason, reason_code=ReasonCode.DEREGISTERED
            )
            self._post(worker, ended)
            self._lock.notify_all()

    def refuse_waiting(self, registration: Register) -> None:
        """Refuse a worker that still waits, because its `wait_s` is over."""
        with self._lock:
            worker = self._workers.get(_key(registration))
            if worker is None or (answer := self._answer(worker)).state is not AllocationState.PENDING:
                return
            reason = f"waited {registration.wait_s:g} s; last: {answer.reason}"
            code = ReasonCode.WAITED_TOO_LONG
            self._post(worker, structs.replace(answer, state=AllocationState.FAILED, reason=reason, reason_code=code))

    # --- inside ----------------------------------------------------------------------------------------------

    def _answer_all(self, state: AllocationState, code: str | None, reason: str | None) -> None:
        with self._lock:
            self._verdict = (state, code, reason)
            self._post_all()

    def _post_all(self) -> None:
        for worker in list(self._workers.values()):
            self._post(worker, self._answer(worker))

    def _post(self, worker: _Worker, record: Allocation) -> None:
        if record.state in FINAL_STATES:
            del self._workers[record.key]
        worker.post(record)

    def _answer(self, worker: _Worker) -> Allocation:
        """A worker's current record."""
        registration = worker.registration
        self._commit = CommitNumber(self._commit + 1)
        everything = (*self._devices, *self._unavailable)
        amounts = (
            {name: max(1, len(self._devices.get(name, ()))) for name in everything}
            if registration.resources is None
            else {name: request.amount for name, request in registration.resources.items()}
        )
        state, code, reason = self._verdict
        if state is AllocationState.ALLOCATED:
            state, code, reason = self._feasible(amounts, choosing.asked_of(registration))
        granted = state is AllocationState.ALLOCATED
        asked = choosing.asked_of(registration)
        devices = {
            name: self._chosen(name, amount, asked.get(name))
            for name, amount in amounts.items()
            if name in self._devices
        }
        shared = [name for name in devices if name in self._shared]
        return Allocation(
            host=registration.host,
            worker=registration.worker,
            incarnation=registration.incarnation,
            state=state,
            reason=reason,
            reason_code=code,
            request=ResolvedRequest(
                amounts=amounts,
                resources=_without_clauses(registration.resources),
                operators=registration.operators,
                owner=registration.owner,
                lease_s=DEFAULT_LEASE if registration.lease_s is UNSET else registration.lease_s,
                wait_s=registration.wait_s,
                priority=registration.priority,
                labels=registration.labels,
                choices={name: clauses.choice_of(each) for name, each in asked.items()} or UNSET,
            ),
            since=datetime.now(UTC),
            writer=keys.host_writer(registration.host),
            commit=self._commit,
            source=Source(partition=0, offset=worker.number),
            token=Token(worker.number) if granted else None,
            resources=devices if granted else {},
            operators=_shares(registration, devices, shared, self._env) if granted else {},
            shared=shared if granted else [],
            common=_common(registration, devices, shared) if granted else UNSET,
            env=dict(self._env) if granted else {},
            unavailable={name: self._unavailable[name] for name in amounts if name in self._unavailable},
        )

    def _chosen(self, name: str, amount: int, asked: Clauses | None) -> list[dict[str, str]]:
        """The devices of a resource for a worker with these clauses, or fewer."""
        devices = self._devices[name]
        if asked is not None:
            sieve = clauses.Sieve(asked)
            devices = [device for device in devices if sieve.fault(device) is None]
            if amount > 1 and asked.same:
                groups = combinations(devices, amount)
                devices = next((list(each) for each in groups if clauses.fault(asked, each) is None), [])
        return devices if name in self._shared else devices[:amount]

    def _feasible(
        self, amounts: Mapping[str, int], asked: Mapping[str, Clauses]
    ) -> tuple[AllocationState, str | None, str | None]:
        for name, amount in amounts.items():
            if name in self._unavailable:
                continue
            if name not in self._devices:
                resources = ", ".join(sorted({*self._devices, *self._unavailable})) or "none"
                why = f"the fake has no resource {name!r}; it has: {resources}"
                return AllocationState.FAILED, ReasonCode.UNKNOWN_RESOURCE, why
            if amount > (have := len(self._devices[name])):
                why = f"{amount} of {name!r} asked for, and the fake has {have}"
                return AllocationState.FAILED, ReasonCode.INFEASIBLE, why
            if name in asked and len(self._chosen(name, amount, asked[name])) < amount:
                why = f"{amount} of {name!r} asked for with {clauses.in_words(asked[name])}, and the fake has fewer so"
                return AllocationState.FAILED, ReasonCode.INFEASIBLE, why
        return AllocationState.ALLOCATED, None, None


def _without_clauses(requests: Mapping[str, ResourceRequest] | None) -> dict[str, ResourceRequest] | None:
    if requests is None:
        return None
    return {name: ResourceRequest(amount=request.amount) for name, request in requests.items()}


def fake_context(resources: Mapping[str, Devices], **kwargs: Any) -> RuntimeContext:
    """A context with these devices, for a simple test."""
    return FakeOutfitter(resources).context(**kwargs)


def _key(registration: Register) -> str:
    return keys.allocation_key(registration.host, registration.worker, registration.incarnation)


def _shares(
    registration: Register, devices: Mapping[str, list[dict[str, str]]], shared: Collection[str], env: Mapping[str, str]
) -> dict[str, OperatorShare]:
    """Divide the devices in the order of the listed operators."""
    left = {name: [device["id"] for device in listed] for name, listed in devices.items()}
    shares = {}
    for operator, requests in (registration.operators or {}).items():
        own = {name: left.get(name, [])[: request.amount] for name, request in requests.items() if name not in shared}
        left = {name: [id_ for id_ in ids if id_ not in own.get(name, ())] for name, ids in left.items()}
        seen = [name for name in requests if name in shared]
        shares[operator] = OperatorShare(resources=own, env=dict(env), shared=seen or UNSET)
    return shares


def _common(
    registration: Register, devices: Mapping[str, list[dict[str, str]]], shared: Collection[str]
) -> dict[str, OperatorShare] | UnsetType:
    """The part of a record that all operators of a shared resource see."""
    named = {name for requests in (registration.operators or {}).values() for name in requests}
    common = {
        name: OperatorShare(resources={name: [device["id"] for device in devices[name]]})
        for name in shared
        if name in named
    }
    return common or UNSET


class _FakeContext(RuntimeContext):
    def __init__(self, fake: FakeOutfitter, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fake = fake
        self._shares = fake._shares

    def _make_backend(self, on_lease_at_risk: OnLeaseAtRisk | None) -> _FakeBackend:
        return _FakeBackend(self._fake, self._settings, on_lease_at_risk)


class _FakeBackend:
    """A `Backend` on a fake."""

    def __init__(
        self,
        fake: FakeOutfitter,
        settings: SessionSettings,
        on_lease_at_risk: Callable[[LeaseLostError], object] | None,
    ) -> None:
        self.allocation_watch = AllocationWatch(Lease(lambda: fake._now))
        self._fake = fake
        self._registration = settings.registration
        self._on_lease_at_risk = on_lease_at_risk
        self._ready: Future[None] = Future()
        self._ready.set_running_or_notify_cancel()

    def start(self) -> Future[None]:
        if self._fake.absent:
            self._ready.set_exception(NoManagerError("the fake is absent"))
            return self._ready
        self._fake._watches[_key(self._registration)] = (self.allocation_watch, self._on_lease_at_risk)
        self._fake.admit(self._registration, self._post)
        if (wait_s := self._registration.wait_s) is not None:
            self._limit_wait(wait_s)
        return self._ready

    def _limit_wait(self, seconds: float) -> None:
        if not self._ready.done():
            timer = threading.Timer(seconds, self._fake.refuse_waiting, [self._registration])
            timer.daemon = True
            self._ready.add_done_callback(lambda _: timer.cancel())
            timer.start()

    def stop(self, reason: str) -> Future[None]:
        self._fake.dismiss(self._registration, reason)
        self.allocation_watch.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _post(self, record: Allocation) -> None:
        self.allocation_watch.lease.grant(record.request.lease_s)
        self.allocation_watch.post(record)
        if self._ready.done() or (meaning := status.status_of(record)) is status.AllocationStatus.WAITING:
            return
        refusal = status.refusal(record)
        if meaning is status.AllocationStatus.YOURS or refusal is None:
            self.allocation_watch.lease.confirm(self._fake._now)
            self._ready.set_result(None)
        else:
            self._ready.set_exception(refusal)

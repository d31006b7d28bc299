"""One operator's side of an allocation: its infos, its environment, and their changes.

A whole context, one operator's view of it and the fake in `outfitter.testing` have the same methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator
from typing import NamedTuple

from outfitter.errors import AllocationFailedError, AllocationNotUsableError, ContextStateError, UsedAfterForkError
from outfitter.infos import ExternalResourceInfos
from outfitter.session import status
from outfitter.session.watch import AllocationWatch, WatchSnapshot, lease_lost
from outfitter_proto.records import Allocation


class OperatorContext(ABC):
    """An operator's side of an allocation. Every method is thread-safe and returns at once.

    Every method raises:
        ContextStateError: the context was not entered, or has been left.
        UsedAfterForkError: this process was forked from the one that entered the context.
        LeaseLostError: no heartbeat got through for two thirds of the lease; stop using the devices.
        AllocationEndedError, AllocationFailedError: the allocation is over.
        AllocationNotUsableError: its state does not permit use (a state of a later version, for example).
        VariableNotAllowedError: its variables are not allowed here; not of `record`.
        BusError: the session cannot read the ledger any more.
    """

    @property
    @abstractmethod
    def operator(self) -> str | None:
        """The operator whose share this is. None: an operator that the registration does not name."""

    @abstractmethod
    def _allocation_watch(self) -> AllocationWatch:
        """The watch of the allocation, after a check of process and context."""

    @abstractmethod
    def _allowed_variables(self) -> Collection[str]:
        """The variables that this worker takes from a record besides those that select devices."""

    @property
    def record(self) -> Allocation:
        """The allocation record as on the wire."""
        allocation_watch = self._allocation_watch()
        return _usable(allocation_watch, allocation_watch.read())

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that select these devices (`CUDA_VISIBLE_DEVICES` …).

        A named operator has variables of its own, for a process started for it. Otherwise they are the whole
        worker's, and `local_index` refers to those.
        """
        return status.environment(self.record, self.operator, self._allowed_variables())

    def get_external_resource_infos(self, name: str, *, strict: bool = True) -> ExternalResourceInfos:
        """The infos of resource `name` (Flink: `RuntimeContext.getExternalResourceInfos`).

        If the registration has `operators`, a named operator sees its own devices, and all others see the rest.
        Otherwise every operator sees all devices of the worker.

        `strict=False` returns Flink's empty set for a resource that is unknown, has no driver or could not be
        discovered. An allocation that is over still raises, because its devices are no longer yours.

        Raises:
            UnknownResourceError: unknown resource; the message lists the known ones.
            NoDriverError, ResourceDisabledError, AllocationFailedError: the resource has no infos, with the reason.
        """
        record = self.record
        status.environment(record, self.operator, self._allowed_variables())
        try:
            return status.infos(record, name, self.operator)
        except AllocationFailedError as error:
            if strict or (
                error.record is not None and status.status_of(error.record) is not status.AllocationStatus.YOURS
            ):
                raise
            return ExternalResourceInfos()

    def external_resource_infos(self) -> dict[str, ExternalResourceInfos]:
        """The infos of all resources of this operator, without those that have no infos."""
        record = self.record
        status.environment(record, self.operator, self._allowed_variables())
        return {
            name: status.infos(record, name, self.operator)
            for name in status.resource_names(record, self.operator)
            if name in record.resources and name not in record.unavailable
        }

    def changes(self, name: str) -> Changes:
        """The infos of resource `name`, now and at each change, for `for` and `async for`.

        The first item comes at once. Quick changes may arrive as one item. The iteration ends when the context is
        left. It raises the errors of `get_external_resource_infos`.
        """
        return Changes(self, name)


class Changes(Iterator[ExternalResourceInfos], AsyncIterator[ExternalResourceInfos]):
    """See `OperatorContext.changes`. For one consumer, which may iterate again after an error."""

    def __init__(self, context: OperatorContext, name: str) -> None:
        """`name`: the resource."""
        self._context = context
        self._name = name
        self._allocation_watch = context._allocation_watch()
        self._seen: ExternalResourceInfos | None = None

    def __iter__(self) -> Changes:
        return self

    def __aiter__(self) -> Changes:
        return self

    def __next__(self) -> ExternalResourceInfos:
        while True:
            poll = self._poll()
            if poll.over:
                raise StopIteration
            if poll.changed_infos is not None:
                return poll.changed_infos
            self._allocation_watch.wait(poll.version)

    async def __anext__(self) -> ExternalResourceInfos:
        while True:
            poll = self._poll()
            if poll.over:
                raise StopAsyncIteration
            if poll.changed_infos is not None:
                return poll.changed_infos
            await self._allocation_watch.changed(poll.version)

    def _poll(self) -> _Poll:
        version = self._allocation_watch.read().version  # read first: a change after this line wakes the next wait
        try:
            infos = self._context.get_external_resource_infos(self._name)
        except AllocationNotUsableError:
            return _Poll(version)  # not final: wait for the next state
        except UsedAfterForkError:
            raise
        except ContextStateError:
            return _Poll(version, over=True)
        if self._seen is not None and tuple(infos) == tuple(self._seen):
            return _Poll(version)
        self._seen = infos
        return _Poll(version, changed_infos=infos)


class _Poll(NamedTuple):
    """One look at the watch."""

    version: int
    """Wait for another one."""
    changed_infos: ExternalResourceInfos | None = None
    """None: they are the same as before."""
    over: bool = False


class OperatorView(OperatorContext):
    """A named operator's view of a context. It does not enter or leave the context."""

    def __init__(self, context: OperatorContext, operator: str) -> None:
        self._context = context
        self._operator = operator

    @property
    def operator(self) -> str | None:
        return self._operator

    def _allocation_watch(self) -> AllocationWatch:
        return self._context._allocation_watch()

    def _allowed_variables(self) -> Collection[str]:
        return self._context._allowed_variables()


def _usable(allocation_watch: AllocationWatch, snapshot: WatchSnapshot) -> Allocation:
    """The record of `snapshot`; raises unless its devices may be used now."""
    if snapshot.error is not None:
        raise snapshot.error.with_traceback(None)  # raised repeatedly: its frames must not accumulate
    if snapshot.record is None:
        raise AllocationNotUsableError("there is no allocation record yet")
    refusal = status.refusal(snapshot.record)
    if refusal is not None:
        raise refusal
    if allocation_watch.lease.at_risk:
        raise lease_lost(allocation_watch)
    return snapshot.record

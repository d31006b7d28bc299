"""What one operator sees: its infos, its environment, and how they change.

The same methods serve a whole context, one operator's view of it, and the fake of `outfitter.testing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from outfitter.errors import (
    AllocationFailedError,
    AllocationNotUsableError,
    ContextStateError,
    UsedAfterForkError,
)
from outfitter.infos import ExternalResourceInfos
from outfitter.session import status
from outfitter.session.watch import AllocationWatch, Snapshot, lease_lost
from outfitter_proto.records import Allocation


class OperatorContext(ABC):
    """An operator's side of an allocation. Every method may be called from any thread, and returns at once.

    What every one of them raises:
        ContextStateError: the context was not entered, or has been left.
        UsedAfterForkError: this process was forked from the one that entered the context.
        LeaseLostError: no heartbeat got through for most of the lease; stop using the devices.
        AllocationEndedError, AllocationFailedError: the allocation is over.
        AllocationNotUsableError: it is in a state in which it may not be used (one of a later version, say).
        BusError: the allocation cannot be followed any more.
    """

    @property
    @abstractmethod
    def operator(self) -> str | None:
        """Whose share this is. None: an operator that the registration does not name."""

    @abstractmethod
    def _allocation_watch(self) -> AllocationWatch:
        """The board, after checking that it may be looked at here and now."""

    @property
    def record(self) -> Allocation:
        """The allocation record as it stands on the wire."""
        allocation_watch = self._allocation_watch()
        return _usable(allocation_watch, allocation_watch.read())

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that select these devices (`CUDA_VISIBLE_DEVICES` …).

        A named operator's own, for a process that is started for it; else those of the whole worker, to
        which `local_index` refers.
        """
        return status.environment(self.record, self.operator)

    def get_external_resource_infos(self, name: str, *, strict: bool = True) -> ExternalResourceInfos:
        """The infos of resource `name` (Flink: `RuntimeContext.getExternalResourceInfos`).

        With `operators` in the registration, a named operator sees its own devices only, and every other one
        what is left over; without, everybody sees all of the worker's.

        `strict=False` gives Flink's empty set for a resource that is unknown, has no driver or could not be
        discovered. An allocation that is over raises nevertheless: what Flink would show is no longer yours.

        Raises:
            UnknownResourceError: no such resource; the message lists those there are.
            NoDriverError, ResourceDisabledError, AllocationFailedError: it has no infos, and why.
        """
        try:
            return status.infos(self.record, name, self.operator)
        except AllocationFailedError as error:
            if strict or (
                error.record is not None and status.standing(error.record) is not status.AllocationStatus.YOURS
            ):
                raise
            return ExternalResourceInfos()

    def external_resource_infos(self) -> dict[str, ExternalResourceInfos]:
        """The infos of all resources that this operator has any record of; those without infos are left out."""
        record = self.record
        return {
            name: status.infos(record, name, self.operator)
            for name in status.resource_names(record, self.operator)
            if name in record.resources and name not in record.unavailable
        }

    def changes(self, name: str) -> Changes:
        """The infos of resource `name`, now and each time they change: for `for` and for `async for`.

        The first item comes at once. Changes that follow each other quickly may be seen as one. The
        iteration ends when the context is left, and raises what `get_external_resource_infos` would when the
        allocation ends, the lease is in danger or the resource has no infos any more.
        """
        return Changes(self, name)


class Changes(Iterator[ExternalResourceInfos], AsyncIterator[ExternalResourceInfos]):
    """See `OperatorContext.changes`. One consumer; after an error it may be asked again."""

    def __init__(self, context: OperatorContext, name: str) -> None:
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
            glance = self._look()
            if glance.over:
                raise StopIteration
            if glance.news is not None:
                return glance.news
            self._allocation_watch.wait(glance.version)

    async def __anext__(self) -> ExternalResourceInfos:
        while True:
            glance = self._look()
            if glance.over:
                raise StopAsyncIteration
            if glance.news is not None:
                return glance.news
            await self._allocation_watch.changed(glance.version)

    def _look(self) -> _Glance:
        version = self._allocation_watch.read().version  # first, so that what comes while we look is not slept through
        try:
            infos = self._context.get_external_resource_infos(self._name)
        except AllocationNotUsableError:
            return _Glance(version)  # on its way to another state, which is what we wait for
        except UsedAfterForkError:
            raise
        except ContextStateError:
            return _Glance(version, over=True)
        if self._seen is not None and tuple(infos) == tuple(self._seen):
            return _Glance(version)
        self._seen = infos
        return _Glance(version, news=infos)


class _Glance(NamedTuple):
    version: int
    news: ExternalResourceInfos | None = None
    over: bool = False


class OperatorView(OperatorContext):
    """A named operator's view of a context that somebody else enters and leaves."""

    def __init__(self, context: OperatorContext, operator: str) -> None:
        self._context = context
        self._operator = operator

    @property
    def operator(self) -> str | None:
        return self._operator

    def _allocation_watch(self) -> AllocationWatch:
        return self._context._allocation_watch()


def _usable(allocation_watch: AllocationWatch, snapshot: Snapshot) -> Allocation:
    """The record of `snapshot`, if its devices may be used now."""
    if snapshot.error is not None:
        raise snapshot.error.with_traceback(None)  # it is raised again and again: its frames must not pile up
    if snapshot.record is None:
        raise AllocationNotUsableError("there is no allocation record yet")
    refusal = status.refusal(snapshot.record)
    if refusal is not None:
        raise refusal
    if allocation_watch.lease.at_risk:
        raise lease_lost(allocation_watch)
    return snapshot.record

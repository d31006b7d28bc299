"""Bugs of the worker's client: a lease that it believes in for too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from outfitter.session import status
from outfitter.session.lease import Lease
from outfitter.session.worker_session import WorkerSession
from outfitter_proto.records import Allocation
from simulation.bugs.bug import Bug, deafening


def _from_when_it_is_read(self: Lease, seconds: float | None) -> None:
    if seconds != self._seconds:
        self.confirm(self.clock())
    self._seconds = seconds


def _by_any_acknowledgement(self: Lease, sent_at: float) -> bool:
    self.confirm(sent_at)
    return True


async def _whatever_became_of_the_lease(self: WorkerSession) -> Allocation:
    snapshot = self.allocation_watch.read()
    while snapshot.record is None or (refusal := status.refusal(snapshot.record)) is not None:
        if snapshot.error is not None:
            raise snapshot.error
        if snapshot.record is not None and status.status_of(snapshot.record) is not status.AllocationStatus.WAITING:
            raise refusal
        snapshot = await self.allocation_watch.changed(snapshot.version)
    return snapshot.record


@contextmanager
def _of_the_deaf(method: str, instead: Callable[..., object]) -> Iterator[None]:
    with deafening(), patch.object(Lease, method, instead):
        yield


BUGS: tuple[Bug, ...] = (
    Bug(
        name="lease-from-when-it-is-read",
        what="a worker's lease begins when the first record is read, however long ago that was written",
        within=500,
        patches=lambda: _of_the_deaf("grant", _from_when_it_is_read),
    ),
    Bug(
        name="late-heartbeat-renews",
        what="a heartbeat that gets through after the end of a worker's lease renews it",
        within=500,
        patches=lambda: _of_the_deaf("acknowledge", _by_any_acknowledgement),
    ),
    Bug(
        name="grant-judged-by-old-heartbeats",
        what="whether a grant after an outage is lost is judged by the worker's heartbeats of before it",
        within=40,
        patches=lambda: patch.object(WorkerSession, "_await_verdict", _whatever_became_of_the_lease),
    ),
)

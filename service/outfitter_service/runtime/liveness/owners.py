"""The owners of live allocations: which of them are watched, and which allocations must record that theirs is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import anyio
import structlog
from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import HOLDING_STATES, Allocation, Unwatched
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.liveness.process_watch import REASONS, ProcessWatch

log = structlog.get_logger("outfitter.liveness")

POLL_EVERY_S = 0.25
"""Seconds between two polls of owners without a descriptor. Each poll is of some of them."""
LOGGED_EVERY_S = 60.0
"""Seconds between two log lines about unwatched owners."""
FROM_AFAR = frozenset({Unwatched.SCOPE, Unwatched.MACHINE, Unwatched.PID_NAMESPACE})
"""Reasons that a worker can tell from its host's record. Its own record need not repeat them."""


class Owners:
    """Owners by allocation key. Nobody is watched before the first `restart`."""

    def __init__(
        self,
        identity: Identity,
        clock: Clock,
        *,
        died: Callable[[AllocationKey, str], None],
        make_process_watch: Callable[..., ProcessWatch],
    ) -> None:
        """`died` is called with an allocation's key, and with the proof that its owner is dead. `make_process_watch`
        makes the watch of processes."""
        self._identity = identity
        self._now = clock.monotonic
        self._died = died
        self._make_process_watch = make_process_watch
        self._processes: ProcessWatch | None = None
        self._unreported: set[AllocationKey] = set()
        self._awaited: set[AllocationKey] = set()
        self._logged_awaited: frozenset[AllocationKey] = frozenset()
        self._awaited_logged_at = -LOGGED_EVERY_S
        self._poll_again = anyio.Event()
        self._logged_reasons: frozenset[str] = frozenset()
        self._logged_at = -LOGGED_EVERY_S

    def __contains__(self, key: AllocationKey) -> bool:
        """Whether the allocation's owner is watched."""
        return self._processes is not None and key in self._processes

    @property
    def watched(self) -> int:
        """How many owner processes are watched."""
        return len(self._processes) if self._processes is not None else 0

    @property
    def polled(self) -> int:
        """How many of them are polled in turns, because descriptors are scarce."""
        return self._processes.polled if self._processes is not None else 0

    @property
    def unwatched(self) -> Counter[Unwatched]:
        """How many live allocations' owners are not watched, by reason."""
        return self._processes.unwatched() if self._processes is not None else Counter()

    def keys(self) -> set[AllocationKey]:
        """All allocations with an owner, watched or not."""
        return self._processes.keys() if self._processes is not None else set()

    def restart(self, earlier_boot_id: str | None) -> None:
        """Begin with a restored ledger: no unwatched owner waits to be reported. `earlier_boot_id`: an ended boot of
        this machine."""
        self._unreported.clear()
        if self._processes is None:
            self._processes = self._make_process_watch(
                boot_id=self._identity.boot_id,
                pid_ns=self._identity.pid_ns,
                time_ns=self._identity.time_ns,
                earlier_boot_id=earlier_boot_id,
                died=self._died,
            )

    def watch(self, key: AllocationKey, record: Allocation) -> bool:
        """Watch a live allocation's owner, if it has one. Returns whether exactly that process is watched."""
        owner, waits = record.request.owner, record.request.waits_for_owner
        if self._processes is None or owner is None:
            return False
        watched = self._processes.watch(key, owner)
        if self._processes.must_poll or not watched:
            self._poll_again.set()
        needs_lease = record.request.lease_s is None and not waits
        if not watched and (
            needs_lease or (record.unwatched is UNSET and self._processes.reason(key) not in FROM_AFAR)
        ):
            self._unreported.add(key)
        if waits and not watched and record.state in HOLDING_STATES:
            self._awaited.add(key)
        else:
            self._awaited.discard(key)
        return watched

    def forget(self, key: AllocationKey) -> None:
        """The allocation is over."""
        self._unreported.discard(key)
        self._awaited.discard(key)
        if self._processes is not None:
            self._processes.forget(key)

    def take_unreported(self, lease_s: float) -> list[m.OwnerUnwatched]:
        """Remove and return the unwatched owners that records must mention, because workers cannot know of them.
        `lease_s`: the lease of workers without one."""
        if self._processes is None or not self._unreported:
            return []
        events: list[m.OwnerUnwatched] = []
        for key in sorted(self._unreported):
            reason = self._processes.reason(key)
            if reason != Unwatched.DESCRIPTORS:  # then the watch tries again
                self._unreported.discard(key)
                if reason is not None:
                    events.append(
                        m.OwnerUnwatched(allocation=key, code=reason, reason=REASONS[reason], lease_s=lease_s)
                    )
        return events

    async def poll_owners(self, resolved: Callable[[AllocationKey], None]) -> None:
        """Poll owners without a descriptor, until cancelled. `resolved` is called with the allocations whose owner is
        identified only now, or cannot be identified."""
        while True:
            await self._poll_again.wait()
            self._poll_again = anyio.Event()
            await anyio.sleep(POLL_EVERY_S)
            if self._processes is None:
                continue
            for key in self._processes.poll():
                resolved(key)
            self._log_unwatched()
            self._log_awaited()
            if self._processes.must_poll:
                self._poll_again.set()

    def _log_unwatched(self) -> None:
        """Log one line for all unwatched owners when there is a new reason."""
        counts = {str(reason): count for reason, count in self.unwatched.items() if reason != Unwatched.SCOPE}
        if self.polled:
            counts["looked-at-in-turns"] = self.polled
        if counts.keys() <= self._logged_reasons or self._now() - self._logged_at < LOGGED_EVERY_S:
            return
        self._logged_reasons, self._logged_at = self._logged_reasons | counts.keys(), self._now()
        log.warning("the kernel does not report the end of every owner process to this manager", **counts)

    def _log_awaited(self) -> None:
        """Log one line when there are new allocations that wait for the end of a process that nobody sees."""
        if self._processes is None or self._now() - self._awaited_logged_at < LOGGED_EVERY_S:
            return
        unseen = {key for key in self._awaited if self._processes.reason(key) not in (None, Unwatched.DESCRIPTORS)}
        new = sorted(unseen - self._logged_awaited)
        self._logged_awaited = frozenset(unseen)
        if new:
            self._awaited_logged_at = self._now()
            reason = self._processes.reason(new[0])
            log.warning(
                "workers that send no heartbeats keep their devices, because this manager cannot see their processes",
                workers=len(unseen),
                allocation=new[0],
                reason=REASONS[reason] if reason is not None else None,
                remedy=f"outfitter explain {new[0]}",
            )

    def close(self) -> None:
        """Watch nobody any more."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

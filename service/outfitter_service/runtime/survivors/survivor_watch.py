"""Waits until a worker's processes are gone, and ends them where its registration asked for that.

One search in /proc serves all allocations that wait at that moment, so many releases at once cost few searches. While a
process is known to live, the watch waits for its end and searches rarely.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
import structlog
from msgspec import UNSET

from outfitter_proto.records import Allocation, Survivors
from outfitter_proto.support.backoff import Backoff
from outfitter_proto.support.processes import user_namespace
from outfitter_service.core import delays
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.survivors import processes
from outfitter_service.runtime.survivors.delay_reports import DelayReports
from outfitter_service.runtime.survivors.processes import Mark, Search, Survivor

log = structlog.get_logger("outfitter.survivors")

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
"""The first and the longest time until the watch searches again while a survivor lives."""
SHORTEST_DELAY_S = 0.05
"""Seconds between two searches for one worker."""
RESTS = 9
"""After a search the watch rests this many times as long. So searches take at most a tenth of a core, however many
workers end."""
REPORTED_AFTER_S = 0.5
"""Seconds that survivors may take before the record mentions them."""
SURE_WITHIN_S = 10.0
"""Seconds for a search that can have missed nothing. A process that hangs in the kernel at its end can prevent one."""
MOST_NAMED = 3
"""Most processes that a report names."""

NONE_LEFT = "no process of the worker is left"
NOT_SEEN = "processes of the worker were not searched for: this manager does not see them"

T = TypeVar("T")
SearchProcesses = Callable[[Collection[Mark]], Search]


class SurvivorWatch:
    """The survivors of one manager's workers."""

    def __init__(
        self, identity: Identity, *, search: SearchProcesses = processes.search, clock: Clock = SYSTEM
    ) -> None:
        """`identity`: the manager's, which says whose processes it can see. `search` finds processes in a thread."""
        self.now = clock.monotonic
        self._sees = identity.sees
        self._search = search
        self._wanted: set[Mark] = set()
        self._next: _Result | None = None
        self._searching = anyio.Lock()
        self._rests_until = 0.0
        self._limiter = anyio.CapacityLimiter(2)

    def out_of_sight(self, record: Allocation) -> str | None:
        """The delay of a release whose processes an earlier manager has seen, and this one does not see; else None."""
        if not record.delayed_by or not delays.is_out_of_sight(record, self._sees):
            return None
        reason = delays.out_of_sight(record.delayed_by)
        log.warning(
            "devices stay held",
            host=record.host,
            worker=record.worker,
            incarnation=record.incarnation,
            reason=reason,
        )
        return reason

    async def wait_until_gone(self, record: Allocation, delayed: Callable[[str], None]) -> str | None:
        """Wait until no process of the allocation is left. `delayed` is called with the reason while some are. Returns
        what came of it, for history; None: the allocation asked for no search."""
        survivors, owner = record.request.survivors, record.request.owner
        if survivors is UNSET or owner is None:
            return None
        if self._sees != (owner.boot_id, owner.pid_ns):
            return NOT_SEEN
        user_ns = None if survivors.user_ns in (UNSET, None, user_namespace()) else survivors.user_ns
        mark = Mark(record.host, record.worker, record.incarnation, survivors.uid, user_ns)
        return await _Vigil(self, mark, survivors, delayed).run()

    async def find(self, mark: Mark) -> Search:
        """The processes with this mark. A search that begins after this call answers it.

        Raises:
            OSError: /proc cannot be listed, or no file descriptor is left.
        """
        self._wanted.add(mark)
        result = self._next = self._next or _Result()
        async with self._searching:
            if not result.begun:
                await anyio.sleep(max(0.0, self._rests_until - self.now()))
                result.begun = True
                self._next, marks, self._wanted = None, self._wanted, set()
                began = self.now()
                try:
                    result.search = await self.in_thread(lambda: self._search(marks))
                except OSError as error:
                    result.error = error
                ended = self.now()
                self._rests_until = ended + RESTS * (ended - began)
        if result.search is None:
            raise result.error or OSError("the search was cancelled")
        return result.search

    async def wait_for(self, survivor: Survivor, *, at_most: float) -> None:
        """Wait for the end of a process, for at most so many seconds."""
        try:
            pidfd = await self.in_thread(lambda: processes.open_survivor(survivor))
        except (BlockingIOError, PermissionError):
            return  # the next search says what has become of it
        if pidfd is None:
            return
        try:
            with anyio.move_on_after(at_most):
                await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run a blocking call on /proc. A process that hangs in the kernel may hold it up for long."""
        return await anyio.to_thread.run_sync(call, limiter=self._limiter, abandon_on_cancel=True)


class _Result:
    """A search that several callers share."""

    def __init__(self) -> None:
        self.begun = False
        self.search: Search | None = None
        self.error: OSError | None = None


class _Vigil:
    """One allocation's wait."""

    def __init__(self, watch: SurvivorWatch, mark: Mark, wanted: Survivors, delayed: Callable[[str], None]) -> None:
        self._watch = watch
        self._mark = mark
        self._kill_after_s = wanted.kill_after_s or None
        self._delayed = delayed
        self._now = watch.now
        self._begun = self._now()
        self._reports = DelayReports(self._now)
        self._terminated: set[int] = set()
        self._log = log.bind(host=mark.host, worker=mark.worker, incarnation=mark.incarnation)

    async def run(self) -> str:
        """Wait until none is left; return the sentence for history."""
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        unsure_since = math.inf
        while True:
            try:
                found = await self._watch.find(self._mark)
                if survivors := found.survivors.get(self._mark):
                    unsure_since = math.inf
                    self._report(_in_words(survivors))
                    await self._end(survivors)
                    await self._watch.wait_for(survivors[0], at_most=self._until_kill(backoff.next_delay()))
                elif not found.missed or self._now() - unsure_since > SURE_WITHIN_S:
                    return self._outcome(found)
                else:
                    unsure_since = min(unsure_since, self._now())
                    self._report(f"the processes of the worker cannot be searched for: {found.missed}")
            except (FileNotFoundError, PermissionError) as error:
                return f"processes of the worker were not searched for: {error}"
            except OSError as error:
                self._report(f"the processes of the worker cannot be searched for: {error}")
                await anyio.sleep(backoff.next_delay())
            await anyio.sleep(SHORTEST_DELAY_S)

    def _outcome(self, found: Search) -> str:
        if found.missed:
            return f"not all processes of the worker were searched for: {found.missed}"
        if self._mark.user_ns is not None:
            return "not all processes of the worker were searched for: the worker is in another user namespace"
        if self._mark.uid in found.refused:
            return f"not all processes of the worker were searched for: some of user {self._mark.uid} are unreadable"
        return NONE_LEFT

    def _report(self, reason: str) -> None:
        if self._now() - self._begun < REPORTED_AFTER_S or not self._reports.is_due:
            return
        if self._reports.report(reason):
            self._log.warning("devices stay held", reason=reason)
        self._delayed(reason)

    async def _end(self, survivors: Sequence[Survivor]) -> None:
        """Send the signals that are due, if the registration asked for it."""
        if self._kill_after_s is None:
            return
        if self._now() - self._begun >= self._kill_after_s:
            due, number = list(survivors), signal.SIGKILL
        else:
            due, number = [each for each in survivors if each.pid not in self._terminated], signal.SIGTERM
            self._terminated.update(each.pid for each in due)
        if due:
            self._log.warning("ends the worker's processes", signal=number.name, pids=[each.pid for each in due])
            await self._watch.in_thread(lambda: processes.send(due, number))

    def _until_kill(self, delay: float) -> float:
        if self._kill_after_s is None:
            return delay
        left = self._begun + self._kill_after_s - self._now()
        return min(delay, left) if left > 0 else min(delay, FIRST_DELAY_S)


def _in_words(survivors: Sequence[Survivor]) -> str:
    """For example: process 4711 (python3) of the worker still runs."""
    named = ", ".join(f"{each.pid} ({each.command})" for each in survivors[:MOST_NAMED])
    more = f" and {len(survivors) - MOST_NAMED} more" if len(survivors) > MOST_NAMED else ""
    if len(survivors) == 1:
        return f"process {named} of the worker still runs"
    return f"processes {named}{more} of the worker still run"

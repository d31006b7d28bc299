"""A member of a group on an embedded bus. It sends heartbeats, and reads the group's tables after each wake-up."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import anyio

from outfitter_proto.bus.embedded import groups
from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.notify import Listener, Notifier
from outfitter_proto.bus.ownership import OwnedMembership
from outfitter_proto.bus.port import BusError, BusUnavailableError, MemberReplacedError

MEMBERS = -1
"""Pseudo partition number for the wake-ups of a topic's groups."""

_log = logging.getLogger(__name__)


class EmbeddedMembership(OwnedMembership):
    """See `Membership`. `replica`: the member's name, if it has one. `heartbeat_interval` is in seconds."""

    def __init__(
        self,
        reading: Database,
        writing: Database,
        notifier: Notifier,
        member: groups.Member,
        *,
        replica: str | None,
        heartbeat_interval: float,
    ) -> None:
        super().__init__()
        self._reading = reading
        self._writing = writing
        self._notifier = notifier
        self._member = member
        self._replica = replica
        self._interval = heartbeat_interval
        self._turn = anyio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._joined = False
        self._written = False
        self._failing = False
        self._closed = False

    async def start(self) -> None:
        """Join, and begin to send heartbeats."""
        self._listener = self._notifier.listen(self._member.topic.id, MEMBERS)
        try:
            await self._beat()
        except BaseException:  # cancellation too: only this process can end the committed membership
            await self._end(leave=self._replica is None and self._written)
            raise
        self._task = asyncio.create_task(self._run(self._listener), name=f"member of {self._member.group}")
        self._task.add_done_callback(self._report_end)

    async def _ask_group(self, partition: int) -> bool:  # noqa: ARG002 - a heartbeat confirms all partitions
        if self._closed or self._ownership.error is not None:
            return False
        try:
            await self._beat()
        except BusError:
            return False
        return True

    async def leave(self) -> None:
        await self._end(leave=True)

    async def aclose(self) -> None:
        await self._end(leave=self._replica is None)

    async def _end(self, *, leave: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task], timeout=1)
            if self._listener is not None:
                self._listener.close()
            try:
                if leave:
                    await self._writing.commit(partial(groups.leave, member=self._member), after=self._notify)
            except BusError as error:
                _log.warning(
                    "group %s: could not leave; the end of the session will remove the member: %s",
                    self._member.group,
                    error,
                )
        self._ownership.assign(frozenset())

    async def _run(self, listener: Listener) -> None:
        due = anyio.current_time() + self._interval
        while self._ownership.error is None:
            with anyio.move_on_after(max(0.0, due - anyio.current_time())):
                await listener.wait()
            listener.drain()
            is_due = anyio.current_time() >= due
            if is_due:
                due = anyio.current_time() + self._interval
            try:
                await (self._beat() if is_due else self._refresh())
            except BusError as error:
                if not self._failing:
                    _log.warning("group %s: heartbeat failed, retrying: %s", self._member.group, error)
                self._failing = True
            else:
                self._failing = False
                if not self._joined:
                    due = anyio.current_time()

    async def _beat(self) -> None:
        async with self._turn:
            job = groups.beat if self._joined else groups.join
            self._apply(await self._writing.commit(partial(job, member=self._member), after=self._notify))

    async def _refresh(self) -> None:
        async with self._turn:
            self._apply(await self._reading.read(partial(groups.view_of, member=self._member)))

    def _apply(self, view: groups.GroupView) -> None:
        if view.holder == self._member.process:
            self._joined = True
            self._ownership.assign(view.partitions)
        elif view.holder is None:
            self._joined = False
            self._ownership.expel()
        else:
            self._ownership.fail(
                MemberReplacedError(
                    f"another process has joined group {self._member.group!r} as replica {self._replica!r}, and is "
                    "that replica now: give each running replica a name of its own"
                )
            )

    def _notify(self, view: groups.GroupView) -> None:
        """Called by the database's thread after each commit, even if the caller was cancelled."""
        self._written = True
        if view.moved:
            self._notifier.notify([(self._member.topic.id, MEMBERS)])

    def _report_end(self, task: asyncio.Task[None]) -> None:
        """Report an error of the task, which nobody awaits. Otherwise the caller of `changed` would wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ownership.fail(BusUnavailableError(f"the membership of {self._member.group!r} has ended: {error!r}"))

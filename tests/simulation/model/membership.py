"""A member of a group of the model broker: the bus port's side of it."""

from __future__ import annotations

import asyncio
from collections import deque

from outfitter_proto.bus import MemberReplacedError, Membership
from simulation.model.errors import FENCED_INSTANCE, UNKNOWN_MEMBER, RefusedError
from simulation.model.group import Group
from simulation.model.network import Link, LostError


class ModelMembership(Membership):
    """A member's side: heartbeats, for ever."""

    def __init__(
        self, link: Link, group: Group, *, replica: str | None, session_timeout: float, heartbeat_interval: float
    ) -> None:
        self._link = link
        self._group = group
        self._replica = replica
        self._session_s = session_timeout
        self._interval_s = heartbeat_interval
        self._id: int | None = None
        self._mine: frozenset[int] = frozenset()
        self._news: deque[frozenset[int]] = deque()
        self._changed = asyncio.Event()
        self._replaced = False
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    @property
    def partitions(self) -> frozenset[int]:
        return self._mine

    async def changed(self) -> frozenset[int]:
        while not self._news:
            if self._replaced:
                raise MemberReplacedError(f"another process is replica {self._replica!r} now")
            self._changed.clear()
            await self._changed.wait()
        return self._news.popleft()

    async def confirmed(self, partition: int) -> bool:
        id_ = self._id
        if id_ is None:
            return False
        try:
            found: frozenset[int] = await self._link.ask("Heartbeat", lambda: self._group.heartbeat(id_))
        except (LostError, RefusedError):
            return False
        return partition in found

    async def leave(self) -> None:
        await self._end()
        if self._id is not None:
            id_, self._id = self._id, None
            try:
                await self._link.ask("LeaveGroup", lambda: self._group.leave(id_))
            except (LostError, RefusedError):
                return  # the session's end does it

    async def aclose(self) -> None:
        await self._end()
        if self._replica is None:
            await self.leave()

    async def _end(self) -> None:
        self._beating.cancel()
        self._mine = frozenset()

    async def _beat(self) -> None:
        group, link = self._group, self._link
        while not self._replaced:
            try:
                if self._id is None:
                    self._id, mine = await link.ask("JoinGroup", lambda: group.join(self._replica, self._session_s))
                else:
                    id_ = self._id
                    mine = await link.ask("Heartbeat", lambda: group.heartbeat(id_))  # noqa: B023 - asked at once
            except LostError:
                continue
            except RefusedError as error:
                if error.code in (UNKNOWN_MEMBER, FENCED_INSTANCE):
                    self._id = None
                    self._replaced = error.code == FENCED_INSTANCE
                    self._hear(frozenset(), always=True)
            else:
                self._hear(mine)
            await asyncio.sleep(self._interval_s)

    def _hear(self, mine: frozenset[int], *, always: bool = False) -> None:
        if mine != self._mine or always:
            self._mine = mine
            self._news.append(mine)
            self._changed.set()

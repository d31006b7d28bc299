"""aiokafka's group coordinator, adapted for a membership without data. All private names used for membership are here.

`GroupCoordinator` joins, follows rebalances and sends heartbeats. It needs no fetcher, so nobody must poll a consumer.
Our subclass differs from aiokafka's:

- It never gives up. It handles the errors that aiokafka reports only to the next poll.
- It reports an expulsion and drops its partitions, so that it does not claim them back from their new owners.
- A static member that the broker does not know any more asks once more under its old id, before it joins as a new one.
  If another member has the same name by then, the broker answers FENCED_INSTANCE_ID (KIP-345). aiokafka itself would
  join under a new id and replace the other member, which would do the same, for ever.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiokafka import errors as kafka_errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.protocol.group import HeartbeatRequest

from outfitter_proto.bus.kafka.connecting.login import Login
from outfitter_proto.bus.kafka.connecting.protocol import OK, refusal
from outfitter_proto.bus.ownership import Ownership
from outfitter_proto.bus.port import BusConfigurationError, MemberReplacedError

log = logging.getLogger(__name__)

RETRY_BACKOFF_MS = 100
REBALANCE_TIMEOUT = 30.0
"""Seconds for which a rebalance waits for a living member to join again. Our members join at once."""
_TRY_AGAIN = 1.0
_FENCED_INSTANCE_ID = 82
_IMPOSSIBLE = (
    kafka_errors.InconsistentGroupProtocolError,
    kafka_errors.InvalidSessionTimeoutError,
    kafka_errors.InvalidGroupIdError,
)


def new_assignor() -> type[StickyPartitionAssignor]:
    """A new class of sticky assignor. aiokafka's stores a member's partitions on the class, so all members would share
    them."""

    class OwnStickyAssignor(StickyPartitionAssignor):  # type: ignore[misc]  # aiokafka has no types
        member_assignment = None

    return OwnStickyAssignor


class Coordination(GroupCoordinator):  # type: ignore[misc]  # aiokafka has no types
    """One member's side of the group protocol. The constructor begins to join."""

    generation: int
    member_id: str
    _group_instance_id: str | None

    def __init__(
        self,
        client: AIOKafkaClient,
        subscription: SubscriptionState,
        ownership: Ownership,
        *,
        login: Login,
        group: str,
        replica: str | None,
        session_timeout: float,
        heartbeat_interval: float,
    ) -> None:
        self._login = login
        self._ownership = ownership
        self._assignor = new_assignor()
        self._retried_id = ""  # the id under which a static member has asked once more
        super().__init__(
            client,
            subscription,
            group_id=group,
            group_instance_id=replica,
            session_timeout_ms=int(session_timeout * 1000),
            heartbeat_interval_ms=int(heartbeat_interval * 1000),
            retry_backoff_ms=RETRY_BACKOFF_MS,
            enable_auto_commit=False,
            assignors=(self._assignor,),
            max_poll_interval_ms=float("inf"),  # nobody polls
            rebalance_timeout_ms=int(REBALANCE_TIMEOUT * 1000),
        )

    def begin_to_leave(self) -> None:
        """Make `close` send LeaveGroup for a static member too."""
        self._group_instance_id = None

    async def confirmed(self) -> bool:
        """Send an additional heartbeat of this generation. It has no other effect than its result."""
        generation, node = self.generation, self.coordinator_id
        if node is None or not self._is_in_generation:
            return False
        request = HeartbeatRequest(self.group_id, generation, self.member_id)
        try:
            response = await self._client.send(node, request, group=ConnectionGroup.COORDINATION)
        except (kafka_errors.KafkaError, OSError):
            return False
        return bool(response.error_code == OK and self._is_in_generation and self.generation == generation)

    def kill(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks and return them."""
        tasks = [task for task in (self._coordination_task, self._heartbeat_task) if task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    @property
    def _is_in_generation(self) -> bool:
        """Whether the member is in a generation, with no rejoin pending or under way."""
        return self.generation > 0 and not self._rejoin_needed_fut.done() and not self._performed_join_prepare

    # --- called by aiokafka ----------------------------------------------------------------------------

    def reset_generation(self) -> None:
        """The broker does not know this member, or not in this generation."""
        former_id = self.member_id
        super().reset_generation()
        if self._closing.done():
            return
        if self._group_instance_id is not None and former_id not in ("", self._retried_id):
            self.member_id = self._retried_id = former_id
        self._assignor.member_assignment = None
        self._ownership.expel()

    def start_commit_offsets_refresh_task(self, assignment: Any) -> None:
        """Do nothing: the group has no offsets."""

    async def _on_join_complete(self, generation: int, member_id: str, protocol: str, assigned: bytes) -> None:
        await super()._on_join_complete(generation, member_id, protocol, assigned)
        self._ownership.assign(frozenset(partition for _, partition in self._subscription.assigned_partitions()))

    async def _send_req(self, request: Any) -> Any:
        response = await super()._send_req(request)
        if getattr(response, "error_code", OK) == _FENCED_INSTANCE_ID:
            self._ownership.fail(
                MemberReplacedError(
                    f"{self._login.url}: another process has joined group {self.group_id!r} as replica "
                    f"{self._group_instance_id!r}, and is that replica now: give each running replica a name of its own"
                )
            )
        return response

    async def _push_error_to_user(self, exc: Exception) -> None:
        """Handle a permanent error. It is final only before the first assignment."""
        if isinstance(exc, kafka_errors.GroupAuthorizationFailedError) and not self._joined_once:
            self._ownership.fail(refusal(self._login, exc.errno, operation="Read", name=self.group_id))
        elif isinstance(exc, _IMPOSSIBLE):
            self._ownership.fail(
                BusConfigurationError(
                    f"{self._login.url}: group {self.group_id!r} refuses this member (session "
                    f"{self._session_timeout_ms / 1000:g} s): {exc!r}; the broker's group.min.session.timeout.ms and "
                    "group.max.session.timeout.ms bound the session, and all members must use the same assignor"
                )
            )
        if self._ownership.error is not None:
            await asyncio.wait([self._closing])
            return
        log.debug("group %s: %r; trying again", self.group_id, exc)
        await asyncio.wait([self._closing], timeout=_TRY_AGAIN)
        self.request_rejoin()  # also the only way to restart failed heartbeats

    async def _coordination_routine(self) -> None:
        """As aiokafka's, but restarted if it ends unexpectedly, which nobody would notice."""
        while not self._closing.done():
            try:
                await super()._coordination_routine()
            except (
                Exception,
                asyncio.CancelledError,
            ) as error:  # also whatever another member's bytes can do to aiokafka
                # It takes the end of a heartbeat task that it has cancelled for its own end (as consumer.stop() does).
                task = asyncio.current_task()
                if self._closing.done() or (task is not None and task.cancelling()):
                    raise
                await self._push_error_to_user(error if isinstance(error, Exception) else RuntimeError("cancelled"))

    @property
    def _joined_once(self) -> bool:
        return self._subscription.subscription is not None and self._subscription.subscription.assignment is not None

"""A member of a consumer group on Kafka: its own connections, and the group protocol on them (`coordination`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import anyio
from aiokafka import errors as kafka_errors
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.subscription_state import SubscriptionState

from outfitter_proto.bus.kafka.connecting import log_throttle
from outfitter_proto.bus.kafka.connecting.connection import Connector
from outfitter_proto.bus.kafka.connecting.last_answers import LastAnswers
from outfitter_proto.bus.kafka.coordination import RETRY_BACKOFF_MS, Coordination
from outfitter_proto.bus.ownership import OwnedMembership
from outfitter_proto.bus.patience import Patience
from outfitter_proto.bus.port import BusError, BusUnavailableError

log = logging.getLogger(__name__)

REQUEST_TIMEOUT = 4.0
"""Time limit of one request to the coordinator in seconds. It exceeds Kafka's group.initial.rebalance.delay.ms of 3 s,
which delays the first request of a new group. A member that repeats its request stays the same member."""


class KafkaMembership(OwnedMembership):
    """See `Membership`."""

    def __init__(self, connector: Connector, group: str) -> None:
        super().__init__()
        self._login = connector.login
        self._group = group
        self._coordination: Coordination | None = None
        self._closed = False
        self._release = log_throttle.quieten()
        self._client = AIOKafkaClient(
            bootstrap_servers=[str(node) for node in connector.login.nodes],
            client_id=group,
            request_timeout_ms=int(REQUEST_TIMEOUT * 1000),
            retry_backoff_ms=RETRY_BACKOFF_MS,
        )
        self._patience = Patience(connector.patience)
        connector.attach(self._client, self._patience)
        self._answers = LastAnswers(connector, self._client)

    async def start(
        self, topic: str, *, replica: str | None, session_timeout: float, heartbeat_interval: float
    ) -> None:
        """Connect and begin to join.

        Raises:
            BusError: no broker answers or accepts our log-in.
        """
        try:
            with self._patience.limit(2 * REQUEST_TIMEOUT):
                await self._client.bootstrap()
                await self._client.set_topics([topic])
        except (kafka_errors.KafkaError, OSError, TimeoutError) as error:
            raise BusUnavailableError(f"{self._login.url}: cannot join group {self._group!r}: {error!r}") from error
        subscription = SubscriptionState()
        subscription.subscribe({topic})
        self._coordination = Coordination(
            self._client,
            subscription,
            self._ownership,
            login=self._login,
            group=self._group,
            replica=replica,
            session_timeout=session_timeout,
            heartbeat_interval=heartbeat_interval,
        )

    def on_trouble(self, note: Callable[[BusError | None], object]) -> None:
        """See `Membership.on_trouble`."""
        name = f"{self._login.url}: group {self._group!r}"
        self._answers.listen(
            lambda why: note(BusUnavailableError(f"{name} does not answer: {why}") if why is not None else None)
        )

    async def _ask_group(self, partition: int) -> bool:
        if self._coordination is None or partition not in self.partitions:
            return False
        with anyio.move_on_after(REQUEST_TIMEOUT + 1):
            return await self._coordination.confirmed()
        return False

    async def leave(self) -> None:
        """See `Membership.leave`."""
        if self._coordination is not None and not self._closed:
            self._coordination.begin_to_leave()
        await self.aclose()

    async def aclose(self) -> None:
        """See `Membership.aclose`."""
        if self._closed:
            return
        self._closed = True
        self._ownership.assign(frozenset())
        try:
            if self._coordination is not None and not await self._ended(
                self._coordination.close(), REQUEST_TIMEOUT + 1
            ):
                await asyncio.wait(self._coordination.kill(), timeout=1)
            await self._ended(self._client.close(), 1)
        finally:
            self._release()

    async def _ended(self, closing: Awaitable[None], within: float) -> bool:
        """Whether `closing` ended in time. It runs as a task, because it may raise CancelledError by itself."""
        task = asyncio.ensure_future(closing)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task], timeout=within)
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=1)
                return False
        if not task.cancelled() and task.exception() is not None:
            log.debug("group %s: cannot close in an orderly way: %r", self._group, task.exception())
        return True

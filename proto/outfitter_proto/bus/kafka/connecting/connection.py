"""One connection to a broker that ends in being let in, or in an error which says why not.

aiokafka says "unable to bootstrap" for all that can go wrong, takes a refused OAUTHBEARER token for accepted, and shows
passwords to whoever logs its debug lines. Here is its connection with a log-in of our own, and a `Connector` that every
client of ours gets its connections from, aiokafka's own clients included. Nothing in aiokafka itself is changed.

Log-in: KIP-43 and KIP-152 (SASL in Kafka's requests), KIP-368 (sessions that end), RFC 7628 (refused tokens).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import errors as kafka_errors
from aiokafka.client import ConnectionGroup
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.protocol.admin import SaslHandShakeRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest as AnyMetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.types import Int32
from aiokafka.util import wait_for

from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka.connecting import diagnosis
from outfitter_proto.bus.kafka.connecting.broker_directory import BrokerDirectory
from outfitter_proto.bus.kafka.connecting.diagnosis import LoginRefusedError, ended
from outfitter_proto.bus.kafka.connecting.login import Login
from outfitter_proto.bus.kafka.connecting.protocol import MetadataRequest, SaslAuthenticateRequest, pieces
from outfitter_proto.bus.port import BusAuthenticationError, BusError, BusUnavailableError

log = logging.getLogger(__name__)

HASTE_S = 0.05
"""Seconds that it takes at least to be told that a broker is not worth asking now: whoever tries again at once, as
aiokafka does, must not be kept busy by it."""
SESSION_SHARE = 0.85
"""How much of its session a connection is used for, as in Kafka's own clients: what is on its way ends within it."""


_NEEDS_NOBODY_ELSE = (MetadataRequest, AnyMetadataRequest, FindCoordinatorRequest, OffsetRequest, FetchRequest)


class Connection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's connection, with a log-in that hears every refusal."""

    stale_at = math.inf
    """When the log-in is to be repeated, which takes a new connection; monotonic seconds."""

    hung: Callable[[], None] | None = None
    """What to call when the broker did not answer a question in time for which it needs nobody else."""

    def send(self, request: Any, expect_response: bool = True) -> Any:
        """See aiokafka. A write waits for other brokers: only what is none tells of this one."""
        if isinstance(request, ProduceRequest) and expect_response:
            return self._produce(request)
        answer = super().send(request, expect_response)
        return self._watch(answer) if isinstance(request, _NEEDS_NOBODY_ELSE) else answer

    def _produce(self, request: ProduceRequest) -> Awaitable[Any]:
        """What aiokafka's `send` does with a request whose answer is waited for, without copying its records."""
        if self._writer is not None and self._writer.is_closing():
            # its transport is gone, and some of them take no lines then (gh-136234)
            self.close(reason=CloseReason.CONNECTION_BROKEN)
        if self._writer is None:
            raise kafka_errors.KafkaConnectionError(f"No connection to broker at {self.host}:{self.port}")
        prepared, number = request.prepare(self._versions), self._next_correlation_id()
        header = prepared.build_request_header(correlation_id=number, client_id=self._client_id)
        parts = [header.encode(), *pieces(prepared)]
        try:
            self._writer.writelines([Int32.encode(sum(map(len, parts))), *parts])
        except OSError as error:
            self.close(reason=CloseReason.CONNECTION_BROKEN)
            raise kafka_errors.KafkaConnectionError(f"Connection at {self.host}:{self.port} broken: {error}") from error
        answer = asyncio.get_running_loop().create_future()
        self._requests.append((number, prepared, answer))
        awaited: Awaitable[Any] = wait_for(answer, self._request_timeout)
        return awaited

    async def _watch(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except TimeoutError:
            if self.hung is not None:
                self.hung()
            raise

    @property
    def stale(self) -> bool:
        return time.monotonic() > self.stale_at

    @property
    def idle(self) -> bool:
        """Whether no answer is being waited for."""
        return not self._requests

    def close(self, *reasons: Any, **named: Any) -> asyncio.Future[None] | None:
        """aiokafka's, at once: TLS's farewells are not waited for, since all answers are in or given up."""
        writer = self._writer
        closed: asyncio.Future[None] | None = super().close(*reasons, **named)
        if writer is not None:
            writer.transport.abort()
        return closed

    async def _do_sasl_handshake(self) -> None:
        """Log in; called by `connect`.

        Raises:
            LoginRefusedError: the broker does not take this mechanism, name, password or token, and what it says.
        """
        mechanism: str = self._sasl_mechanism
        offered = await self.send(SaslHandShakeRequest(mechanism))
        if offered.error_code:
            raise LoginRefusedError.of_mechanism(mechanism, offered.error_code, offered.enabled_mechanisms)
        ways = {"PLAIN": self.authenticator_plain, "OAUTHBEARER": self.authenticator_oauth}
        authenticator = ways[mechanism]() if mechanism in ways else self.authenticator_scram()
        steps, heard, lifetime = 0, None, 0
        while (step := await _next(authenticator, heard)) is not None:
            steps += 1
            answer = await self.send(SaslAuthenticateRequest(step[0]))
            if answer.error_code:
                raise LoginRefusedError.of_credentials(mechanism, steps, answer.error_message)
            heard, lifetime = answer.sasl_auth_bytes, getattr(answer, "session_lifetime_ms", 0)
        if mechanism == "OAUTHBEARER" and heard:  # a challenge where there should be none is RFC 7628's "no"
            raise LoginRefusedError.of_credentials(mechanism, steps, bytes(heard).decode(errors="replace"))
        if lifetime > 0:
            self.stale_at = time.monotonic() + SESSION_SHARE * lifetime / 1000


async def _next(authenticator: Any, heard: bytes | None) -> tuple[bytes, bool] | None:
    """The next thing to say. SCRAM proves both sides: a broker that does not know the password cannot answer."""
    try:
        step: tuple[bytes, bool] | None = await authenticator.step(heard)
    except (ValueError, KeyError, AssertionError) as error:
        raise LoginRefusedError(f"its part of the log-in is wrong: {error}") from error
    return step


class Connector:
    """Makes all of one bus's connections, and counts those that were refused."""

    def __init__(self, access: Login) -> None:
        if access.mechanism in ("PLAIN", "OAUTHBEARER") and not access.encrypted:
            log.warning("%s: the password or token is sent in the clear: use SASL_SSL", access.url)
        self.access = access
        self.directory = BrokerDirectory(access.nodes)
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.refusals = 0
        """Connections that came to nothing because one side did not believe the other."""
        self.trouble: BusError | None = None
        """Why the last try came to nothing; None after a success."""

    async def connect(
        self, node: Node, *, timeout: float, client_id: str = "outfitter", on_close: Callable[..., Any] | None = None
    ) -> Connection:
        """A connection on which we are let in.

        Raises:
            BusUnavailableError: nobody there, or no answer.
            BusAuthenticationError: one side does not believe the other, or they speak past each other.
            BusConfigurationError: a file with a secret cannot be read, or the broker is too old.
        """
        try:
            if self.directory.doubtful(node):
                await asyncio.sleep(HASTE_S)
                raise BusUnavailableError(f"{self.access.url}: the broker at {node} did not answer a moment ago")
            connection = await self._connect(node, timeout, client_id, on_close)
        except BusError as error:
            self.trouble = error
            if isinstance(error, BusAuthenticationError):
                self.refusals += 1
            raise
        self.trouble = None
        return connection

    async def _connect(
        self, node: Node, timeout: float, client_id: str, on_close: Callable[..., Any] | None
    ) -> Connection:
        access = self.access
        options = access.options()
        connection = Connection(
            node.host,
            node.port,
            client_id=client_id,
            request_timeout_ms=int(timeout * 1000),
            **options,
        )
        try:
            await connection.connect()
            if access.mechanism is None:
                # A listener that wants a log-in lets anybody ask for versions, and hangs up at the first real question.
                await connection.send(MetadataRequest([]))
        except diagnosis.FAILURES as error:
            await ended(connection)
            if isinstance(error, TimeoutError):
                self._hung(node)
            raise await diagnosis.verdict(access, node, error, timeout=timeout) from error
        except BaseException:
            await ended(connection)
            raise
        connection._on_close_cb = on_close
        connection.hung = lambda: self._hung(node)
        self._open.add(connection)
        return connection

    def _hung(self, node: Node) -> None:
        """One question that it leaves unanswered speaks for the broker: nobody need wait for the same on his own."""
        self.directory.doubt(node)
        for connection in list(self._open):
            if (connection.host, connection.port) == node:
                connection.close()

    def adopt(self, client: Any) -> None:
        """Have one of aiokafka's clients (`AIOKafkaClient`, not started) take its connections from here.

        Its `bootstrap` then raises what `connect` does, instead of one error for everything.
        """
        ours = _Connections(self, client)
        client.bootstrap = ours.bootstrap
        client._get_conn = ours.get


class _Connections:
    """The connections of one of aiokafka's clients."""

    def __init__(self, connector: Connector, client: Any) -> None:
        self._connector = connector
        self._client = client
        self._timeout = client._request_timeout_ms / 1000
        self._connecting: dict[Any, asyncio.Lock] = {}

    async def bootstrap(self) -> None:
        """Learn of the brokers from the first one that answers."""
        client, errors = self._client, []
        for node in self._connector.directory.order():
            try:
                connection = await self._connector.connect(node, timeout=self._timeout, client_id=client._client_id)
            except BusError as error:
                errors.append(error)
                continue
            try:
                client.cluster.update_metadata(await connection.send(AnyMetadataRequest([])))
            except diagnosis.FAILURES as error:
                errors.append(diagnosis.unavailable(self._connector.access, node, error, timeout=self._timeout))
                continue
            finally:
                await ended(connection)
            if client._sync_task is None:
                client._sync_task = asyncio.create_task(client._md_synchronizer())
            return
        raise errors[0]

    async def get(self, node_id: Any, *, group: Any = ConnectionGroup.DEFAULT, **_: Any) -> Connection | None:
        """aiokafka's `_get_conn`: None after a failure, which it takes for a reason to ask for metadata anew.

        One broker that does not answer keeps nobody from the others, as it would under aiokafka's one lock.
        """
        key = (node_id, group)
        if (known := self._usable(key)) is not None:
            return known
        async with self._connecting.setdefault(key, asyncio.Lock()):
            if (known := self._usable(key)) is not None:
                return known
            broker = self._client.cluster.broker_metadata(node_id)
            try:
                if broker is None:
                    raise kafka_errors.StaleMetadata(f"no broker {node_id} in the metadata")
                made = await self._connector.connect(
                    Node(broker.host, broker.port),
                    timeout=self._timeout,
                    client_id=self._client._client_id,
                    on_close=self._client._on_connection_closed,
                )
            except (BusError, kafka_errors.StaleMetadata) as error:
                log.debug("no connection to broker %s: %s", node_id, error)  # whoever needs it raises, and says so
                self._client.force_metadata_update()
                return None
            self._client._conns[key] = made
            return made

    def _usable(self, key: Any) -> Connection | None:
        connection: Connection | None = self._client._conns.get(key)
        if connection is None or (connection.connected() and not (connection.stale and connection.idle)):
            return connection
        del self._client._conns[key]
        connection.close()
        return None

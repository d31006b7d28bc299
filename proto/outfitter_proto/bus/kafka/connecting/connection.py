"""Connections to brokers that either log in or raise an error with the cause.

aiokafka raises "unable to bootstrap" for every failure, treats a refused OAUTHBEARER token as accepted, and writes
passwords to its debug log. Here are its connection with our own log-in, and a `Connector` that makes the connections of
all clients, also of aiokafka's own. aiokafka itself is not changed.

Log-in: KIP-43 and KIP-152 (SASL in Kafka's requests), KIP-368 (sessions that end), RFC 7628 (refused tokens).
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable
from io import BytesIO
from typing import Any, TypeVar

import anyio
from aiokafka import errors as kafka_errors
from aiokafka.client import ConnectionGroup
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.protocol.admin import SaslHandShakeRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest as AnyMetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.types import Int32

from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka.connecting import answers, diagnosis
from outfitter_proto.bus.kafka.connecting.answers import UnusableAnswerError
from outfitter_proto.bus.kafka.connecting.broker_directory import BrokerDirectory
from outfitter_proto.bus.kafka.connecting.diagnosis import LoginRefusedError, ended
from outfitter_proto.bus.kafka.connecting.host_names import look_up
from outfitter_proto.bus.kafka.connecting.login import Login
from outfitter_proto.bus.kafka.connecting.protocol import (
    ApiVersionsRequest,
    MetadataRequest,
    SaslAuthenticateRequest,
    pieces,
)
from outfitter_proto.bus.patience import BusPatience, Patience
from outfitter_proto.bus.port import BusAuthenticationError, BusError, BusUnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")

AVOIDED_PAUSE_S = 0.05
"""Seconds until the error for an avoided broker. aiokafka tries again at once, and would otherwise loop busily."""
HEAD_START_S = 0.3
"""Seconds after which the next address is tried beside those that do not answer yet (as in RFC 8305)."""
IDLE_S = 5.0
"""Seconds without an answer after which an idle connection is asked whether it works before it is used. Firewalls and
load balancers forget idle connections without telling anybody, some after seconds."""
ASKED_WITHIN_S = 1.0
"""Time limit of that answer in seconds."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS = 20_000
SESSION_SHARE = 0.85
"""The share of its session for which a connection is used, as in Kafka's own clients. Open requests end in the rest."""

_NEEDS_NO_OTHER_BROKER = (MetadataRequest, AnyMetadataRequest, FindCoordinatorRequest, OffsetRequest, FetchRequest)


class Connection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's connection, with a log-in that notices every refusal, answers that are checked, and obedience to
    quotas: a throttled connection sends nothing until the broker reads again, and its requests have longer to be
    answered (KIP-219)."""

    stale_at = math.inf
    """When the connection must be replaced to log in again; monotonic seconds."""

    hung: Callable[[], None] | None = None
    """Called when the broker does not answer in time a request that needs no other broker."""

    forgotten: Callable[[], None] | None = None
    """Called when this connection was idle and does not work any more."""

    def __init__(self, *args: Any, patience: Patience | None = None, **options: Any) -> None:
        """`patience`: the client's, which stands still as well while this connection is throttled."""
        super().__init__(*args, **options)
        self._patience = Patience(patience)
        self._turn = asyncio.Lock()
        self._unsent = 0

    def send(self, request: Any, expect_response: bool = True) -> Awaitable[Any]:  # noqa: ARG002  (aiokafka's argument)
        """See aiokafka. Time-outs of writes do not count against this broker, because writes wait for other brokers."""
        self._check_open()
        return self._send(request)

    async def _send(self, request: Any) -> Any:
        self._unsent += 1
        try:
            async with self._turn:
                await self._patience.held_back()
                answer = self._write(request)
        finally:
            self._unsent -= 1
        try:
            with self._patience.limit(self._request_timeout):
                return await answer
        except TimeoutError:
            if self.hung is not None and isinstance(request, _NEEDS_NO_OTHER_BROKER):
                self.hung()
            raise

    def _check_open(self) -> None:
        if self._writer is not None and self._writer.is_closing():
            # its transport is closed, and some transports then refuse writes with a RuntimeError (uvloop, gh-136234)
            self.close(reason=CloseReason.CONNECTION_BROKEN)
        if self._writer is None:
            raise kafka_errors.KafkaConnectionError(f"No connection to broker at {self.host}:{self.port}")

    def _write(self, request: Any) -> asyncio.Future[Any]:
        """As aiokafka's `send`, but without copying the records."""
        self._check_open()
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
        return answer

    def _handle_frame(self, frame: bytes) -> None:
        """As aiokafka's, for any bytes: an unusable answer ends the connection, and its request gets the reason."""
        if not self._requests:
            self.close(reason=CloseReason.OUT_OF_SYNC)
            return
        number, request, answer = self._requests[0]
        try:
            content = self._answer(number, request, BytesIO(frame))
        except UnusableAnswerError as error:
            log.debug("the broker at %s:%s: %s", self.host, self.port, error)
            if not answer.done():
                answer.set_exception(error)
            self.close(reason=CloseReason.OUT_OF_SYNC)
            return
        self._last_action = time.monotonic()
        self._requests.popleft()
        if not answer.done():
            answer.set_result(content)

    def _answer(self, number: int, request: Any, data: BytesIO) -> Any:
        try:
            answered = request.parse_response_header(data).correlation_id
        except (ValueError, IndexError, struct.error) as error:
            raise UnusableAnswerError(f"its answer has no header: {error}") from error
        if answered != number:
            raise UnusableAnswerError(f"it answers request {answered}, and {number} is the next one")
        content = answers.decoded(request, data)
        seconds = answers.throttled_s(content)
        if seconds > 0:
            self._patience.throttle(seconds)
        return content

    @classmethod
    def _on_read_task_error(cls, self_ref: Any, read_task: asyncio.Task[None]) -> None:
        """As aiokafka's, but without a traceback in the log for bytes that are no answer."""
        self = self_ref()
        if not read_task.cancelled() and (error := read_task.exception()) is not None and self is not None:
            self.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)

    async def _do_version_lookup(self) -> None:
        """Learn which versions the broker speaks, of those that have the fields that we read."""
        answer = await self.send(ApiVersionsRequest())
        if answer.error_code:
            raise kafka_errors.IncompatibleBrokerVersion(f"ApiVersions: error {answer.error_code}")
        self._versions = {
            key: (max(low, answers.LEAST_VERSIONS.get(key, 0)), high)
            for key, low, high in answer.api_versions
            if high >= answers.LEAST_VERSIONS.get(key, 0)
        }

    async def works(self) -> bool:
        """Whether the connection can be used. One that was idle is asked; one that does not answer is closed."""
        if not self.connected():
            return False
        if not self.is_rested:
            return True
        try:
            with self._patience.limit(ASKED_WITHIN_S):
                await self.send(ApiVersionsRequest())
        except (kafka_errors.KafkaError, OSError):  # TimeoutError is an OSError
            self.close(reason=CloseReason.IDLE_DROP)
            if self.forgotten is not None:
                self.forgotten()
        return bool(self.connected())

    @property
    def is_rested(self) -> bool:
        """Whether it has been idle for so long that it may be forgotten on the way."""
        return self.idle and time.monotonic() - self._last_action > IDLE_S

    def keep_alive(self) -> None:
        """Let the kernel ask the other side while nothing is sent, and give up what is not acknowledged."""
        transport_socket = self._writer.get_extra_info("socket") if self._writer is not None else None
        if transport_socket is not None:
            transport_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (*_KEEP_ALIVE, (socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)):
                transport_socket.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def stale(self) -> bool:
        return time.monotonic() > self.stale_at

    @property
    def idle(self) -> bool:
        """Whether no request is open or waits to be sent."""
        return not self._requests and not self._unsent

    def close(self, *reasons: Any, **named: Any) -> asyncio.Future[None] | None:
        """As aiokafka's, but without waiting for TLS to close, because no answer is needed any more."""
        writer = self._writer
        closed: asyncio.Future[None] | None = super().close(*reasons, **named)
        if writer is not None:
            writer.transport.abort()
            self._patience.release()
        return closed

    async def _do_sasl_handshake(self) -> None:
        """Log in; called by `connect`.

        Raises:
            LoginRefusedError: the broker refuses this mechanism, name, password or token, with its message.
        """
        mechanism: str = self._sasl_mechanism
        offered = await self.send(SaslHandShakeRequest(mechanism))
        if offered.error_code:
            raise LoginRefusedError.of_mechanism(mechanism, offered.error_code, offered.enabled_mechanisms)
        factories = {"PLAIN": self.authenticator_plain, "OAUTHBEARER": self.authenticator_oauth}
        factory: Callable[[], Any] = factories.get(mechanism) or self.authenticator_scram
        authenticator = factory()
        steps, challenge, lifetime = 0, None, 0
        while (step := await _next(authenticator, challenge)) is not None:
            steps += 1
            answer = await self.send(SaslAuthenticateRequest(step[0]))
            if answer.error_code:
                raise LoginRefusedError.of_credentials(mechanism, steps, answer.error_message)
            challenge, lifetime = answer.sasl_auth_bytes, getattr(answer, "session_lifetime_ms", 0)
        if mechanism == "OAUTHBEARER" and challenge:  # in RFC 7628 a challenge means a refusal
            raise LoginRefusedError.of_credentials(mechanism, steps, bytes(challenge).decode(errors="replace"))
        if lifetime > 0:
            self.stale_at = time.monotonic() + SESSION_SHARE * lifetime / 1000


async def _next(authenticator: Any, challenge: bytes | None) -> tuple[bytes, bool] | None:
    """The client's next message after the broker's `challenge`. SCRAM authenticates both sides: to answer, the broker
    must know the password."""
    try:
        step: tuple[bytes, bool] | None = await authenticator.step(challenge)
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise LoginRefusedError(f"its part of the log-in is wrong: {error}") from error
    return step


class Connector:
    """Makes all connections of one bus, and counts refused ones."""

    def __init__(self, login: Login, client: str = "outfitter") -> None:
        """`client`: the client id of connections that have none of their own."""
        if login.mechanism in ("PLAIN", "OAUTHBEARER") and not login.encrypted:
            log.warning("%s: the password or token is sent in the clear: use SASL_SSL", login.url)
        self.login = login
        self._client = client
        self.directory = BrokerDirectory(login.nodes)
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.refusals = 0
        """The number of connections that failed to authenticate."""
        self.trouble: BusError | None = None
        """The error of the last attempt; None after a success."""
        self.patience = BusPatience(login.url)
        """Stands still while a broker holds back one of these connections."""

    async def connect(
        self,
        node: Node,
        *,
        timeout: float,
        client_id: str | None = None,
        on_close: Callable[..., Any] | None = None,
        patience: Patience | None = None,
        despite_doubt: bool = False,
    ) -> Connection:
        """A connection that has logged in. A doubtful broker is not tried unless `despite_doubt`.

        Raises:
            BusUnavailableError: no broker there, or no answer.
            BusAuthenticationError: one side failed to authenticate, or the protocols differ.
            BusConfigurationError: a file with a secret cannot be read, or the broker is too old.
        """
        try:
            if not despite_doubt and self.directory.doubtful(node):
                await asyncio.sleep(AVOIDED_PAUSE_S)
                raise BusUnavailableError(f"{diagnosis.where(self.login, node)} did not answer a moment ago")
            connection = await self._connect(node, timeout, client_id or self._client, on_close, patience)
        except BusError as error:
            self.trouble = error
            if isinstance(error, BusAuthenticationError):
                self.refusals += 1
            raise
        self.trouble = None
        return connection

    async def _connect(
        self,
        node: Node,
        timeout: float,
        client_id: str,
        on_close: Callable[..., Any] | None,
        patience: Patience | None,
    ) -> Connection:
        login = self.login
        options = login.options()
        connection = Connection(
            node.host,
            node.port,
            client_id=client_id,
            request_timeout_ms=int(timeout * 1000),
            patience=patience or self.patience,
            **options,
        )
        try:
            await look_up(node, within=timeout)
            await connection.connect()
            connection.keep_alive()
            if login.mechanism is None:
                # A listener that requires a log-in answers a request for versions, and hangs up at the first real one.
                await connection.send(MetadataRequest([]))
        except diagnosis.FAILURES as error:
            await ended(connection)
            if isinstance(error, TimeoutError):
                self._hung(node)
            raise await diagnosis.explained(login, node, error, timeout=timeout) from error
        except BaseException:
            await ended(connection)
            raise
        connection._on_close_cb = on_close
        connection.hung = lambda: self._hung(node)
        connection.forgotten = self._forgotten
        self._open.add(connection)
        return connection

    def _hung(self, node: Node) -> None:
        """Note a broker that left a request unanswered, so that other clients need not wait for it."""
        self.directory.doubt(node)
        for connection in list(self._open):
            if (connection.host, connection.port) == node:
                connection.close()

    def _forgotten(self) -> None:
        """Close all connections that were idle for long: whatever forgot one of them on the way forgets others, too."""
        for connection in list(self._open):
            if connection.is_rested:
                connection.close()

    async def from_any(self, ask: Callable[[Node], Awaitable[T]]) -> T:
        """The result of `ask` for the first address that gives one. A failure gives way to the next address at once,
        and silence after `HEAD_START_S`, so that silent addresses cost no time-out each.

        Raises:
            NobodyError: all failed.
        """
        errors: list[BusError] = []
        for left in self.directory.choices():
            running: dict[asyncio.Task[T], Node] = {}
            try:
                while left or running:
                    if left:
                        node = left.pop(0)
                        running[asyncio.create_task(_awaited(ask(node)))] = node
                    head_start = HEAD_START_S if left else None
                    done, _ = await asyncio.wait(running, timeout=head_start, return_when=asyncio.FIRST_COMPLETED)
                    for attempt in done:
                        node = running.pop(attempt)
                        error = attempt.exception()
                        if error is None:
                            self.directory.answered(node, before=running.values())
                            return attempt.result()
                        if not isinstance(error, BusError):
                            raise error
                        errors.append(error)
            finally:
                await _cancelled(running)
        raise NobodyError(errors)

    def attach(self, client: Any, patience: Patience | None = None) -> None:
        """Make one of aiokafka's clients (`AIOKafkaClient`, not started) use connections of this connector.

        Its `bootstrap` then raises the errors of `connect`, instead of the same error for every failure. `patience`:
        the client's, which stands still while one of its connections is throttled.
        """
        ours = _Connections(self, client, patience)
        client.bootstrap = ours.bootstrap
        client._metadata_update = ours.update
        client._get_conn = ours.get


class NobodyError(Exception):
    """No address answers. `errors`: why, at least one, in the order in which they failed."""

    def __init__(self, errors: list[BusError]) -> None:
        super().__init__(errors)
        self.errors = errors


async def _awaited(answer: Awaitable[T]) -> T:
    return await answer


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have closed what they opened."""
    for task in tasks:
        task.cancel()
    if tasks := list(tasks):
        with anyio.CancelScope(shield=True):
            await asyncio.wait(tasks)


class _Connections:
    """The connections of one of aiokafka's clients."""

    def __init__(self, connector: Connector, client: Any, patience: Patience | None) -> None:
        self._connector = connector
        self._patience = patience
        self._client = client
        self._timeout = client._request_timeout_ms / 1000
        self._connecting: dict[Any, asyncio.Lock] = {}
        self._known_update = client._metadata_update

    async def bootstrap(self) -> None:
        """Get the brokers from the first address that answers."""
        client = self._client
        try:
            client.cluster.update_metadata(await self._metadata(AnyMetadataRequest([])))
        except NobodyError as nobody:
            raise nobody.errors[0] from nobody
        if client._sync_task is None:
            client._sync_task = asyncio.create_task(client._md_synchronizer())

    async def update(self, metadata: Any, topics: Collection[str]) -> bool:
        """aiokafka's `_metadata_update`. If nobody answers at the addresses that it knows, it asks all others, because
        all brokers may have new addresses by now."""
        if not await self._known_update(metadata, topics):
            try:
                answer = await self._metadata(AnyMetadataRequest(list(topics) or None))
            except NobodyError:
                return False
            if not answer.brokers:
                return False
            metadata.update_metadata(answer)
        return True

    async def _metadata(self, request: AnyMetadataRequest) -> Any:
        """The answer to `request` on a connection for it alone, from the first address that gives one."""

        async def ask(node: Node) -> Any:
            connection = await self._connector.connect(
                node,
                timeout=self._timeout,
                client_id=self._client._client_id,
                patience=self._patience,
                despite_doubt=True,
            )
            try:
                return await connection.send(request)
            except diagnosis.FAILURES as error:
                raise diagnosis.unavailable(self._connector.login, node, error, timeout=self._timeout) from error
            finally:
                await ended(connection)

        answer = await self._connector.from_any(ask)
        self._connector.directory.learn({number: Node(host, port) for number, host, port, *_ in answer.brokers})
        return answer

    async def get(self, node_id: Any, *, group: Any = ConnectionGroup.DEFAULT, **_: Any) -> Connection | None:
        """aiokafka's `_get_conn`: None after a failure, which makes aiokafka refresh its metadata.

        Without aiokafka's single lock, a broker that does not answer does not block connections to the others.
        """
        key = (node_id, group)
        if (usable := await self._usable(key)) is not None:
            return usable
        async with self._connecting.setdefault(key, asyncio.Lock()):
            if (usable := await self._usable(key)) is not None:
                return usable
            broker = self._client.cluster.broker_metadata(node_id)
            try:
                if broker is None:
                    raise kafka_errors.StaleMetadata(f"no broker {node_id} in the metadata")
                connection = await self._connector.connect(
                    self._connector.directory.address(node_id) or Node(broker.host, broker.port),
                    timeout=self._timeout,
                    client_id=self._client._client_id,
                    on_close=self._client._on_connection_closed,
                    patience=self._patience,
                )
            except (BusError, kafka_errors.StaleMetadata) as error:
                log.debug("no connection to broker %s: %s", node_id, error)  # the caller raises its own error
                self._client.force_metadata_update()
                return None
            self._client._conns[key] = connection
            return connection

    async def _usable(self, key: Any) -> Connection | None:
        connection: Connection | None = self._client._conns.get(key)
        if connection is None:
            return None
        if not (connection.stale and connection.idle) and await connection.works():
            return connection
        if self._client._conns.get(key) is connection:
            del self._client._conns[key]
        connection.close()
        return None

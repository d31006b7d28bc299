"""Limits the number and the silence of a listener's connections, so that other clients cannot block a probe.

Our own accept loop accepts one connection at a time. At the limit it closes the connection that has been silent
longest. A probe sends its request at once, so it gets its answer before new connections can replace it. What waits for
readers is bounded as well: see unread.py.

A connection has one request at a time. Who sends the next before the answer gets that answer, and then the end of the
connection, so that few connections cannot have as much work done as thousands. Neither Prometheus nor probes do that.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from msgspec import Struct

from outfitter_proto.support.descriptors import LACKING
from outfitter_service.http.tls import Certificate
from outfitter_service.http.unread import Unread, bound
from outfitter_service.runtime.liveness.descriptors import for_probes

MOST = 64
"""Most open connections."""
HEAD_S = 5.0
"""Time limit for the head of the first request."""
KEEP_ALIVE_S = 15.0
"""Time limit for reading an answer and sending the next request."""
CHECK_EVERY_S = 1.0
"""Seconds between two searches for silent connections."""
BACKLOG = 128
"""Connections that the kernel holds until we accept them."""
RETRY_S = 0.1
"""Seconds until we try again after a failed accept."""
MOST_HANDSHAKES = 64
"""Most unfinished TLS handshakes. One more ends the oldest."""
SHUTDOWN_S = 1.0
"""Time limit for the end of a TLS connection."""


class _HttpConnection(Struct):
    """One connection.

    `silent_since`: when it was opened or its last request was answered; None during an answer. `silence_limit_s`: how
    long it may be silent from then on: `HEAD_S` before the first request, `KEEP_ALIVE_S` between requests.
    """

    transport: asyncio.Transport
    silent_since: float | None
    silence_limit_s: float = HEAD_S

    def begin_answer(self) -> None:
        self.silent_since = None

    def end_answer(self, now: float) -> None:
        self.silent_since, self.silence_limit_s = now, KEEP_ALIVE_S

    def is_silent_too_long(self, now: float) -> bool:
        return self.silent_since is not None and now - self.silent_since >= self.silence_limit_s


class Connections:
    """The open connections of one server. `unread`: what waits for their readers."""

    def __init__(self, clock: Callable[[], float], *, most: int = MOST, tls: Certificate | None = None) -> None:
        """`clock`: in seconds. `most`: the most open connections. `tls`: None for plain HTTP."""
        self._clock = clock
        self._most = most
        self._tls = tls
        self.unread = Unread()
        self._handshakes: dict[socket.socket, anyio.CancelScope] = {}
        self._open: dict[asyncio.BaseProtocol, _HttpConnection] = {}

    def __len__(self) -> int:
        """The number of open connections that are not closing."""
        self._remove_closed()
        return len(self._open)

    def _remove_closed(self) -> None:
        self._open = {
            protocol: connection for protocol, connection in self._open.items() if not connection.transport.is_closing()
        }

    async def accept(self, listener: socket.socket, server: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections of `listener` one by one, until cancelled."""
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as handshakes:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listener)
                except OSError as error:  # the client has gone, or no descriptor is left
                    reserved = _accept_from_reserve(listener) if error.errno in LACKING else None
                    if reserved is None:
                        if error.errno in LACKING:
                            self._make_room()
                        await anyio.sleep(RETRY_S)
                        continue
                    accepted = reserved
                if self._tls is None:
                    with anyio.CancelScope(shield=True):  # cancelled, uvloop would close it in the middle of an answer
                        self._add(*await loop.connect_accepted_socket(server, accepted))
                else:
                    if len(self._handshakes) >= MOST_HANDSHAKES:
                        self._handshakes.pop(next(iter(self._handshakes))).cancel()
                    scope = self._handshakes[accepted] = anyio.CancelScope()
                    handshakes.start_soon(self._shake_hands, server, accepted, self._tls, scope)

    async def _shake_hands(
        self,
        server: Callable[[], asyncio.Protocol],
        accepted: socket.socket,
        tls: Certificate,
        scope: anyio.CancelScope,
    ) -> None:
        """Add a connection once its TLS handshake is done, so that a slow one delays no other."""
        try:
            with scope:
                self._add(
                    *await asyncio.get_running_loop().connect_accepted_socket(
                        server, accepted, ssl=tls.context(), ssl_handshake_timeout=HEAD_S,
                        ssl_shutdown_timeout=SHUTDOWN_S,
                    )
                )  # fmt: skip
        except OSError:  # an ssl.SSLError is one, and so is a time-out
            accepted.close()
        finally:
            if scope.cancelled_caught:
                accepted.close()
            self._handshakes.pop(accepted, None)

    def _add(self, transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
        if len(self) >= self._most:
            self._make_room()
        bound(transport)
        self._open[protocol] = _HttpConnection(transport, self._clock())

    async def run(self) -> None:
        """Close connections that are silent for too long, until cancelled."""
        while True:
            await anyio.sleep(CHECK_EVERY_S)
            self.end_silent()

    def end_silent(self) -> None:
        now = self._clock()
        for connection in self._open.values():
            if connection.is_silent_too_long(now):
                connection.transport.abort()
        self._remove_closed()

    @property
    def middleware(self) -> Middleware:
        """The middleware for aiohttp that notes each request, and sends its answer. If the next request has come
        already, this answer is the last one."""

        @web.middleware
        async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = self._open.get(request.protocol)
            if connection is None:
                return await handler(request)
            connection.begin_answer()
            try:
                response = await handler(request)
            finally:
                connection.end_answer(self._clock())
            if request.protocol._messages:  # aiohttp tells it nowhere else
                response.force_close()
            response = await self.unread.send(request, response)
            connection.end_answer(self._clock())
            return response

        return note

    def _make_room(self) -> None:
        """Close the connection that has been silent longest; if all get an answer, any."""
        connections = list(self._open.values())
        silent = [connection for connection in connections if connection.silent_since is not None]
        longest = min(silent or connections, key=lambda connection: connection.silent_since or 0.0, default=None)
        if longest is not None:
            longest.transport.abort()


def _accept_from_reserve(listener: socket.socket) -> socket.socket | None:
    """Accept with a descriptor that is reserved for probes, whatever a driver leaks; None if that fails, too."""
    try:
        with for_probes():
            accepted, _ = listener.accept()
    except OSError:
        return None
    accepted.setblocking(False)
    return accepted


async def bind(host: str | None, port: int) -> Sequence[socket.socket]:
    """Listen on all addresses of `host` (None: all of this machine's).

    Raises:
        OSError: an address cannot be bound. Then none is bound.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


class QuietLogger(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log. Lines about clients that do not speak HTTP get the level DEBUG."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        if isinstance(exc_info, HttpProcessingError | web.RequestPayloadError | ConnectionError):
            self.debug(msg, *args, exc_info=exc_info, **kwargs)
        else:
            super().exception(msg, *args, exc_info=exc_info, **kwargs)

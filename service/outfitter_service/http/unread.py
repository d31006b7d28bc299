"""Bounds what waits for readers that take nothing, over all connections of a server together.

Every answer passes here, whatever page it is of. A server that has an `Unread` has one bound of bytes, and not one for
each connection.
"""

from __future__ import annotations

import socket
from asyncio import Transport
from http import HTTPStatus

import msgspec
from aiohttp import web

MOST_UNREAD = 24 * 1024 * 1024
"""Most bytes of answers that wait for their readers."""
SMALL = 16 * 1024
"""Answers of up to so many bytes, such as those for probes, do not count."""
PIECE_BYTES = 64 * 1024 + 1
"""Most bytes of one write. The HTTP library waits for the reader after each write of more than 64 KiB, and the kernel
holds about as much."""
RETRY_AFTER_S = 5
"""When a client should try again for whose answer there was no room."""

_NO_ROOM = msgspec.json.encode(
    {
        "status": 503,
        "title": HTTPStatus.SERVICE_UNAVAILABLE.phrase,
        "detail": "answers that others have not read take all the room there is for answers: try again",
        "type": "about:blank",
    }
)


def bound(transport: Transport) -> None:
    """Let little wait in a connection itself: in our memory, with and without TLS, and in the kernel's."""
    transport.set_write_buffer_limits(high=PIECE_BYTES)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)


class Unread:
    """The answers of one server that wait for their readers. `size`: their bytes. `refused`: how many there was no room
    for."""

    def __init__(self, most: int = MOST_UNREAD) -> None:
        self.size = 0
        self.refused = 0
        self._most = most

    async def send(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Send a whole answer in pieces, each once its reader took those before. If there is no room, a 503 is the
        answer. Whoever keeps the connections ends those whose reader takes nothing."""
        body = response.body if isinstance(response, web.Response) else None
        if not isinstance(body, bytes) or len(body) <= SMALL or request.method == "HEAD":
            return response
        if self.size + len(body) > self._most:
            self.refused += 1
            headers = {"Content-Type": "application/problem+json", "Retry-After": str(RETRY_AFTER_S)}
            return web.Response(status=503, body=_NO_ROOM, headers=headers)
        self.size += len(body)
        try:
            return await _in_pieces(request, response, body)
        finally:
            self.size -= len(body)


async def _in_pieces(request: web.Request, response: web.StreamResponse, body: bytes) -> web.StreamResponse:
    pieces, whole = web.StreamResponse(status=response.status, headers=response.headers), memoryview(body)
    pieces.content_length = len(body)
    if response.keep_alive is False:
        pieces.force_close()
    try:
        await pieces.prepare(request)
        for start in range(0, len(body), PIECE_BYTES):
            await pieces.write(whole[start : start + PIECE_BYTES])
        await pieces.write_eof()
    except ConnectionError:
        pass  # the reader has gone
    return pieces

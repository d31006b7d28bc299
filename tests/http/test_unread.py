"""Readers that take nothing cost a bounded sum of bytes together, and all others are answered."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import anyio
import pytest
from aiohttp import ClientSession, web

from outfitter_service.http import unread
from outfitter_service.http.connections import KEEP_ALIVE_S, Connections
from outfitter_service.http.listener import Listening, serving

PAGE = b"x" * 1_000_000
SMALL = b"y" * 1_000


class Clock:
    """Seconds that only the test lets pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Served:
    """A server of two pages. `address`: HOST:PORT."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.address = ""
        self.connections: Connections
        self.held = ExitStack()

    def application(self, connections: Connections) -> web.Application:
        async def page(_: web.Request) -> web.Response:
            return web.Response(body=PAGE, headers={"ETag": '"e"'}, content_type="text/plain")

        async def small(_: web.Request) -> web.Response:
            return web.Response(body=SMALL)

        self.connections = connections
        app = web.Application(middlewares=[connections.middleware])
        app.router.add_get("/page", page)
        app.router.add_get("/small", small)
        return app

    def ask(self, path: str = "/page") -> None:
        """Ask for a page and take nothing of it."""
        host, port = self.address.split(":")
        reader = self.held.enter_context(socket.socket())
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        reader.sendall(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Served, ClientSession]]:
    server = Served()
    listening = Listening(address="127.0.0.1:0")
    with server.held:
        async with (
            serving(server.application, listening, clock=server.clock) as server.address,
            ClientSession(f"http://{server.address}") as client,
        ):
            yield server, client


async def until_waiting(server: Served, size: int) -> None:
    while server.connections.unread.size != size:  # noqa: ASYNC110 - what is waited for is in the server
        await anyio.sleep(0.01)


async def test_what_waits_for_all_readers_together_is_bounded_and_others_are_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unread.Unread.__init__, "__defaults__", (5_500_000,))
    async with served() as (server, client):
        for _ in range(20):
            server.ask()
        await until_waiting(server, 5_000_000)
        async with client.get("/page") as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
            assert refused.content_type == "application/problem+json"
            assert "have not read" in (await refused.json(content_type=None))["detail"]
        async with client.get("/small") as answered:
            assert await answered.read() == SMALL


async def test_who_takes_nothing_is_ended_and_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread.Unread.__init__, "__defaults__", (1_500_000,))
    async with served() as (server, client):
        server.ask()
        await until_waiting(server, 1_000_000)
        server.clock.now += KEEP_ALIVE_S
        server.connections.end_silent()
        await until_waiting(server, 0)
        async with client.get("/page") as response:
            assert await response.read() == PAGE


async def test_little_of_an_answer_waits_in_the_connection_itself() -> None:
    async with served() as (server, _):
        server.ask()
        await until_waiting(server, len(PAGE))
        (connection,) = server.connections._open.values()
        most = 0
        for _ in range(100):
            most = max(most, connection.transport.get_write_buffer_size())
            await anyio.lowlevel.checkpoint()
        assert 0 < most < 3 * unread.PIECE_BYTES


async def test_an_answer_in_pieces_is_the_answer_with_its_headers_and_leaves_the_connection_open() -> None:
    async with served() as (server, client):
        for _ in range(3):
            async with client.get("/page") as response:
                assert (await response.read(), response.headers["ETag"]) == (PAGE, '"e"')
                assert (response.content_length, response.content_type) == (len(PAGE), "text/plain")
            async with client.head("/page") as response:
                assert (await response.read(), response.content_length) == (b"", len(PAGE))
        assert len(server.connections) == 1
        assert server.connections.unread.size == 0

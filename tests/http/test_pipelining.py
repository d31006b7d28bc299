"""A connection has one request at a time, so that few of them cannot have as much work done as thousands."""

from __future__ import annotations

import socket
from http.client import HTTPConnection

import anyio
import pytest
from aiohttp import web

from outfitter_service.http.connections import Connections
from outfitter_service.http.listener import Listening, serving

ASK = b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("size", [10, 100_000])
async def test_who_sends_the_next_request_before_the_answer_gets_one_answer_and_the_end(size: int) -> None:
    asked: list[str] = []

    def application(connections: Connections) -> web.Application:
        async def page(request: web.Request) -> web.Response:
            asked.append(request.path)
            return web.Response(body=b"x" * size)

        app = web.Application(middlewares=[connections.middleware])
        app.router.add_get("/page", page)
        return app

    def at_once(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address) as client:
            client.sendall(3 * ASK)
            with client.makefile("rb") as answers:
                return answers.read()

    def one_by_one(address: tuple[str, int]) -> list[bytes]:
        connection, pages = HTTPConnection(*address), []
        for _ in range(3):
            connection.request("GET", "/page")
            pages.append(connection.getresponse().read())
            assert connection.sock is not None, "it was closed between requests"
        connection.close()
        return pages

    async with serving(application, Listening(address="127.0.0.1:0")) as address:
        host, port = address.split(":")
        said = await anyio.to_thread.run_sync(at_once, (host, int(port)))
        assert said.count(b"HTTP/1.1 200") == 1
        assert b"Connection: close" in said
        assert asked == ["/page"]
        assert await anyio.to_thread.run_sync(one_by_one, (host, int(port))) == [b"x" * size] * 3

"""A server that stops while it accepts a connection ends that connection in the order of its own, and says nothing."""

from __future__ import annotations

import asyncio
import logging
import socket

import anyio
import pytest
from aiohttp import web

from outfitter_service.http.connections import Connections, bind


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_it_stops_while_a_connection_is_accepted(use_uvloop: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        connections = Connections(lambda: 0.0)
        answered = anyio.Event()

        async def answer(_: web.BaseRequest) -> web.Response:
            answered.set()
            return web.Response(text="ok\n")

        server = web.Server(answer)
        [listener] = await bind("127.0.0.1", 0)
        with listener, socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")

            def stopping() -> web.RequestHandler[web.BaseRequest]:
                asyncio.get_running_loop().call_soon(accepting.cancel)  # before the connection is made
                return server()

            with anyio.CancelScope() as accepting:
                await connections.accept(listener, stopping)
            await answered.wait()
            await server.shutdown(1.0)

    with caplog.at_level(logging.ERROR):
        anyio.run(main, backend_options={"use_uvloop": use_uvloop})
    assert caplog.records == []

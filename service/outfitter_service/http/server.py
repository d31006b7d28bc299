"""The manager's HTTP: /metrics for Prometheus, /livez and /readyz for probes. It changes nothing.

It listens on loopback by default. A port that is in use is an error of one line. Other clients' connections cannot
block probes: see connections.py.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

import anyio
from aiohttp import web

from outfitter_proto.bus import addresses
from outfitter_service.http.connections import KEEP_ALIVE_S, Connections, QuietLogger, bind
from outfitter_service.metrics import CONTENT_TYPE
from outfitter_service.runtime.liveness import descriptors
from outfitter_service.runtime.manager.service import Service

INDEX = """<!doctype html>
<title>Outfitter</title>
<ul>
<li><a href="metrics">metrics</a>, for Prometheus</li>
<li><a href="livez">livez</a>: whether the process answers</li>
<li><a href="readyz">readyz</a>: whether registrations are answered, and why not</li>
</ul>
"""
LINGER_S = 1.0
"""For how many seconds the server reads the rest of a refused request."""


class HttpError(RuntimeError):
    """The server cannot listen on the address."""


def application(service: Service, connections: Connections) -> web.Application:
    """The routes of one manager."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if service.ready:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"not ready: {service.condition}\n")

    async def index(_: web.Request) -> web.Response:
        return web.Response(text=INDEX, content_type="text/html")

    app = web.Application(client_max_size=64 * 1024, middlewares=[connections.middleware])
    app.router.add_get("/", index)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    return app


@asynccontextmanager
async def listening(service: Service, address: str, *, clock: Callable[[], float] = monotonic) -> AsyncIterator[str]:
    """Serve `service`'s HTTP at `address` (HOST:PORT, port 0 for any); yields the real address.

    `clock` measures the silence of connections, in seconds.

    Raises:
        HttpError: it cannot listen; the message has the address and the remedy.
    """
    try:
        node = addresses.listener(address)
    except ValueError as error:
        raise HttpError(f"cannot listen: the address {error}") from None
    connections = Connections(clock)
    log = QuietLogger(logging.getLogger("outfitter.http"), None)
    runner = web.AppRunner(
        application(service, connections), access_log=None, handle_signals=False, shutdown_timeout=1.0, logger=log,
        keepalive_timeout=KEEP_ALIVE_S, lingering_time=LINGER_S,
    )  # fmt: skip
    await runner.setup()
    server = runner.server
    if server is None:
        raise RuntimeError("the runner is set up, but has no server")
    try:
        try:
            listeners = await bind(node.host, node.port)
        except OSError as error:
            code = error.errno or 0
            # the error of an unknown name has no errno
            what = os.strerror(code) if code > 0 else error.strerror or str(error)
            remedy = ". Is it another manager's? Give this one another --http" if code == errno.EADDRINUSE else ""
            raise HttpError(f"cannot listen on {address}: {what}{remedy}") from error
        try:
            async with anyio.create_task_group() as tasks:
                for listener in listeners:
                    tasks.start_soon(connections.accept, listener, server)
                tasks.start_soon(connections.run)
                tasks.start_soon(descriptors.report_outages)
                yield str(node._replace(port=listeners[0].getsockname()[1]))
                tasks.cancel_scope.cancel()
        finally:
            for listener in listeners:
                listener.close()
    finally:
        await runner.cleanup()

"""The manager's HTTP: /metrics for Prometheus, /livez and /readyz for probes. It changes nothing.

It listens on loopback by default. Other clients' connections cannot block probes: see connections.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

from aiohttp import web

from outfitter_service.http.connections import Connections
from outfitter_service.http.listener import Listening, serving
from outfitter_service.metrics import CONTENT_TYPE
from outfitter_service.runtime.manager.service import Service

INDEX = """<!doctype html>
<title>Outfitter</title>
<ul>
<li><a href="metrics">metrics</a>, for Prometheus</li>
<li><a href="livez">livez</a>: whether the process answers</li>
<li><a href="readyz">readyz</a>: whether registrations are answered, and why not</li>
{more}</ul>
"""
CONSOLE = '<li><a href="console/">console</a>: the fleet, and what needs a person</li>\n'
Add = Callable[[web.Application], object]
"""Adds the API and its console to an application."""


def application(service: Service, connections: Connections, add: Add | None = None) -> web.Application:
    """The routes of one manager, and those that `add` adds."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if service.ready:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"not ready: {service.condition}\n")

    async def index(_: web.Request) -> web.Response:
        return web.Response(text=INDEX.format(more=CONSOLE if add is not None else ""), content_type="text/html")

    app = web.Application(client_max_size=64 * 1024, middlewares=[connections.middleware])
    app.router.add_get("/", index)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    if add is not None:
        add(app)
    return app


@asynccontextmanager
async def listening(
    service: Service, at: str | Listening, *, add: Add | None = None, clock: Callable[[], float] = monotonic
) -> AsyncIterator[str]:
    """Serve `service`'s HTTP at an address (HOST:PORT, port 0 for any); yields the real address.

    `add`: see `application`. `clock` measures the silence of connections, in seconds.

    Raises:
        HttpError: it cannot listen; the message has the address and the remedy.
    """
    where = Listening(address=at) if isinstance(at, str) else at
    async with serving(lambda connections: application(service, connections, add), where, clock=clock) as address:
        yield address

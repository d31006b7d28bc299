"""The manager's HTTP: /metrics for Prometheus, /livez and /readyz for probes. It changes nothing.

Loopback by default. A port in use is one clear line.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from outfitter_service.metrics import CONTENT_TYPE
from outfitter_service.runtime.service import Service


class HttpError(RuntimeError):
    """The address cannot be listened on."""


def application(service: Service) -> web.Application:
    """The routes of one manager."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if service.ready:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"not ready: {service.condition}\n")

    app = web.Application(client_max_size=64 * 1024)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    return app


@asynccontextmanager
async def listening(service: Service, address: str) -> AsyncIterator[str]:
    """Serve `service`'s HTTP at `address` (HOST:PORT, port 0 for any); gives the address it really has.

    Raises:
        HttpError: the address cannot be had; says which and what to do.
    """
    host, _, port = address.rpartition(":")
    runner = web.AppRunner(application(service), access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host.strip("[]"), int(port))
        try:
            await site.start()
        except OSError as error:
            code = error.errno or 0
            # not asyncio's words, which name the address a second time; a name that is not found has no errno
            what = os.strerror(code) if code > 0 else error.strerror or str(error)
            remedy = ". Is it another manager's? Give this one another --http" if code == errno.EADDRINUSE else ""
            raise HttpError(f"cannot listen on {address}: {what}{remedy}") from error
        bound = runner.addresses[0]
        yield f"{host}:{bound[1]}"
    finally:
        await runner.cleanup()

"""Puts the API together: the routes, the event stream, the document, the console, and what every answer shares."""

from __future__ import annotations

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from outfitter_service.api import access, console, openapi
from outfitter_service.api.follower import Follower
from outfitter_service.api.metrics import CONTENT_TYPE, ApiMetrics
from outfitter_service.api.routes import BASE, ROUTES
from outfitter_service.api.stream import MOST_STREAMS, Streams
from outfitter_service.api.typed import NoQuery, RefusedError, parameters, problem, serve
from outfitter_service.http.connections import MOST, Connections

log = structlog.get_logger("outfitter.api")

EVENTS = f"{BASE}/events"
DOCUMENT = f"{BASE}/openapi.json"
MOST_CONNECTIONS = MOST + MOST_STREAMS
"""Most open connections of a server with the API."""


def add_to(app: web.Application, follower: Follower, guard: access.Guard, *, page: str = "/console/") -> Streams:
    """Add the API's routes to an application, and the console at the path `page`. Its other routes stay as they are.
    Returns the streams of events."""
    streams = Streams(follower, guard)
    document = msgspec.json.encode(openapi.document(ROUTES, EVENTS, secured=guard.secured))

    async def send_document(request: web.Request) -> web.Response:
        parameters(request, NoQuery)
        return web.Response(body=document, headers={"Content-Type": "application/json"})

    async def stop_streams(_: web.Application) -> None:
        streams.stop()

    for route in ROUTES:
        app.router.add_get(route.path, serve(route, follower))
    app.router.add_get(EVENTS, streams.serve, allow_head=False)
    app.router.add_get(DOCUMENT, send_document)
    console.add_to(app, page)
    app.middlewares.append(_problems(guard))
    app.on_shutdown.append(stop_streams)
    return streams


def application(follower: Follower, connections: Connections, guard: access.Guard) -> web.Application:
    """The API alone, with metrics and probes. The console is its first page."""

    async def send_metrics(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if follower.fleet is not None:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"not ready: {follower.condition}\n")

    app = web.Application(client_max_size=64 * 1024, middlewares=[connections.middleware])
    app.router.add_get("/metrics", send_metrics)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    streams = add_to(app, follower, guard, page="/")
    metrics = ApiMetrics(follower, lambda: streams.count)
    app.on_response_prepare.append(metrics.count)
    return app


def _problems(guard: access.Guard) -> Middleware:
    """The middleware that lets nobody in without the token, and turns each error into a problem."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith(f"{BASE}/"):
            return await handler(request)
        try:
            guard.check(request)
            return await handler(request)
        except RefusedError as error:
            return problem(error.status, str(error), error.headers)
        except web.HTTPException as error:
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return problem(error.status, _reason(error, request), headers)
        except Exception:
            log.exception("a request of the API failed", path=request.path)
            return problem(500, "an internal error, which the log describes")

    return answer


def _reason(error: web.HTTPException, request: web.Request) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.method} is not allowed: nothing is changed here"
    if isinstance(error, web.HTTPNotFound):
        return f"there is no such page; {DOCUMENT} lists all"
    return error.reason

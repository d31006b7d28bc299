"""The webhook's routes: reviews for API servers, probes and metrics beside them."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import anyio
import structlog
from aiohttp import web

from outfitter_service.http.connections import Connections
from outfitter_service.webhook.metrics import CONTENT_TYPE, WebhookMetrics
from outfitter_service.webhook.review import AmountsOf, NoReviewError, Outcome, answer

log = structlog.get_logger("outfitter.webhook")

PATH = "/mutate"
LARGEST_REVIEW = 4 * 1024 * 1024
"""Bytes of a review: an API server takes objects of 3 MiB at most (`MaxRequestBodyBytes`)."""
READ_S = 5.0
"""Seconds for the whole of a review. An API server waits for the answer no longer than that."""


def application(
    connections: Connections,
    amounts_of: AmountsOf,
    metrics: WebhookMetrics,
    *,
    read_s: float = READ_S,
    clock: Callable[[], float] = perf_counter,
) -> web.Application:
    """The routes. `read_s`: the time limit for reading a review, in seconds. `clock` measures answers, in seconds."""

    async def mutate(request: web.Request) -> web.Response:
        began = clock()
        try:
            body, outcome = answer(await _body(request, read_s), amounts_of)
        except web.HTTPException as error:
            metrics.count(Outcome.REFUSED, clock() - began)
            return _refusal(error.status, error.text or error.reason)
        except NoReviewError as error:
            metrics.count(Outcome.REFUSED, clock() - began)
            return _refusal(400, str(error))
        metrics.count(outcome, clock() - began)
        return web.Response(body=body, content_type="application/json")

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def probe(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application(client_max_size=LARGEST_REVIEW, middlewares=[connections.middleware])
    app.router.add_post(PATH, mutate)
    app.router.add_get("/metrics", show_metrics)
    app.router.add_get("/livez", probe)
    app.router.add_get("/readyz", probe)
    return app


async def _body(request: web.Request, read_s: float) -> bytes:
    """The body of a request.

    Raises:
        web.HTTPException: it has another type or is packed, is too long, or does not end in time.
    """
    if request.content_type != "application/json" or "Content-Encoding" in request.headers:
        raise web.HTTPUnsupportedMediaType(text="a review is application/json, and not packed")
    try:
        with anyio.fail_after(read_s):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the review did not end within {read_s:g} s") from None


def _refusal(status: int, why: str) -> web.Response:
    """The answer to what is no review, for the log of the API server. The connection ends, because the rest of the body
    may still come."""
    log.debug("refused what is no review", status=status, reason=why)
    response = web.Response(status=status, text=f"{why}\n")
    response.force_close()
    return response

"""The webhook's routes: reviews for API servers, probes and metrics beside them."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import structlog
from aiohttp import web

from outfitter_service.http.connections import Connections
from outfitter_service.webhook.bodies import LARGEST_REVIEW, Bodies
from outfitter_service.webhook.metrics import CONTENT_TYPE, WebhookMetrics
from outfitter_service.webhook.review import AmountsOf, NoReviewError, ReviewOutcome, answer

log = structlog.get_logger("outfitter.webhook")

PATH = "/mutate"


def application(
    connections: Connections,
    amounts_of: AmountsOf,
    metrics: WebhookMetrics,
    *,
    bodies: Bodies | None = None,
    clock: Callable[[], float] = perf_counter,
) -> web.Application:
    """The routes. `bodies` reads reviews, within its bounds. `clock` measures answers, in seconds."""
    reading = bodies or Bodies()

    async def mutate(request: web.Request) -> web.Response:
        began = clock()
        try:
            body, outcome = answer(await reading.read(request), amounts_of)
        except web.HTTPException as error:
            metrics.count(ReviewOutcome.REFUSED, clock() - began)
            return _refusal(error.status, error.text or error.reason)
        except NoReviewError as error:
            metrics.count(ReviewOutcome.REFUSED, clock() - began)
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


def _refusal(status: int, why: str) -> web.Response:
    """The answer to what is no review, for the log of the API server. The connection ends, because the rest of the body
    may still come."""
    log.debug("refused what is no review", status=status, reason=why)
    response = web.Response(status=status, text=f"{why}\n")
    response.force_close()
    return response

"""Listens on an address and serves an application there, with the bounds of connections.py.

A port that is in use is an error of one line. Whoever listens at an address stops before the block ends.
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
from msgspec import Struct

from outfitter_proto.bus import addresses
from outfitter_service.http.connections import KEEP_ALIVE_S, MOST, Connections, QuietLogger, bind
from outfitter_service.http.tls import Certificate
from outfitter_service.runtime.liveness import descriptors

LINGER_S = 1.0
"""For how many seconds the server reads the rest of a refused request."""


class HttpError(RuntimeError):
    """The server cannot listen on the address."""


class Listening(Struct, frozen=True, kw_only=True):
    """Where and how to listen."""

    address: str
    """HOST:PORT, port 0 for any."""
    most: int = MOST
    """The most open connections."""
    tls: Certificate | None = None
    """None for plain HTTP."""
    flag: str = "--http"
    """The option that gives another address, for the message about a port in use."""


@asynccontextmanager
async def serving(
    application: Callable[[Connections], web.Application],
    listening: Listening,
    *,
    clock: Callable[[], float] = monotonic,
) -> AsyncIterator[str]:
    """Serve an application; yields the real address.

    `application` makes it with the middleware of the connections. `clock` measures their silence, in seconds.

    Raises:
        HttpError: it cannot listen; the message has the address and the remedy.
    """
    try:
        node = addresses.listener(listening.address)
    except ValueError as error:
        raise HttpError(f"cannot listen: the address {error}") from None
    connections = Connections(clock, most=listening.most, tls=listening.tls)
    log = QuietLogger(logging.getLogger("outfitter.http"), None)
    runner = web.AppRunner(
        application(connections), access_log=None, handle_signals=False, shutdown_timeout=1.0, logger=log,
        keepalive_timeout=KEEP_ALIVE_S, lingering_time=LINGER_S,
        auto_decompress=False,  # nobody reads a packed body: what is refused would be unpacked first
    )  # fmt: skip
    await runner.setup()
    server = runner.server
    if server is None:
        raise RuntimeError("the runner is set up, but has no server")
    try:
        try:
            listeners = await bind(node.host, node.port)
        except OSError as error:
            raise HttpError(_refusal(listening, error)) from error
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


def _refusal(listening: Listening, error: OSError) -> str:
    """Why it cannot listen, and what to do."""
    code = error.errno or 0
    # the error of an unknown name has no errno
    what = os.strerror(code) if code > 0 else error.strerror or str(error)
    remedy = f". Is it another manager's? Give this one another {listening.flag}" if code == errno.EADDRINUSE else ""
    return f"cannot listen on {listening.address}: {what}{remedy}"

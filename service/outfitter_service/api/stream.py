"""The event stream: each change as a server-sent event.

A reader that comes back names its last event and gets all later ones; if some are gone, it first gets `reset`. All
streams end at once when their model is replaced. A reader that is too slow is closed, too: it comes back, and then
learns what it missed. Events are encoded once for all readers, and
a reader is sent a piece of them when it has taken the earlier ones. So memory does not grow with slow readers.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from outfitter_service.api.access import Guard
from outfitter_service.api.follower import Follower
from outfitter_service.api.model.event_log import Event, EventLog
from outfitter_service.api.model.fleet import Fleet
from outfitter_service.api.typed import RefusedError, fleet_of, parameters
from outfitter_service.http.unread import PIECE_BYTES

MOST_STREAMS = 256
"""Most open streams."""
AT_ONCE = 256
"""Most events of one write."""
BEAT_S = 10.0
"""Seconds between two signs of life, which also say the id of the last event, and between two looks at the token."""
WRITE_WITHIN_S = 20.0
"""How long a reader may take until it has room for more."""
RETRY_MS = 1000
"""After how many milliseconds a reader comes back."""


class StreamQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`host`: only events of this host."""

    host: str | UnsetType = UNSET


class Streams:
    """The open streams of one server. `count`: how many there are now."""

    def __init__(self, follower: Follower, guard: Guard) -> None:
        self._follower = follower
        self._guard = guard
        self._stopping = anyio.Event()
        self.count = 0

    def stop(self) -> None:
        """End all streams, so that the server can end."""
        self._stopping.set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Send events until the reader goes."""
        fleet = fleet_of(self._follower)
        query = parameters(request, StreamQuery)
        if self.count >= MOST_STREAMS or self._stopping.is_set():
            raise RefusedError(503, f"{MOST_STREAMS} streams are open already", {"Retry-After": "10"})
        self.count += 1
        try:
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream",
                    "Cache-Control": "no-store",
                    "X-Accel-Buffering": "no",
                }
            )
            await response.prepare(request)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._end_with_server, tasks.cancel_scope)
                tasks.start_soon(self._end_with_right, request, tasks.cancel_scope)
                if not await self._send(response, fleet, request.headers.get("Last-Event-ID"), query.host):
                    _abort(request)
                tasks.cancel_scope.cancel()
            return response
        finally:
            self.count -= 1

    async def _end_with_server(self, scope: anyio.CancelScope) -> None:
        await self._stopping.wait()
        scope.cancel()

    async def _end_with_right(self, request: web.Request, scope: anyio.CancelScope) -> None:
        """End the stream when its token is no longer the one that lets in."""
        while not scope.cancel_called:
            await anyio.sleep(BEAT_S)
            try:
                self._guard.check(request)
            except RefusedError:
                scope.cancel()

    async def _send(
        self, response: web.StreamResponse, fleet: Fleet, last_id: str | None, host: str | UnsetType
    ) -> bool:
        """Send events until the reader is behind the log or the model is replaced. False: the reader takes nothing."""
        events = fleet.events
        sequence = events.last if last_id is None else events.sequence_of(last_id)
        if not await _write(response, b"retry: %d\n%s" % (RETRY_MS, _hello(events, sequence))):
            return False
        sequence = events.last if sequence is None else sequence
        written = anyio.current_time()
        while not events.is_closed and events.has_all_after(sequence):
            found = events.after(sequence, AT_ONCE, PIECE_BYTES)
            if found:
                sequence = found[-1].sequence
            else:
                with anyio.move_on_after(max(0.0, written + BEAT_S - anyio.current_time())):
                    await events.wait(sequence)
            data = _selected(found, host)
            if not data and anyio.current_time() >= written + BEAT_S:
                # an id without data moves the reader's place, though nothing of the last events concerned it
                data = b"id: %s\n\n" % events.id_of(sequence).encode()
            if data:
                if not await _write(response, data):
                    return False
                written = anyio.current_time()
        return True


def _hello(events: EventLog, sequence: int | None) -> bytes:
    """The first lines: whether events are missing, and the place from which the stream goes on."""
    if sequence is None:
        return b"id: %s\nevent: reset\ndata: {}\n\n" % events.last_id.encode()
    return b"id: %s\n\n" % events.id_of(sequence).encode()


def _selected(events: Sequence[Event], host: str | UnsetType) -> bytes:
    return b"".join(event.wire for event in events if host is UNSET or event.host == host)


async def _write(response: web.StreamResponse, data: bytes) -> bool:
    """Whether the reader took it, each piece in time."""
    shared = memoryview(data)
    try:
        for start in range(0, len(data), PIECE_BYTES):
            with anyio.fail_after(WRITE_WITHIN_S):
                await response.write(shared[start : start + PIECE_BYTES])
    except (ConnectionError, TimeoutError):
        return False
    return True


def _abort(request: web.Request) -> None:
    """End the connection without waiting for the reader to take what was sent."""
    if request.transport is not None:
        request.transport.abort()

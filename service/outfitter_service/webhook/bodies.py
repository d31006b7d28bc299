"""Reads the bodies of reviews, within a bound for all of them together.

Any pod of a cluster may connect, and nobody has to log in. A review of an API server is complete at once and mostly
small. So where the bodies that are not complete exceed the bound together, the largest of them is refused.

A body that is complete is answered at once, one review after the other, and is not kept while its answer is written.
"""

from __future__ import annotations

import anyio
from aiohttp import web

LARGEST_REVIEW = 4 * 1024 * 1024
"""Bytes of a review: an API server takes objects of 3 MiB at most (`MaxRequestBodyBytes`)."""
MOST_TOGETHER = 4 * LARGEST_REVIEW
"""Most bytes of all bodies that are being read."""
READ_S = 5.0
"""Seconds for the whole of a review. An API server waits for the answer no longer than that."""


class _Body:
    """A body that is being read."""

    def __init__(self) -> None:
        self.read = bytearray()
        self.scope = anyio.CancelScope()
        self.has_given_way = False

    def give_way(self) -> None:
        self.read, self.has_given_way = bytearray(), True
        self.scope.cancel()


class Bodies:
    """The bodies that are being read. `most`: bytes of all together. `read_s`: seconds for each."""

    def __init__(self, *, most: int = MOST_TOGETHER, read_s: float = READ_S) -> None:
        self._most = most
        self._read_s = read_s
        self._reading: list[_Body] = []

    @property
    def held(self) -> int:
        """Bytes of all bodies that are being read."""
        return sum(len(body.read) for body in self._reading)

    async def read(self, request: web.Request) -> bytearray:
        """The body of a request.

        Raises:
            web.HTTPException: it has another type or is packed, is too long, or does not end in time; or others are
                complete sooner.
        """
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            raise web.HTTPUnsupportedMediaType(text="a review is application/json, and not packed")
        if (request.content_length or 0) > LARGEST_REVIEW:
            raise _too_large(request.content_length or 0)
        body = _Body()
        self._reading.append(body)
        try:
            with body.scope, anyio.fail_after(self._read_s):
                while not body.has_given_way and (piece := await request.content.readany()):
                    self._take(body, piece)
            if body.has_given_way:
                raise web.HTTPServiceUnavailable(text="too many reviews are being read: send it again")
            return body.read
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the review did not end within {self._read_s:g} s") from None
        finally:
            self._reading.remove(body)

    def _take(self, body: _Body, piece: bytes) -> None:
        body.read += piece
        if len(body.read) > LARGEST_REVIEW:
            raise _too_large(len(body.read))
        while self.held > self._most:
            max(self._reading, key=lambda each: len(each.read)).give_way()


def _too_large(size: int) -> web.HTTPException:
    return web.HTTPRequestEntityTooLarge(max_size=LARGEST_REVIEW, actual_size=size)

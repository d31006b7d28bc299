"""Serves the console: a page and its files, which read the API from the browser.

The files hold no data, so they need no token. There is no build step: they are served as they are in this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

STATIC = Path(__file__).with_name("static")
PAGE = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""The content type of each kind of file that is served. Other files are here for people: licences, for example."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Of each answer. A browser keeps the files, but asks each time whether they have changed: they belong to the version
of the API that serves them."""
_API = b'data-api="api/v1/"'
"""Where the page says how to get from its own address to the API. The addresses are relative, for proxies' sake."""


def add_to(app: web.Application, root: str) -> None:
    """Add the console to an application. `root`: where its page is, with a slash at the end."""
    upwards = "../" * (root.count("/") - 1)
    for file in sorted(STATIC.rglob("*")):
        if file.suffix in TYPES:
            body, name = file.read_bytes(), file.relative_to(STATIC).as_posix()
            if name == PAGE:
                body, name = body.replace(_API, _API.replace(b'="', b'="' + upwards.encode())), ""
            app.router.add_get(root + name, _sender(body, TYPES[file.suffix]))


def _sender(body: bytes, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The handler that sends one file, or says that the browser's copy is still right."""
    tag = hashlib.blake2b(body, digest_size=12).hexdigest()

    async def send(request: web.Request) -> web.Response:
        if any(known.value in {tag, "*"} for known in request.if_none_match or ()):
            answer = web.Response(status=304, headers=HEADERS)
        else:
            answer = web.Response(body=body, content_type=content_type, charset="utf-8", headers=HEADERS)
        answer.etag = tag
        return answer

    return send

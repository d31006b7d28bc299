"""Who may read: everybody on this machine, or whoever has the token or a certificate.

On loopback without a token we answer only to names of this machine. So a page in a browser that has given its own name
our address (DNS rebinding) reads nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from outfitter_proto.bus.addresses import is_loopback
from outfitter_service.api.typed import RefusedError

SHORTEST_TOKEN = 16
"""Fewest characters of a token."""
LONGEST_TOKEN_FILE = 4096


class AccessError(RuntimeError):
    """The API must not be served like this. The message says what would be needed."""


class Guard(Struct, frozen=True, kw_only=True):
    """Lets requests in. `token`: reads the current token; None: none is needed. `local`: only names of this machine are
    answered."""

    token: Callable[[], bytes] | None
    local: bool

    @property
    def secured(self) -> bool:
        """Whether a token is needed."""
        return self.token is not None

    def check(self, request: web.Request) -> None:
        """Let the request in.

        Raises:
            RefusedError: the token is missing or wrong, or the request is for another machine's name.
        """
        if self.token is not None:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            given_bytes = given.strip().encode("utf-8", "surrogateescape")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given_bytes, self.token()):
                raise RefusedError(401, "a token is needed: Authorization: Bearer …", {"WWW-Authenticate": "Bearer"})
        elif self.local and not is_loopback(request.host):
            raise RefusedError(403, "only names of this machine are answered without a token, such as localhost")


def guard(address: str, token_file: str | None, *, mutual_tls: bool = False) -> Guard:
    """The guard of an address.

    Raises:
        AccessError: others reach the address, and neither a token nor a certificate keeps them out; or there is no
            usable token in the file.
    """
    local = is_loopback(address)
    if token_file is not None:
        path = Path(token_file)
        read_token(path)
        return Guard(token=lambda: _current(path), local=local)
    if not local and not mutual_tls:
        raise AccessError(
            f"the API is not served at {address} without protection, because others reach it: give a file with a token "
            "(--token-file, or api-token-file), or listen on 127.0.0.1"
        )
    return Guard(token=None, local=local)


def read_token(path: Path) -> bytes:
    """The token in a file.

    Raises:
        AccessError: the file cannot be read, or has no usable token.
    """
    try:
        with path.open("rb") as file:
            token = file.read(LONGEST_TOKEN_FILE + 1).strip()
    except OSError as error:
        raise AccessError(f"the token cannot be read from {path}: {error.strerror}") from error
    if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN_FILE or not all(33 <= byte < 127 for byte in token):
        raise AccessError(
            f"{path} has no usable token: write one line of {SHORTEST_TOKEN} or more letters, digits and signs without "
            "blanks, for example by `openssl rand -hex 32`"
        )
    return token


def _current(path: Path) -> bytes:
    """The token now, so that a replaced file counts at once.

    Raises:
        RefusedError: the file has none now, so nobody gets in.
    """
    try:
        return read_token(path)
    except AccessError:
        raise RefusedError(503, "the server's own token cannot be read") from None

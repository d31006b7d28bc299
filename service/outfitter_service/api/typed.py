"""Routes as values: one serves a request, and openapi.py describes the same value. What is checked is documented.

A route only reads. Its handler is a plain function of the model, so that nothing changes while a page is made. Every
error is an RFC 9457 problem.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
import msgspec.inspect
from aiohttp import web
from msgspec import Struct, structs

from outfitter_proto.bus.reading import FOLLOW_WAIT_S
from outfitter_service.api.follower import Follower
from outfitter_service.api.model.fleet import Fleet

PROBLEM = "application/problem+json"
EVENT_ID = "Outfitter-Event-Id"
AS_OF = "Outfitter-As-Of"
RETRY_AFTER_S = int(FOLLOW_WAIT_S)
"""When a client should try again that came before the model was complete."""


class Problem(Struct, frozen=True, kw_only=True):
    """An error, as RFC 9457 describes it. `title`: of the status. `detail`: what is wrong, and what would be valid."""

    status: int
    title: str
    detail: str
    type: str = "about:blank"


class RefusedError(Exception):
    """The request gets a problem as its answer. `headers`: more of the answer."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = dict(headers or {})


class NoQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """A route without parameters."""


class Route(Struct, frozen=True, kw_only=True):
    """One GET."""

    path: str
    """With `{name}` for each part that varies."""
    name: str
    """The operation's in the document."""
    summary: str
    """One line."""
    handler: Callable[[Follower, Any, Any, Mapping[str, str]], Any]
    """Gets the follower, the model, the query and the parts of the path, and returns the answer's body."""
    answer: Any
    """Its type."""
    query: type[Struct] = NoQuery
    """The type of the parameters."""
    refusals: tuple[int, ...] = ()
    """The statuses of its own problems."""
    early: bool = False
    """Answers although the model is not complete; then the handler gets None for it."""


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """The answer for an error."""
    body = msgspec.json.encode(Problem(status=status, title=HTTPStatus(status).phrase, detail=detail))
    return web.Response(status=status, body=body, headers={"Content-Type": PROBLEM, **(headers or {})})


def parameters(request: web.Request, kind: type[Struct]) -> Any:
    """The query of a request.

    Raises:
        RefusedError: a parameter is unknown, given twice, or has a value that is not valid.
    """
    query = request.query
    for name in query:
        if len(query.getall(name)) > 1 and name not in _lists(kind):
            raise RefusedError(400, f"the parameter {name} is given twice")
        if name in _times(kind) and "-" not in query[name][1:]:  # a number would be seconds since the epoch
            raise RefusedError(400, f"the parameter {name} is no time: write RFC 3339, such as 2026-01-31T12:00:00Z")
        if name in _numbers(kind) and not (query[name].isascii() and query[name].isdecimal()):
            raise RefusedError(400, f"the parameter {name} is no whole number: write digits, such as 100")
    given = {name: query.getall(name) if name in _lists(kind) else query[name] for name in query}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise RefusedError(400, f"the query is not valid: {error}") from None


def _times(kind: type[Struct]) -> frozenset[str]:
    """The parameters that are times."""
    return _parameters_of(kind, msgspec.inspect.DateTimeType)


def _numbers(kind: type[Struct]) -> frozenset[str]:
    """The parameters that are whole numbers."""
    return _parameters_of(kind, msgspec.inspect.IntType)


def _lists(kind: type[Struct]) -> frozenset[str]:
    """The parameters that may be repeated."""
    return _parameters_of(kind, msgspec.inspect.ListType)


@cache
def _parameters_of(kind: type[Struct], wanted: type[msgspec.inspect.Type]) -> frozenset[str]:
    """The parameters of a type."""
    names: set[str] = set()
    for field in structs.fields(kind):
        found = msgspec.inspect.type_info(field.type)
        parts = found.types if isinstance(found, msgspec.inspect.UnionType) else [found]
        plain = [part.type if isinstance(part, msgspec.inspect.Metadata) else part for part in parts]
        if any(isinstance(part, wanted) for part in plain):
            names.add(field.encode_name)
    return frozenset(names)


def fleet_of(follower: Follower) -> Fleet:
    """The complete model.

    Raises:
        RefusedError: it is not complete yet; the problem says why.
    """
    if follower.fleet is None:
        raise RefusedError(503, follower.condition, {"Retry-After": str(RETRY_AFTER_S)})
    return follower.fleet


def serve(route: Route, follower: Follower) -> Callable[[web.Request], Any]:
    """The handler of a route, for aiohttp."""
    encode = msgspec.json.Encoder().encode

    async def handle(request: web.Request) -> web.Response:
        fleet = None if route.early else fleet_of(follower)
        query = parameters(request, route.query)
        body = encode(route.handler(follower, fleet, query, request.match_info))
        etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        headers = {"ETag": etag, "Cache-Control": "no-cache"}
        if fleet is not None:
            headers[EVENT_ID] = fleet.events.last_id
        if follower.as_of is not None:
            headers[AS_OF] = _stamp(follower.as_of)
        if _matches(request.headers.get("If-None-Match"), etag):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers={"Content-Type": "application/json", **headers})

    return handle


def _stamp(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%S.%fZ}"


def _matches(known: str | None, etag: str) -> bool:
    """Whether `If-None-Match` names this tag. The comparison is weak, as RFC 9110 wants it for GET."""
    if known is None:
        return False
    return known.strip() == "*" or etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}

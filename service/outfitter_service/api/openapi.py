"""The OpenAPI 3.1 document, made from the routes that serve the API."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from outfitter_proto import __version__
from outfitter_proto.records import NAME_PATTERN
from outfitter_proto.schema import describe_fields
from outfitter_service.api.typed import AS_OF, EVENT_ID, PROBLEM, Problem, Route

_REF = "#/components/schemas/{name}"
_WHY = {
    400: "The query is not valid.",
    401: "The token is missing or wrong.",
    404: "There is no such thing.",
    503: "The topics are not read yet, or cannot be read; `detail` says why.",
}
_STREAM = """The changes as server-sent events.

`event` is `allocation`, `host`, `device`, `cordon`, `step` or `dead-letter`. `data` is JSON: `partition`, `offset`,
`key` and `record`, which is null if the record was deleted or cannot be read; of a dead letter it is the item. A page's
header `Outfitter-Event-Id` is the id of the last event that the page has. So read the pages, then follow from the id of
the first one. After `event: reset` events are missing: read the pages again.
"""


def document(routes: Iterable[Route], events: str, *, secured: bool) -> dict[str, Any]:
    """The document of these routes and of the event stream, whose path is `events`. `secured`: a token is needed."""
    routes = list(routes)
    types = [Problem, *(route.answer for route in routes), *(route.query for route in routes)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    describe_fields(components)
    answers = schemas[1 : 1 + len(routes)]
    queries = schemas[1 + len(routes) :]
    paths: dict[str, Any] = {}
    for route, answer, query in zip(routes, answers, queries, strict=True):
        fields = components[query["$ref"].rpartition("/")[2]]["properties"]
        paths[route.path] = {"get": _operation(route, answer, fields, secured=secured)}
    for query in queries:
        components.pop(query["$ref"].rpartition("/")[2], None)
    paths[events] = {"get": _stream(secured=secured)}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Outfitter's read API",
            "version": __version__,
            "description": "What the topics of a cluster say. It changes nothing.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if secured:
        found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
    return found


def _operation(route: Route, answer: Any, fields: dict[str, Any], *, secured: bool) -> dict[str, Any]:
    parts = re.findall(r"\{(\w+)\}", route.path)
    headers = {
        "ETag": {"description": "Changes with the body.", "schema": {"type": "string"}},
        AS_OF: {"description": "The answer has everything up to this time.", "schema": {"type": "string"}},
        EVENT_ID: {"description": "The last event that the answer has.", "schema": {"type": "string"}},
    }
    statuses = [400, *route.refusals, *([] if route.early else [503])]
    return {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [
            *({"name": part, "in": "path", "required": True, "schema": _name()} for part in parts),
            *(_parameter(name, schema) for name, schema in fields.items()),
            _header("If-None-Match", "The `ETag` of an answer that the client has."),
        ],
        "responses": {
            "200": {
                "description": "The answer.",
                "headers": headers,
                "content": {"application/json": {"schema": answer}},
            },
            "304": {"description": "The client's answer is still right.", "headers": headers},
            **_problems(statuses, secured=secured),
        },
    }


def _stream(*, secured: bool) -> dict[str, Any]:
    return {
        "operationId": "events",
        "summary": "The changes, as they come",
        "description": _STREAM,
        "parameters": [
            _parameter("host", {"type": "string", "description": "Only of this host."}),
            _header("Last-Event-ID", "The id of the last event that the client has."),
        ],
        "responses": {
            "200": {"description": "The stream.", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
            **_problems([400, 503], secured=secured),
        },
    }


def _name() -> dict[str, Any]:
    return {"type": "string", "pattern": NAME_PATTERN}


def _parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    about = {"description": schema["description"]} if "description" in schema else {}
    schema = {key: value for key, value in schema.items() if key != "description"}
    return {"name": name, "in": "query", "required": False, **about, "schema": schema}


def _header(name: str, about: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": about, "schema": {"type": "string"}}


def _problems(statuses: Iterable[int], *, secured: bool) -> dict[str, Any]:
    schema = {"schema": {"$ref": _REF.format(name="Problem")}}
    return {
        str(status): {"description": _WHY[status], "content": {PROBLEM: schema}}
        for status in sorted({*statuses, *([401] if secured else [])})
    }

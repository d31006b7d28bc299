"""The dashboard for Grafana as tests see it: its queries, and the metrics that these name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from support.documents import ROOT

FILE = ROOT / "deploy" / "grafana" / "outfitter.json"
VARIABLES = {"$__rate_interval": "1m", "$cluster": ".*", "$host": ".*", "$resource": ".*"}
"""What Grafana puts in place of each variable while nobody has chosen anything."""

_METRIC = re.compile(r"\b(?:outfitter|process)_\w+|\bup\b|\bALERTS\b")


def content() -> dict[str, Any]:
    """The dashboard."""
    return dict(json.loads(FILE.read_text()))


def panels() -> list[dict[str, Any]]:
    """The panels that show something."""
    return [panel for panel in content()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """The queries of all panels, each once, as they are in the file."""
    return [*dict.fromkeys(target["expr"] for panel in panels() for target in panel["targets"])]


def questions() -> Iterator[str]:
    """The queries of the variables."""
    for variable in content()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def as_asked_at_first(query: str) -> str:
    """A query with the variables replaced."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def metrics_of(query: str) -> set[str]:
    """The metrics that a query names."""
    names = set(_METRIC.findall(re.sub(r"\{[^}]*\}", "", query)))
    assert names, query
    return names

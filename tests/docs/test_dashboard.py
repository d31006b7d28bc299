"""The dashboard for Grafana, against the metrics in the code: a panel on a renamed metric stays empty.

`make deploy` makes it anew from its script, and asks a real Prometheus each of its queries.
"""

from __future__ import annotations

import re

import pytest

from support import dashboard
from support.exposition import of_api, of_manager

EXPOSED = of_manager() | of_api() | {"ALERTS": [{"alertname": "", "alertstate": "firing"}]}
JOINED = {"job", "instance", "cluster", "host"}
"""Labels that Prometheus gives to every series, and that each query takes from the info of its process."""
SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~?)"([^"]*)"')


def test_it_answers_the_questions_in_the_consoles_order() -> None:
    rows = [panel["title"] for panel in dashboard.content()["panels"] if panel["type"] == "row"]
    assert rows == [
        "What needs a person", "Who waits, and why", "The fleet", "From registration to grant", "Managers", "The API",
    ]  # fmt: skip


def test_one_chooses_the_source_the_cluster_the_host_and_the_resource() -> None:
    names = [variable["name"] for variable in dashboard.content()["templating"]["list"]]
    assert names == ["datasource", "cluster", "host", "resource"]
    for question in dashboard.questions():
        match = re.fullmatch(r"label_values\((\w+)(?:\{[^}]*\})?, (\w+)\)", question)
        assert match is not None
        assert any(match[2] in labels for labels in EXPOSED[match[1]])


@pytest.mark.parametrize("query", dashboard.queries())
def test_each_metric_and_each_label_of_a_query_exists(query: str) -> None:
    names = dashboard.metrics_of(query)
    assert names <= EXPOSED.keys()
    for name, matchers in SELECTOR.findall(query):
        for label, _, value in MATCHER.findall(matchers):
            wanted = [] if value.startswith("$") or ".+" in value else value.split("|")
            assert label in JOINED or not EXPOSED[name] or any(label in labels for labels in EXPOSED[name]), label
            for each in wanted:
                assert label in JOINED or any(labels.get(label) == each for labels in EXPOSED[name]), each
    labels = {label for name in names for labels in EXPOSED[name] for label in labels}
    for grouping in re.findall(r"\bby \(([^)]*)\)", query):
        counted = {"route", "status"} if any(name.startswith("outfitter_api_requests") for name in names) else set()
        assert {*grouping.split(", ")} <= labels | JOINED | counted


def test_each_query_but_those_of_all_clusters_is_narrowed_by_what_one_has_chosen() -> None:
    for query in dashboard.queries():
        assert '$cluster"' in query or query.startswith(("(count(", "ALERTS{")), query


def test_panels_have_their_own_numbers_and_do_not_overlap() -> None:
    panels = dashboard.content()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not taken & cells
        taken |= cells

"""The tables of the service's pages and of drivers/README.md against the code that they describe."""

from __future__ import annotations

import re
import time
import tomllib
from collections import Counter
from typing import Any

import pytest

from outfitter_drivers.registry import GROUP
from outfitter_service.api.application import DOCUMENT, EVENTS, MOST_CONNECTIONS
from outfitter_service.api.model.event_log import MOST_EVENTS
from outfitter_service.api.model.tail import MOST_ITEMS
from outfitter_service.api.routes import ROUTES
from outfitter_service.api.stream import MOST_STREAMS
from outfitter_service.cli.commands.manager.topics import BROKER_PARTITIONS
from outfitter_service.config.options import ALIASES, RESOURCE_OPTIONS, SETTINGS, Option, ResourceOption
from outfitter_service.core.states import diagram
from outfitter_service.http.connections import Connections
from outfitter_service.http.server import application
from outfitter_service.metrics import Metrics, StateCounts
from outfitter_service.requests import annotation
from outfitter_service.webhook import bodies
from support.documents import ROOT, blocks
from support.exposition import webhook_metrics

SERVICE = ROOT / "service"
TEXT = (SERVICE / "reference.md").read_text()


@pytest.mark.parametrize("option", SETTINGS, ids=lambda option: option.name)
def test_the_page_has_each_setting_with_its_kind_and_default(option: Option) -> None:
    default = "–" if option.default is None else f"`{option.default}`"
    default = "the hostname, lower-cased" if option.name == "host" else default
    assert f"| `{option.name}` | {option.type} | {default} |" in TEXT


@pytest.mark.parametrize("option", RESOURCE_OPTIONS, ids=lambda option: option.name)
def test_the_page_has_each_option_of_a_resource_with_its_kind_and_default(option: ResourceOption) -> None:
    also = "".join(f" (or `{alias}`)" for alias, name in ALIASES.items() if name == option.name)
    default = "–" if option.default is None else f"`{option.default}`"
    assert f"| `{option.name}`{also} | {option.type} | {default} |" in TEXT


def test_the_page_has_no_other_settings() -> None:
    section = TEXT.partition("### The manager's settings")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([a-z.-]+)`", section, re.MULTILINE))
    assert named == {option.name for option in (*SETTINGS, *RESOURCE_OPTIONS)}


def test_the_page_has_each_metric_with_its_labels_and_no_other() -> None:
    metrics = Metrics(["gpu"])
    a_model = StateCounts(
        devices=Counter(), allocations=Counter(), pending=Counter(), models=Counter({("gpu", "A100", "free"): 1})
    )
    metrics.show(lambda: a_model)
    for of_partition in (metrics.partition_ready, metrics.orders_unread, metrics.orders_unreadable):
        of_partition.labels("0")  # the others are there from the start
    metrics.count_refusals(int)
    assert named_in("Metrics") == labels_of(metrics.registry)
    assert named_in("The webhook") == labels_of(webhook_metrics().registry)


def labels_of(registry: Any) -> dict[str, set[str]]:
    """The labels of each metric of ours."""
    labels: dict[str, set[str]] = {}
    for family in registry.collect():
        if family.name.startswith("process_"):  # the client library's
            continue
        suffix = {"info": "_info", "counter": "_total"}.get(family.type, "")
        labels[family.name + suffix] = {label for sample in family.samples for label in sample.labels} - {"le"}
    return labels


def named_in(heading: str) -> dict[str, set[str]]:
    """The labels of each metric in the tables of a section."""
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    told: dict[str, set[str]] = {}
    for line in section.splitlines():
        if line.startswith("| `outfitter_"):
            names, labelled = line.split("|")[1:3]
            for name in re.findall(r"`(\w+)`", names):
                told[name] = set(re.findall(r"`(\w+)`", labelled))
    return told


def test_the_diagram_is_that_of_the_state_table() -> None:
    shown = [block.text.strip() for block in blocks(SERVICE / "promises.md") if block.language == "mermaid"]
    assert shown == [diagram()]


def test_the_page_says_how_many_partitions_topics_get() -> None:
    text = (SERVICE / "operate.md").read_text()
    assert f"({BROKER_PARTITIONS} partitions unless `--partitions` says otherwise)" in text


def test_the_page_has_each_route() -> None:
    app = application(None, Connections(time.monotonic))  # type: ignore[arg-type]  # no request is made
    paths = {resource.canonical for resource in app.router.resources()} - {"/"}
    assert paths
    assert set(re.findall(r"^\| `(/[\w/{}-]+)` \|", TEXT, re.MULTILINE)) == paths


def test_the_page_has_the_webhooks_limits() -> None:
    assert f"| a review | {bodies.LARGEST_REVIEW // 2**20} MiB; it must not be packed | 413; 415 |" in TEXT
    assert f"| the time for all of it | {bodies.READ_S:g} s | 408 |" in TEXT
    together = bodies.MOST_TOGETHER // 2**20
    assert f"| all reviews that are not complete | {together} MiB | 503 for the largest of them |" in TEXT
    assert f"| an annotation | {annotation.MOST_CHARACTERS:,} characters |" in TEXT
    assert f"| problems in a denial | {annotation.MOST_PROBLEMS} |" in TEXT


def test_the_apis_page_has_each_of_its_routes_with_each_filter_and_its_limits() -> None:
    text = (SERVICE / "api.md").read_text()
    told = dict(re.findall(r"^\| `(/api/v1/[\w/{}.-]+)` \|.*\|([^|]*)\|$", text, re.MULTILINE))
    assert told.keys() == {EVENTS, DOCUMENT, *(route.path for route in ROUTES)}
    for route in ROUTES:
        filters = set(route.query.__struct_fields__) - {"limit", "cursor"}
        if "as for" not in told[route.path]:
            assert set(re.findall(r"`(\w+)`", told[route.path])) == filters
    assert f"| open connections | {MOST_CONNECTIONS}; " in text
    assert f"| open streams | {MOST_STREAMS}; " in text
    assert f"the last {MOST_EVENTS:,} events" in text
    assert f"the newest {MOST_ITEMS:,} items" in text


def test_the_drivers_page_has_each_driver_and_no_other() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    table = (ROOT / "drivers" / "README.md").read_text().partition("| name |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == named.keys()

"""A real Prometheus scrapes a real manager and a real API: its rules are evaluated, an alert fires and ends, and each
query of the dashboard has an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support import prometheus
from support.dashboard import as_asked_at_first, metrics_of, queries
from support.managers.api import Api
from support.managers.api import running as api_running
from support.managers.process import Manager, add_device, files_config
from support.prometheus import RULES, Prometheus

pytestmark = pytest.mark.deploy

ILL = "OutfitterDevicesUnhealthy"
MAY_BE_EMPTY = re.compile(r"^ALERTS|> 0$")
"""Queries about troubles have no answer where all is well."""


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A manager of a host with two GPUs, one of which a worker holds."""
    folder = tmp_path_factory.mktemp("manager")
    manager = Manager(folder, files_config(folder / "gpus"))
    try:
        manager.start()
        manager.outfitter("register", "--worker", "holder", "--lease", "none")
        manager.wait_for_state("holder", "allocated")
        yield manager
    finally:
        manager.kill9()
        print(f"--- {manager.log}\n{manager.log_tail()}")


@pytest.fixture(scope="module")
def api(manager: Manager, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_running(tmp_path_factory.mktemp("api"), manager.bus_url) as api:
        manager.wait_for(lambda: api.is_ready)
        manager.outfitter("register", "--worker", "seen", "--lease", "none")  # an event for the API's readers
        manager.wait_for_state("seen", "allocated")
        yield api


@pytest.fixture(scope="module")
def server(manager: Manager, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with our rules, whose alerts do not wait for minutes."""
    folder = tmp_path_factory.mktemp("prometheus")
    jobs = {"outfitter": manager.url, "outfitter-api": str(api.url)}
    with prometheus.running(folder, prometheus.rules_without_delay(folder), jobs) as server:
        yield server


def rules_of(server: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in server.get("rules")["groups"] for rule in group["rules"]]


def exposed(text: str) -> set[str]:
    """The names of the samples, and of families without one."""
    families = [*text_string_to_metric_families(text)]
    return {family.name for family in families} | {sample.name for family in families for sample in family.samples}


def evaluations(server: Prometheus) -> list[tuple[str, str]]:
    """When each rule was last evaluated."""
    return [(rule["name"], rule["lastEvaluation"]) for rule in rules_of(server)]


def test_every_rule_is_evaluated_without_an_error(server: Prometheus) -> None:
    server.wait_for(lambda: server.query("outfitter_ready == 1"), "a scrape of the manager")
    before = set(evaluations(server))  # a rule on metrics that are not there yet never fails
    server.wait_for(lambda: before.isdisjoint(evaluations(server)), "an evaluation of every rule")
    rules = rules_of(server)
    assert len(rules) == len(re.findall(r"(?m)^ +- (?:alert|record): ", RULES.read_text()))
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}


def test_an_alert_fires_while_a_device_is_ill_and_then_ends(server: Prometheus, manager: Manager) -> None:
    server.wait_for(lambda: server.query("outfitter_ready == 1"), "a scrape of the manager")
    assert server.firing() == set()
    device = add_device(manager.folder / "gpus", 2, health="unhealthy")
    server.wait_for(lambda: server.firing() == {ILL}, "the alert")
    (alert,) = server.get("alerts")["alerts"]
    assert alert["labels"] | {"instance": ""} == {
        "alertname": ILL, "instance": "", "job": "outfitter", "resource": "gpu", "severity": "warning",
        "state": "unhealthy",
    }  # fmt: skip
    assert alert["annotations"]["summary"] == f"1 gpu of {alert['labels']['instance']} are unhealthy."
    device.unlink()
    server.wait_for(lambda: server.firing() == set(), "the end of the alert")


def test_each_metric_that_the_dashboard_names_is_there(manager: Manager, api: Api) -> None:
    has = {"up", "ALERTS", *exposed(manager.metrics()), *exposed(api.metrics())}
    assert {name for query in queries() for name in metrics_of(query)} - has == set()


def test_each_query_of_the_dashboard_has_an_answer(server: Prometheus) -> None:
    server.wait_for(lambda: server.query("rate(outfitter_ready[1m])"), "two scrapes of the manager")
    server.wait_for(lambda: server.query("rate(outfitter_api_ready[1m])"), "two scrapes of the API")
    empty = [query for query in map(as_asked_at_first, queries()) if not server.query(query)]
    assert [query for query in empty if not MAY_BE_EMPTY.search(query)] == []

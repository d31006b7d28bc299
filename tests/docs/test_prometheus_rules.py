"""The rules for Prometheus, against the metrics in the code and their page: a rule on a renamed metric never fires."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from ruamel.yaml import YAML

from support.documents import ROOT
from support.exposition import of_api, of_manager, of_webhook

FOLDER = ROOT / "deploy" / "prometheus"
PAGE = "deploy/prometheus/README.md"
GROUPS = YAML(typ="safe").load(FOLDER / "rules.yml")["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
UNIT_TESTS = [
    test for name in ("rules.test.yml", "normal.test.yml") for test in YAML(typ="safe").load(FOLDER / name)["tests"]
]
SECTIONS = re.findall(r"^## (\w+)$", (FOLDER / "README.md").read_text(), re.MULTILINE)
SCRAPED = re.compile(r"\b(?:outfitter|process)_\w+|\bup\b")
SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)=(~?)"([^"]*)"')
PROMETHEUS_OWN = {"job", "instance"}

alerts = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))


EXPOSED = of_manager() | of_api() | of_webhook()


def values(matcher: tuple[str, str, str]) -> Iterator[tuple[str, str]]:
    label, pattern, text = matcher
    yield from ((label, value) for value in (text.split("|") if pattern else [text]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.get("alert") or rule["record"]))
def test_there_is_each_metric_and_each_label_of_a_rule(rule: dict[str, Any]) -> None:
    names = SCRAPED.findall(re.sub(r"\{[^}]*\}", "", rule["expr"]))
    assert names
    assert set(names) <= EXPOSED.keys()
    for name, matchers in SELECTOR.findall(rule["expr"]):
        wanted = chain.from_iterable(values(matcher) for matcher in MATCHER.findall(matchers))
        for label, value in wanted:
            assert label in PROMETHEUS_OWN or any(labels.get(label) == value for labels in EXPOSED[name]), value
    for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
        for label in {*grouping.split(", ")} - PROMETHEUS_OWN:
            ours = [name for name in names if name != "up"]  # which has the labels of a target
            assert all(any(label in labels for labels in EXPOSED[name]) for name in ours), label


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    assert [alert["alert"] for alert in ALERTS] == SECTIONS


@alerts
def test_an_alert_says_how_bad_it_is_what_to_do_and_where_to_read_on(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"critical", "warning"}
    notes = alert["annotations"]
    assert notes["summary"].endswith(".")
    assert notes["description"].endswith(".")
    page, _, anchor = notes["runbook_url"].partition("#")
    assert page == PAGE
    assert anchor == alert["alert"].lower()
    assert anchor in {section.lower() for section in SECTIONS}


@alerts
def test_an_alert_has_a_unit_test_that_sees_it_fire_end_and_stay_silent(alert: dict[str, Any]) -> None:
    cases = [case for test in UNIT_TESTS for case in test["alert_rule_test"] if case["alertname"] == alert["alert"]]
    *fires_and_ends, silent = [bool(case["exp_alerts"]) for case in cases]
    assert fires_and_ends
    assert fires_and_ends == [True, False] * (len(fires_and_ends) // 2)
    assert not silent


@pytest.mark.parametrize(
    ("manifest", "scope"), [("host/daemonset.yaml", "host"), ("cluster/deployment.yaml", "cluster")]
)
def test_the_threshold_of_memory_is_below_the_limit_in_the_manifest(manifest: str, scope: str) -> None:
    (expression,) = [alert["expr"] for alert in ALERTS if alert["alert"] == "OutfitterMemoryHigh"]
    host, cluster = re.findall(r"> 0\.8 \* (\d+) \* 2\^20", expression)
    pod = YAML(typ="safe").load(ROOT / "deploy" / "kubernetes" / "base" / manifest)["spec"]["template"]["spec"]
    limit = pod["containers"][0]["resources"]["limits"]["memory"].replace("1Gi", "1024Mi")
    assert limit == f"{host if scope == 'host' else cluster}Mi"


def test_each_job_of_a_rule_is_one_that_the_service_monitors_make() -> None:
    """The job is a Service's name label, which the ServiceMonitor selects."""
    monitors = YAML(typ="safe").load_all(
        ROOT / "deploy" / "kubernetes" / "overlays" / "monitoring" / "servicemonitor.yaml"
    )
    made = {monitor["spec"]["selector"]["matchLabels"][monitor["spec"]["jobLabel"]] for monitor in monitors}
    assert set(re.findall(r'job="([^"]*)"', "".join(rule["expr"] for rule in RULES))) == made

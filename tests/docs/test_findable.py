"""Whatever an operator meets (an alert, a code, a command, a line of a log) is on a page that says what it means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import outfitter
from outfitter_drivers import api
from outfitter_proto.records import NobodysCode, ReasonCode, Unwatched
from outfitter_service.api import troubles
from outfitter_service.cli import COMMANDS
from support.documents import DOCUMENTS, ROOT

PAGES = [page for page in DOCUMENTS if page.name != "CHANGELOG.md" and "tests" not in page.relative_to(ROOT).parts]
TEXT = "\n".join(page.read_text() for page in PAGES)
FAILURES = (ROOT / "service" / "failures.md").read_text()
INDEX = (ROOT / "service" / "troubleshooting.md").read_text().partition("## Index of error messages")[2]
MESSAGES = re.findall(r"^\| `+ ?(.+?) ?`+ \|", INDEX, re.MULTILINE)
ALERTS = dict(
    re.findall(r"- alert: (\w+)\n.*?severity: (\w+)", (ROOT / "deploy/prometheus/rules.yml").read_text(), re.DOTALL)
)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in {"glossary.md", "CONTRIBUTING.md"} and page != ROOT / "docs/README.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_each_page_leads_to_the_glossary(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*glossary\.md)\)", page.read_text())
    assert {(page.parent / link).resolve() for link in links} == {ROOT / "service" / "glossary.md"}


def in_a_page(code: str) -> bool:
    """Whether some page has `code` as code."""
    return re.search(rf"`{re.escape(code)}[`\s]", TEXT) is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_says_what_each_command_is_for(command: str) -> None:
    assert re.search(rf"\boutfitter {command}\b", TEXT)


@pytest.mark.parametrize("code", [*ReasonCode, *NobodysCode, *Unwatched])
def test_a_page_has_each_code_of_a_record_or_dead_letter(code: str) -> None:
    assert in_a_page(code)


ERRORS = [
    name
    for module, names in ((outfitter, outfitter.__all__), (api, vars(api)))
    for name in names
    if isinstance(value := getattr(module, name), type) and issubclass(value, Exception)
]


@pytest.mark.parametrize("error", ERRORS)
def test_a_page_has_each_error_that_a_program_can_catch(error: str) -> None:
    assert in_a_page(error)


def test_the_failure_matrix_names_alerts_that_there_are() -> None:
    assert set(re.findall(r"`(Outfitter[A-Z]\w+)`", FAILURES)) <= ALERTS.keys()


@pytest.mark.parametrize("alert", [name for name, severity in ALERTS.items() if severity == "critical"])
def test_the_failure_matrix_says_what_each_critical_alert_follows(alert: str) -> None:
    assert f"`{alert}`" in FAILURES


ALERTING = (ROOT / "deploy/prometheus/README.md").read_text()
RULES = (ROOT / "deploy/prometheus/rules.yml").read_text()
TROUBLESHOOTING = (ROOT / "service/troubleshooting.md").read_text()


def from_on(text: str, start: str, end: str) -> str:
    """The part of a text from `start` to the next `end`."""
    return text.partition(start)[2].partition(end)[0]


@pytest.mark.parametrize(
    ("meets_it", "part"),
    [
        ("troubleshooting", from_on(TROUBLESHOOTING, "### A device is unhealthy\n", "\n### ")),
        ("the alert's section", from_on(ALERTING, "## OutfitterDevicesUnhealthy\n", "\n## ")),
        ("the section of a failing driver", from_on(ALERTING, "## OutfitterDriverFails\n", "\n## ")),
        ("the alert", from_on(RULES, "alert: OutfitterDevicesUnhealthy\n", "- alert")),
    ],
    ids=lambda value: value if " " not in value or len(value) < 40 else "",
)
def test_whoever_meets_an_ill_device_is_led_to_the_page_that_says_what_makes_it_ill(meets_it: str, part: str) -> None:
    assert "drivers/health.md" in part, meets_it


def test_each_trouble_of_the_console_about_ill_devices_names_that_page() -> None:
    ill = [troubles.UNHEALTHY, troubles.UNKNOWN]
    remedies = {kind: remedy for kind, _, remedy in troubles.ILLNESSES}
    assert all("drivers/health.md" in remedies[kind] for kind in ill)


# --- lines of a log ---

LEVELS = {"warning", "error", "critical", "exception"}
PASSED_ON = {"…", "……", "…: …"}
"""Lines whose words are another's, which has its own row."""


def logged(source: str) -> Iterator[str]:
    """The lines that a module logs as a warning or worse, with `…` in place of a value."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS
            and node.args
        ):
            line = node.args[0]
            parts = line.values if isinstance(line, ast.JoinedStr) else [line]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
            yield re.sub(r"%(?:\.\d+f|[a-z])", "…", text)


LINES = sorted(
    {
        line
        for folder in ("proto", "drivers", "service")
        for path in (ROOT / folder).rglob("*.py")
        for line in logged(path.read_text())
    }
    - PASSED_ON
)


def is_explained(line: str) -> bool:
    return any(message in line for message in MESSAGES)


@pytest.mark.parametrize("line", LINES)
def test_the_index_explains_each_line_that_is_logged_as_a_warning_or_worse(line: str) -> None:
    assert is_explained(line)


@pytest.mark.parametrize(
    "source",
    [
        'log.warning("nobody explains this")',
        'logger.error("%s: nobody explains %d", a, b)',
        'log.critical(f"{a} nobody")',
    ],
)
def test_a_line_that_nobody_explains_would_be_found(source: str) -> None:
    (line,) = logged(source)
    assert not is_explained(line)

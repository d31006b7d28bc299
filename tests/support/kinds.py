"""Kinds of tests that need more than `make test` has, and run only if they are asked for.

A file says its kind: `pytestmark = pytest.mark.console`. It is asked for by its name in `-m`, or by a path below
`tests`. Until then it is not even imported. Without the tools of its kind a run ends at once, and names them.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tools import KINDS, MissingToolError, tool

TESTS = Path(__file__).resolve().parents[1]
_MARK = re.compile(r"^pytestmark = .*", re.MULTILINE)
_NAME = re.compile(r"\bmark\.(\w+)")


@functools.cache
def kinds_of(file: Path) -> frozenset[str]:
    """The kinds that a file of tests says."""
    marks = _MARK.findall(file.read_text())
    return frozenset(name for line in marks for name in _NAME.findall(line)) & KINDS.keys()


def asked_for(config: pytest.Config, file: Path) -> bool:
    """Whether this run is to have a file, of whatever kind."""
    kinds, expression = kinds_of(file), config.option.markexpr
    if not kinds:
        return expression not in KINDS
    if expression and not Expression.compile(expression).evaluate(lambda name, **_: name in {*kinds, "slow"}):
        return False
    places = (Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args)
    by_path = any(TESTS in place.parents and file.is_relative_to(place) for place in places)
    return by_path or any(re.search(rf"\b{kind}\b", expression) for kind in kinds)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Miss a tool now rather than in the middle."""
    config = session.config
    kinds = {kind for file in TESTS.rglob("test_*.py") if asked_for(config, file) for kind in kinds_of(file)}
    missing = []
    for kind in sorted(kinds):
        for name in KINDS[kind]:
            try:
                tool(name)
            except MissingToolError:
                missing.append(f"{kind} needs {name}")
    if missing:
        wanted = " ".join(sorted(kinds))
        raise pytest.UsageError(
            f"{', '.join(missing)}: `PYTHONPATH=tests .venv/bin/python -m tools {wanted}` fetches it"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, unseen, what nobody asked for."""
    if collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return None if asked_for(config, collection_path.resolve()) else True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these are slow, so that `-m 'not slow'` has none of them."""
    for item in items:
        if any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker(pytest.mark.slow)

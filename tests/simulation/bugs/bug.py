"""A planted bug, and the hunt for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from msgspec import Struct

from simulation.model.client import ModelBus
from simulation.run import Outcome, run
from simulation.world import settings


class Bug(Struct, frozen=True, kw_only=True):
    """A planted bug: its name, what it does, how many seeds it may take to be found, and where it sits."""

    name: str
    what: str
    within: int
    bus: type[ModelBus] = ModelBus
    patches: Callable[[], AbstractContextManager[Any]] = nullcontext


class Hunt(Struct, frozen=True, kw_only=True):
    """What came of looking for a bug: after how many seeds it was found (None: it was not), and by what."""

    bug: str
    seeds: int | None
    steps: int
    outcome: Outcome | None = None


def hunt(bug: Bug, *, first: int = 0) -> Hunt:
    """Run seeds, from `first` on, until one of them finds `bug`, or as many as it may take."""
    steps = 0
    with bug.patches():
        for number in range(bug.within):
            outcome = run(first + number, make_bus=bug.bus)
            steps += outcome.steps
            if outcome.violations:
                return Hunt(bug=bug.name, seeds=number + 1, steps=steps, outcome=outcome)
    return Hunt(bug=bug.name, seeds=None, steps=steps)


def jumping() -> AbstractContextManager[Any]:
    """Looked for where clocks are set."""
    return patch.object(settings, "JUMPY", 1.0)


def nothing(*_: Any, **__: Any) -> None:
    """What should have been done is not."""


@contextmanager
def deafening() -> Iterator[None]:
    """Looked for where workers that keep their devices for long are cut off, and can write again before they read."""
    with (
        patch.object(settings, "DEAF", 1.0),
        patch.object(settings, "TENACIOUS", 1.0),
        patch.object(settings, "FAULTS", ("worker", "worker", "slow", "compaction")),
    ):
        yield

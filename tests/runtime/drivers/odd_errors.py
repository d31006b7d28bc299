"""What drivers may raise: errors that cannot be read, or that end more than a call."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import timedelta

from outfitter_drivers.api import (
    TemporaryDriverError,
)


class WordlessError(Exception):
    """An exception whose message cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class EndlessDelayError(TemporaryDriverError):
    """An exception whose delay is code, and wants to end the process."""

    delay = property(lambda _: sys.exit("no delay"), lambda _error, _delay: None)  # type: ignore[assignment]


class ClasslessError(Exception):
    """An exception that does not say what it is."""

    __class__ = property(lambda _: sys.exit("no class"))  # type: ignore[assignment]


class Unrelated(BaseException):
    """No `Exception`, as what some libraries raise to end a program."""


ENDINGS: dict[str, BaseException] = {
    "is interrupted": KeyboardInterrupt(),
    "is closed as a generator": GeneratorExit(),
    "panics": Unrelated("unwrap of None"),
    "is cancelled": asyncio.CancelledError("a task of its own"),
}
RAISED: dict[str, Callable[[], BaseException]] = {
    "a delay as a timedelta": lambda: TemporaryDriverError("later", delay=timedelta(milliseconds=10)),
    "a delay that is a text": lambda: TemporaryDriverError("later", delay="5"),  # type: ignore[arg-type]
    "a delay of nan": lambda: TemporaryDriverError("later", delay=float("nan")),
    "a delay without an end": lambda: TemporaryDriverError("later", delay=float("inf")),
    "a delay of more seconds than a float can count": lambda: TemporaryDriverError("later", delay=10**400),
    "a delay that ends the process": lambda: EndlessDelayError("later"),
    "no class": ClasslessError,
    "no words": WordlessError,
    "an end of the process": lambda: SystemExit(3),
    "an interrupt": KeyboardInterrupt,
    "an end of a generator": GeneratorExit,
    "an end of an iteration": StopAsyncIteration,
    "a group": lambda: BaseExceptionGroup("two", [SystemExit(2), asyncio.CancelledError()]),
    "no exception": lambda: Unrelated("odd"),
}

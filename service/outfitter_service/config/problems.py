"""The problems of a configuration, as values. All are collected before the first is reported."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable

from msgspec import Struct, structs

from outfitter_proto.support.printable import printable

MASK = "***"

_SECRET = re.compile(r"secret|passw|passphrase|token|credential|api.?key|private.?key", re.IGNORECASE)
_URL_SECRET = re.compile(r"(?<=://)[^/]*@|\?.*$")


class Severity(enum.StrEnum):
    """An error stops its resource or the manager. A warning stops nothing. Information is no fault."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class ConfigProblem(Struct, frozen=True, kw_only=True):
    """One problem or information.

    Attributes:
        file: its place (`/etc/x.yaml line 3`, `the command line`, `the environment`).
        key: the key as written there; empty for the whole file.
        found: its text; None if it is missing.
        problem: what is wrong, and the valid values.
        suggestion: what to write instead, if there is a good guess.
        resource: an error of a resource stops only that resource. An error without a resource stops the manager.
    """

    file: str
    key: str
    problem: str
    found: str | None = None
    suggestion: str | None = None
    severity: Severity = Severity.ERROR
    resource: str | None = None

    def __post_init__(self) -> None:
        if self.found is not None:
            structs.force_setattr(self, "found", masked(self.key, self.found))
        for name, longest in (("key", 256), ("problem", 2_000), ("suggestion", 2_000)):
            value = getattr(self, name)
            if value is not None and len(value) > longest:
                structs.force_setattr(self, name, f"{value[:longest]}… ({len(value)} characters)")

    def __str__(self) -> str:
        value = f" (found {shorten(self.found)})" if self.found is not None else ""
        suggestion = f"; {self.suggestion}" if self.suggestion else ""
        place = "".join(f"{part}: " for part in (self.file, self.key) if part)
        return printable(f"{self.severity}: {place}{self.problem}{value}{suggestion}")


class ConfigurationError(Exception):
    """A configuration that cannot be used. `problems` has all problems, not only errors."""

    def __init__(self, problems: Iterable[ConfigProblem], message: str = "") -> None:
        self.problems = tuple(problems)
        lines = [message] if message else []
        super().__init__("\n".join(lines + [str(problem) for problem in self.problems]))


def masked(key: str, value: str) -> str:
    """The value with secrets replaced: values of keys with names of secrets (but not file names), and everything in a
    URL except its address."""
    if _SECRET.search(key) and not key.endswith("-file"):
        return MASK
    return _URL_SECRET.sub(_hide, value) if "://" in value else value


def _hide(match: re.Match[str]) -> str:
    return f"{MASK}@" if match[0].endswith("@") else f"?{MASK}"


def shorten(text: str, limit: int = 80) -> str:
    """A value for an error line: quoted, without control characters, shortened."""
    return ascii_safe(text if len(text) <= limit else text[:limit] + "…")


def ascii_safe(text: str) -> str:
    """The text quoted, with control characters escaped. Letters of any script stay."""
    return f"'{printable(text)}'"


def nearest(word: str, known: Collection[str]) -> str | None:
    """The most similar known word. None for a very long word, or among very many."""
    if len(word) > 256 or len(known) > 100:
        return None
    import difflib  # a valid configuration does not need it

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None

"""What can be wrong with a configuration, as values: all of it is collected before anything is said."""

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
    """An error stops what it is about, a warning stops nothing, information is no fault at all."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Problem(Struct, frozen=True, kw_only=True):
    """One thing to put right (or to know).

    `file` is where it stands (`/etc/x.yaml line 3`, `the command line`, `the environment`), `key` as it was written
    there (empty: it is about the whole file), `found` its text (None: nothing is there), `problem` what is wrong and
    what is allowed, `suggestion` what to write instead, where there is a good guess. `resource` is whom it concerns: an
    error there costs that resource only, an error without a resource stops the manager.
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
        found = f" (found {shorten(self.found)})" if self.found is not None else ""
        suggestion = f"; {self.suggestion}" if self.suggestion else ""
        place = "".join(f"{part}: " for part in (self.file, self.key) if part)
        return printable(f"{self.severity}: {place}{self.problem}{found}{suggestion}")


class ConfigurationError(Exception):
    """A configuration that cannot be used. `problems` holds everything that is wrong, not only what stops."""

    def __init__(self, problems: Iterable[Problem], message: str = "") -> None:
        self.problems = tuple(problems)
        lines = [message] if message else []
        super().__init__("\n".join(lines + [str(problem) for problem in self.problems]))


def masked(key: str, value: str) -> str:
    """The value, with what must not be seen replaced: values of keys that speak of secrets (but for the names of files
    with them), and what stands in a URL beside its address."""
    if _SECRET.search(key) and not key.endswith("-file"):
        return MASK
    return _URL_SECRET.sub(_hide, value) if "://" in value else value


def _hide(match: re.Match[str]) -> str:
    return f"{MASK}@" if match[0].endswith("@") else f"?{MASK}"


def shorten(text: str, limit: int = 80) -> str:
    """A value as an error line bears it: quoted, with nothing that moves a terminal, not too long."""
    return ascii_safe(text if len(text) <= limit else text[:limit] + "…")


def ascii_safe(text: str) -> str:
    """Quoted, control characters escaped, letters of any script left alone."""
    return f"'{printable(text)}'"


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known word that was probably meant. Nobody is guessed at among very many, nor from something very long."""
    if len(word) > 256 or len(known) > 100:
        return None
    import difflib  # a configuration without faults does not need it

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None

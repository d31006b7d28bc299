"""The report: violations with their places, and for each check its number of cases and whether it was complete.

If compaction or retention has removed records, a check says so and reports no violation that it cannot prove.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outfitter_verify.logs import Log, Place

CHECKS: Mapping[str, tuple[str, str]] = {
    "exclusivity": ("no device is in two live allocations, at any prefix of the ledger", "device grants"),
    "steps": ("allocations take legal steps only, and what is over stays over", "allocation records"),
    "tokens": ("each grant has a new fencing token, and a writer's tokens only grow", "tokens"),
    "commits": ("a writer's commits are whole and follow one another without a gap", "commits"),
    "positions": ("each commit goes on in the input where an earlier one ended, never past its end", "positions"),
    "instances": ("no manager commits anything after its successor's first commit", "managers"),
    "writers": ("one writer at a time writes a host's records, and each under its own key", "ledger records"),
    "partitions": ("every record is in the partition that its host's name hashes to", "records"),
    "answers": ("each registration that was read is answered, and is read once", "registrations"),
    "dead-letters": ("what is no registration is a dead letter once, with its own bytes", "messages"),
    "inventory": ("what is granted was reported, and healthy", "granted devices"),
    "operators": ("each operator has what it named of its worker's grant", "operators"),
    "queue": ("nobody is served before an earlier worker that waits for the same, or waits for what is free", "grants"),
    "releases": (
        "devices are lent again only after a goodbye, a death or a lease's end, and after their driver let go",
        "releases",
    ),
    "history": ("history tells every step, and each as the ledger has it", "transitions"),
}
"""Each check's promise, and the unit that it counts."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: the check, the record, the fault, and other records that prove it."""

    check: str
    place: Place
    what: str
    records: tuple[str, ...] = ()
    timestamp_ms: int = 0

    def __str__(self) -> str:
        shown = f" [{', '.join(self.records)}]" if self.records else ""
        return f"{self.check}: {self.place}: {self.what}{shown}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check: the number of `unit` that it checked, its violations, and why it was incomplete (if so)."""

    name: str
    promise: str
    unit: str
    looked_at: int
    violations: int
    partial: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict. `violations` is empty if all promises were kept. `complete`: nothing was hidden from any check.

    `counts`: numbers of commits, grants, managers, registrations, …. `last`: the last record of every allocation in the
    ledger, as parsed JSON, by key.
    """

    cluster: str
    checks: tuple[CheckResult, ...]
    violations: tuple[Violation, ...]
    counts: Mapping[str, int]
    last: Mapping[str, Mapping[str, Any]]

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def complete(self) -> bool:
        return not any(check.partial for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(str(violation) for violation in self.violations) or "no violations"


@dataclass(slots=True)
class Findings:
    """Collects the results of the checks."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    looked: Counter[str] = field(default_factory=Counter)
    partial: dict[str, Counter[str]] = field(default_factory=dict)
    last: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    logs: Mapping[str, Log] = field(default_factory=dict)
    """The current partition, by topic."""

    def look(self, check: str, times: int = 1) -> None:
        self.looked[check] += times

    def wrong(self, check: str, place: Place, what: str, *records: object) -> None:
        """Add a violation at `place`; `records` are other places that prove it."""
        log = self.logs.get(place.topic)
        found = log.at(place.offset) if log is not None else None
        time = found.timestamp_ms if found is not None else 0
        self.violations.append(Violation(check, place, what, tuple(map(str, records)), time))

    def part(self, check: str, why: str) -> None:
        """Note that the check was incomplete, and why."""
        self.partial.setdefault(check, Counter())[why] += 1

    def report(self, cluster: str) -> Report:
        order = {name: number for number, name in enumerate(CHECKS)}
        self.violations.sort(key=lambda found: (order[found.check], found.place))
        per_check = Counter(found.check for found in self.violations)
        checks = tuple(
            CheckResult(
                name=name,
                promise=promise,
                unit=unit,
                looked_at=self.looked[name],
                violations=per_check[name],
                partial=tuple(f"{why} ({times})" for why, times in self.partial.get(name, Counter()).items()),
            )
            for name, (promise, unit) in CHECKS.items()
        )
        return Report(cluster, checks, tuple(self.violations), self.counts.copy(), self.last)

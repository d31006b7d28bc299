"""The report: violations with their places, and for each check its number of cases and whether it was complete.

If compaction or retention has removed records, a check says so and reports no violation that it cannot prove.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outfitter_verify.logs import Log, Partition, Place

CHECKS: Mapping[str, tuple[str, str]] = {
    "exclusivity": ("no device is in two live allocations, at any prefix of the ledger", "device grants"),
    "steps": ("allocations take only legal steps, and final ones stay final", "allocation records"),
    "tokens": ("each grant has a new fencing token, and a writer's tokens only grow", "tokens"),
    "commits": ("a writer's commits are complete and without a gap", "commits"),
    "positions": ("each commit continues in the input where the last one ended, never past its end", "positions"),
    "instances": ("no manager commits anything after its successor's first commit", "managers"),
    "writers": ("one writer at a time writes a host's records, each under its own key", "ledger records"),
    "partitions": ("every record is in the partition that its host's name hashes to", "records"),
    "answers": ("each registration that was read has an answer, and is read once", "registrations"),
    "dead-letters": ("each invalid message has one dead letter, with its bytes", "messages"),
    "inventory": ("granted devices were reported, and were healthy", "granted devices"),
    "operators": ("each operator has the devices that it named of its worker's grant", "operators"),
    "choices": ("each worker that takes certain devices only has such devices", "grants with clauses"),
    "queue": ("no worker overtakes an earlier one that waits for the same, or waits for free devices", "grants"),
    "orders": (
        "nothing is lent that an order takes out, and orders that were read are in effect until they end",
        "orders",
    ),
    "releases": (
        "devices are granted again only after a deregistration, a death or an expired lease, and once taken back",
        "releases",
    ),
    "history": ("history has every step, with the ledger's record", "transitions"),
    "replay": ("a replay of history gives the ledger, in every field of every record", "records"),
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
    """The verdict. `violations` is empty if all promises were kept. `complete`: no check had to leave anything out."""

    cluster: str
    checks: tuple[CheckResult, ...]
    violations: tuple[Violation, ...]
    counts: Mapping[str, int]
    """Numbers of commits, grants, managers, registrations, …."""
    last: Mapping[str, Mapping[str, Any]]
    """The last record of every allocation in the ledger, as parsed JSON, by key."""

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

    def begin_partition(self, partition: Partition) -> None:
        """Set the partition whose records the next findings are about."""
        self.logs = {log.topic: log for log in partition.logs}

    def count(self, check: str, times: int = 1) -> None:
        self.looked[check] += times

    def wrong(self, check: str, place: Place, what: str, *records: object) -> None:
        """Add a violation at `place`; `records` are other places that prove it."""
        log = self.logs.get(place.topic)
        record = log.at(place.offset) if log is not None else None
        time = record.timestamp_ms if record is not None else 0
        self.violations.append(Violation(check, place, what, tuple(map(str, records)), time))

    def note_partial(self, check: str, why: str) -> None:
        """Note that the check was incomplete, and why."""
        self.partial.setdefault(check, Counter())[why] += 1

    def report(self, cluster: str) -> Report:
        order = {name: number for number, name in enumerate(CHECKS)}
        self.violations.sort(key=lambda violation: (order[violation.check], violation.place))
        per_check = Counter(violation.check for violation in self.violations)
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

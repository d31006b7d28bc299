"""What a fault came to, a row each: printed as a table at the end of `make chaos`, and written as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, to_builtins

HEAD = ("fault", "Kafka", "events", "kills", "violations", "lost", "first answer", "longest gap", "bare loop")


class Row(Struct, frozen=True, kw_only=True):
    """One fault. `events`: what workers said around it. `kills`: processes that were killed, stopped or frozen,
    requests that came to harm. `first_answer_s`: until the last of the hosts had answered a registration that was said
    after the fault. `gap_s`: the longest time without a commit, of the host where that was longest. `bare_gap_s`: the
    same of the bare loops, where there were such and all of them came back."""

    fault: str
    kafka: str
    events: int
    kills: int
    violations: tuple[str, ...]
    lost: tuple[str, ...]
    first_answer_s: float
    gap_s: float
    bare_gap_s: float | None = None

    @property
    def clean(self) -> bool:
        return not self.violations and not self.lost


def seed() -> str:
    """`SEED` of the environment: what the load does, and whom the faults hit."""
    return os.environ.get("SEED", "1")


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.fault, row.kafka, str(row.events), str(row.kills), str(len(row.violations)), str(len(row.lost)),
        f"{row.first_answer_s:.1f} s", f"{row.gap_s:.1f} s",
        f"{row.bare_gap_s:.1f} s" if row.bare_gap_s is not None else "–",
    )  # fmt: skip


def document(rows: Sequence[Row], *, failed: int) -> Mapping[str, Any]:
    """The rows for programs."""
    return {
        "seed": seed(),
        "failed_tests": failed,
        "violations": sum(len(row.violations) for row in rows),
        "lost": sum(len(row.lost) for row in rows),
        "faults": [to_builtins(row) for row in rows],
    }

"""What the cells of the crash matrix came to: a Markdown table at the end of `make wild`, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, to_builtins


class Row(Struct, frozen=True, kw_only=True):
    """One cell.

    `outcome`: `kept` or `moved`, what became of the struck worker's device; `none`: the cell makes no sense, for a
    `reason`; `?`: the cell failed before it was known. `away_s`: the longest time in which nobody used a device that
    somebody waited for. `overlaps`: of living processes, as they saw them. `held`: who used what when, in seconds
    since the first use.
    """

    integration: str
    crash: str
    outcome: str
    away_s: float = 0.0
    overlaps: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    reason: str = ""


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown: a line for each integration, a column for each crash, reasons below."""
    crashes = list(dict.fromkeys(row.crash for row in rows))
    cells = {(row.integration, row.crash): row for row in rows}
    lines = [["integration", *crashes], ["---"] * (1 + len(crashes))]
    lines += [
        [integration, *(_cell(cells.get((integration, crash))) for crash in crashes)]
        for integration in dict.fromkeys(row.integration for row in rows)
    ]
    reasons = [f"- {row.integration}, {row.crash}: {row.reason}" for row in rows if row.reason]
    played = [row for row in rows if row.outcome != "none"]
    total = f"Cells: {len(played)}. Overlaps: {sum(len(row.overlaps) for row in rows)}."
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", total, *reasons])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.outcome == "none":
        return "–"
    found = f"moved in {row.away_s:.2f} s" if row.outcome == "moved" else row.outcome
    return f"{found}, OVERLAP" if row.overlaps else found


def document(rows: Sequence[Row], *, failed: int) -> Mapping[str, Any]:
    """The rows for programs."""
    return {
        "failed_tests": failed,
        "overlaps": sum(len(row.overlaps) for row in rows),
        "longest_away_s": max(row.away_s for row in rows),
        "cells": [to_builtins(row) for row in rows],
    }

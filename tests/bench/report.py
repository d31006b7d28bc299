"""Figures as rows, and rows as tables for people: a short one, and one with all. In JSON a row is an object of the same
fields."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

TURN = "longest turn"
"""How the names of rows about turns of the event loop begin."""


class Row(Struct):
    """One figure of ours, the bare loop's (None: there is none to compare with), and what was aimed at. `spread`: from
    the least to the greatest of the bare loop's rounds, as a share of the middle one; so much of a ratio may be chance.
    `matters`: it stands in the short table."""

    name: str
    unit: str
    outfitter: float | None
    bare: float | None = None
    ratio: float | None = None
    aim: str | None = None
    spread: float | None = None
    matters: bool = False

    def __post_init__(self) -> None:
        if self.outfitter is not None and self.bare:
            self.ratio = self.outfitter / self.bare


def spread(values: Sequence[float]) -> float:
    """From the least to the greatest, as a share of the middle one."""
    return (max(values) - min(values)) / statistics.median(values)


def short(rows: Sequence[Row]) -> list[Row]:
    """What a person looks at first, and the worst of the longest turns."""
    turns = [row for row in rows if row.name.startswith(TURN)]
    worst = max(turns, key=lambda row: row.outfitter or 0, default=None)
    longest = [Row(f"{TURN}, of all floods", "ms", worst.outfitter, aim=worst.aim)] if worst is not None else []
    return [*[row for row in rows if row.matters], *longest]


def table(rows: Sequence[Row], *, columns: tuple[str, str] = ("Outfitter", "bare loop")) -> str:
    """Columns that line up: what, Outfitter, bare, its spread, ratio, aim."""
    cells = [("", "", *columns, "±", "ratio", "aim")]
    cells += [
        (
            row.name,
            row.unit,
            _number(row.outfitter),
            _number(row.bare),
            f"{row.spread:.0%}" if row.spread is not None else "",
            _number(row.ratio),
            row.aim or "",
        )
        for row in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(7)]
    left = (True, True, False, False, False, False, True)
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _number(value: Any) -> str:
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"

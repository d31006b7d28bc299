"""Figures as rows, and rows as a table for people. In JSON a row is an object of the same fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct


class Row(Struct):
    """One figure of ours, the bare loop's (None: there is none to compare with), and what was aimed at."""

    name: str
    unit: str
    outfitter: float | None
    bare: float | None = None
    ratio: float | None = None
    aim: str | None = None

    def __post_init__(self) -> None:
        if self.outfitter is not None and self.bare:
            self.ratio = self.outfitter / self.bare


def table(rows: Sequence[Row], *, columns: tuple[str, str] = ("Outfitter", "bare loop")) -> str:
    """Columns that line up: what, Outfitter, bare, ratio, aim."""
    cells = [("", "", *columns, "ratio", "aim")]
    cells += [(r.name, r.unit, _number(r.outfitter), _number(r.bare), _number(r.ratio), r.aim or "") for r in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(6)]
    left = (True, True, False, False, False, True)
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

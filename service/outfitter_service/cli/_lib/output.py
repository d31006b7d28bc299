"""How results look: JSON for programs, tables and ages for people. Standard output is data.

Words (progress, warnings, errors) go to standard error, through `errors.warn` and the error edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from outfitter_proto.support.printable import printable, printable_json

NARROWEST = 40
"""Columns below which lines are not wrapped: the terminal itself does it as well."""

MOST_WRAPPED = 200
"""Rows beyond which a table is not wrapped: that takes a millisecond a row, and nobody reads so many."""

WIDEST = 64
"""Characters of a cell that widen the whole column; a longer one shifts what follows in its row alone."""

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def print_json(value: Any, *, indent: int = 0) -> None:
    """Print `value` (anything msgspec encodes; times in UTC, plain numbers): one line, or indented."""
    import msgspec

    encoded = msgspec.json.encode(value)
    click.echo(printable_json((msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()))


def say(line: str, *, err: bool = False) -> None:
    """Print one line for people. Whatever stands in it, it is one line, and moves nothing else on the terminal."""
    click.echo(printable(line), err=err)


def say_wrapped(line: str) -> None:
    """Print one line, which goes on below, indented, where a terminal is too narrow for it. In a pipe it stays one."""
    import shutil
    import sys
    import textwrap

    line = printable(line).rstrip()
    width = shutil.get_terminal_size().columns
    if sys.stdout is not None and sys.stdout.isatty() and width >= NARROWEST:
        line = "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * 4, break_on_hyphens=False))
    click.echo(line)


def document(text: str) -> None:
    """Print a document for another program as it is."""
    click.echo(text, nl=False)


def age(seconds: float) -> str:
    """A duration at a glance: `12s`, `5m`, `3h`, `2d`."""
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return "0s"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table without borders; None is shown as `-`. Its cells are wrapped at the terminal's width where that can
    be done between words and there are few rows, and never in a pipe. Nothing is cut off: one very long name shifts the
    rest of its own row, and widens no other."""
    import os
    import shutil
    import sys

    cells = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    table = [[heading.upper() for heading in headings], *cells]
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    if on_terminal and len(cells) <= MOST_WRAPPED:
        width = shutil.get_terminal_size().columns
        if _narrowest(table) <= width < _natural(table):
            _print_wrapped(table, width)
            return
    columns = zip(*table, strict=True)
    widths = [max((width for width in map(_columns, column) if width <= WIDEST), default=0) + 2 for column in columns]
    lines = ["".join(map(_padded, row, widths)).rstrip() for row in table]
    if on_terminal and not os.environ.get("NO_COLOR"):
        lines[0] = click.style(lines[0], bold=True)
    click.echo("\n".join(lines))


def _padded(cell: str, width: int) -> str:
    """A cell and at least two blanks."""
    return cell + " " * max(2, width - _columns(cell))


def _columns(text: str) -> int:
    """The columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _print_wrapped(table: Sequence[Sequence[str]], width: int) -> None:
    import os

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # rich leaves bold type in when told NO_COLOR; those who set it want no escapes at all
    style = "" if os.environ.get("NO_COLOR") else "bold"
    wrapped = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), header_style=style)
    for heading in table[0]:
        wrapped.add_column(heading, overflow="fold")
    for row in table[1:]:
        wrapped.add_row(*map(Text, row))
    Console(width=width, highlight=False).print(wrapped)


def _natural(rows: Sequence[Sequence[str]]) -> int:
    """The columns that a table needs in which nothing is wrapped."""
    return sum(max(map(_columns, column)) + 2 for column in zip(*rows, strict=True))


def _narrowest(rows: Sequence[Sequence[str]]) -> int:
    """The columns that a table needs in which no word is broken."""
    columns = zip(*rows, strict=True)
    return sum(max(len(word) for cell in column for word in cell.split(" ")) + 2 for column in columns)

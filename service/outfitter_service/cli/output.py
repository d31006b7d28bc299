"""How results look: JSON for programs, tables and ages for people. Standard output is data.

Words (progress, warnings, errors) go to standard error, through `errors.warn` and the error edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from outfitter_proto.printable import printable, printable_json

NARROWEST = 40
"""Columns below which lines are not wrapped: the terminal itself does it as well."""

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
    be done between words, and never in a pipe."""
    import os
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    # rich leaves bold type in when told NO_COLOR; those who set it want no escapes at all
    style = "" if os.environ.get("NO_COLOR") else "bold"
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), header_style=style)
    for heading in headings:
        table.add_column(heading.upper(), overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    if sys.stdout is not None and sys.stdout.isatty():
        screen = Console(highlight=False)
        if _narrowest([headings, *cells]) <= screen.width:
            screen.print(table)
            return
    console = Console(width=100_000, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _narrowest(rows: Sequence[Sequence[str]]) -> int:
    """The columns that a table needs in which no word is broken."""
    columns = zip(*rows, strict=True)
    return sum(max(len(word) for cell in column for word in cell.split(" ")) + 2 for column in columns)

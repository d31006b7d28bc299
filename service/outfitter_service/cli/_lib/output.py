"""Prints results on standard output: JSON for programs, tables and ages for people.

Progress, warnings and errors go to standard error, through `errors.warn` and `errors.print_error`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from outfitter_proto.support.printable import printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console

    from outfitter_service.query.device_totals import ResourceTotals

NARROWEST = 40
"""Terminal width below which we do not wrap lines: the terminal itself does it."""

MOST_WRAPPED = 200
"""Most rows of a table that is wrapped, which takes a millisecond a row."""

WIDEST = 64
"""Most characters by which a cell widens its column. A longer cell only shifts the rest of its row."""

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def print_json(value: Any, *, indent: int = 0) -> None:
    """Print `value` (anything msgspec encodes; times in UTC, plain numbers): one line, or indented."""
    import msgspec

    encoded = msgspec.json.encode(value)
    click.echo(printable_json((msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()))


def say(line: str, *, err: bool = False) -> None:
    """Print one line for people, with all control characters escaped."""
    click.echo(printable(line), err=err)


def say_wrapped(line: str) -> None:
    """Print one line. In a narrow terminal it is wrapped with an indent, but never in a pipe."""
    import shutil
    import sys
    import textwrap

    line = printable(line).rstrip()
    width = shutil.get_terminal_size().columns
    if sys.stdout is not None and sys.stdout.isatty() and width >= NARROWEST:
        line = "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * 4, break_on_hyphens=False))
    click.echo(line)


def document(text: str) -> None:
    """Print a document for another program unchanged."""
    click.echo(text, nl=False)


def say_totals(found: Iterable[ResourceTotals]) -> None:
    """Print how many devices there are of each resource, and of each model if there are several."""
    from outfitter_service.query.device_totals import rows_of

    for name, numbers in rows_of(found):
        say_wrapped(f"{name}: {numbers}")


def age(seconds: float) -> str:
    """A duration at a glance: `12s`, `5m`, `3h`, `2d`."""
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return "0s"


def ago(moment: datetime) -> str:
    """How long ago a moment was: `12s ago`."""
    return f"{age(max(0.0, (datetime.now(UTC) - moment).total_seconds()))} ago"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table without borders; None is shown as `-`.

    In a terminal, cells of small tables are wrapped between words. Nothing is cut off: a very long name shifts the rest
    of its own row only.
    """
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


def console(**options: Any) -> Console:
    """A console of rich that leaves a closed pipe to the command line's edge. Rich itself would end the process."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipedConsole(highlight=False, **options)


def _padded(cell: str, width: int) -> str:
    """A cell and at least two blanks."""
    return cell + " " * max(2, width - _columns(cell))


def _columns(text: str) -> int:
    """The width of a text on a terminal, in columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _print_wrapped(table: Sequence[Sequence[str]], width: int) -> None:
    import os

    from rich.table import Table
    from rich.text import Text

    # rich keeps bold type with NO_COLOR, but users of NO_COLOR want no escapes at all
    style = "" if os.environ.get("NO_COLOR") else "bold"
    wrapped = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), header_style=style)
    for heading in table[0]:
        wrapped.add_column(heading, overflow="fold")
    for row in table[1:]:
        wrapped.add_row(*map(Text, row))
    console(width=width).print(wrapped)


def _natural(rows: Sequence[Sequence[str]]) -> int:
    """The width of the table without wrapping, in columns."""
    return sum(max(map(_columns, column)) + 2 for column in zip(*rows, strict=True))


def _narrowest(rows: Sequence[Sequence[str]]) -> int:
    """The least width of the table without broken words, in columns."""
    columns = zip(*rows, strict=True)
    return sum(max(len(word) for cell in column for word in cell.split(" ")) + 2 for column in columns)

"""Parses `external-resources`, the list of resources.

It is split as in Flink (`StructuredOptionsSplitter`: `;`, items trimmed, quotes around whole items). Blanks, `none`
among other items, commas and invalid names are errors, while Flink silently uses them as names.
"""

from __future__ import annotations

import re

from outfitter_proto.names import InvalidNameError, check_name
from outfitter_service.config.problems import shorten

NONE = "none"
MAX_NAMES = 1_000
"""Most resources of one host: far more than there are kinds of devices."""


class ItemError(ValueError):
    """An item that names no resource. `item`: its text; `suggestion`: the probable intention."""

    def __init__(self, item: str, problem: str, suggestion: str | None = None) -> None:
        super().__init__(problem)
        self.item = item
        self.problem = problem
        self.suggestion = suggestion


def resource_names(value: str | list[str] | None) -> tuple[list[str], list[ItemError]]:
    """The names in their order, each once, and the errors of the other items."""
    if value is None or (isinstance(value, str) and value.strip() in {"", NONE}):
        return [], []
    try:
        items = [item.strip() for item in value] if isinstance(value, list) else _items(value.strip())
    except ItemError as error:
        return [], [error]
    if len(items) > MAX_NAMES:
        return [], [ItemError(f"{len(items)} items", f"lists {len(items)} resources; at most {MAX_NAMES} are read")]
    names: dict[str, None] = {}
    errors: list[ItemError] = []
    for position, item in enumerate(items, 1):
        try:
            names[_checked(item, position)] = None
        except ItemError as error:
            errors.append(error)
    return list(names), errors


def _checked(item: str, position: int) -> str:
    if not item:
        raise ItemError(item, f"item {position} of the list is blank; every item must name a resource")
    if item == NONE:
        raise ItemError(
            item,
            f"item {position} of the list is 'none', which means an empty list and can only be the whole value",
            "remove it, or write `none` alone",
        )
    try:
        return check_name(item, "resource")
    except InvalidNameError as error:
        suggestion = f"did you mean ;? {item.replace(',', ';')}" if "," in item else None
        raise ItemError(item, f"item {position} of the list: {error}", suggestion) from error


def _items(text: str) -> list[str]:
    if text.startswith("[") and text.endswith("]"):
        # a YAML flow list that arrived as text, as Flink itself writes lists into strings
        return _split(text[1:-1], ",")
    return _split(text, ";")


_QUOTED = re.compile(r"""(?:'((?:[^']|'')*)'|"((?:[^"]|"")*)")\s*""")


def _split(text: str, delimiter: str) -> list[str]:
    """The trimmed items. One delimiter at the end is allowed."""
    items: list[str] = []
    position, end = 0, len(text)
    while position < end:
        if text[position].isspace():
            position += 1
        elif quoted := _QUOTED.match(text, position):
            items.append(
                (quoted[1].replace("''", "'") if quoted[1] is not None else quoted[2].replace('""', '"')).strip()
            )
            position = quoted.end()
            if position < end and text[position] != delimiter:
                raise ItemError(text, f"text follows a closing quote: {shorten(text[position:])}")
            position += 1
        elif text[position] in "'\"":
            raise ItemError(text, f"the quote {text[position]} is never closed")
        else:
            following = text.find(delimiter, position)
            following = end if following < 0 else following
            items.append(text[position:following].strip())
            position = following + 1
    return items

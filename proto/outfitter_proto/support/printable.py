"""Foreign text as a terminal, a log and a table can bear it: what others wrote moves no cursor and forges no line."""

from __future__ import annotations

import re

_NOT_PLAIN = re.compile(r"[^ -~]")


def printable(text: str) -> str:
    """The text with everything that is not printable escaped as Python writes it: controls (C0 and C1, the escape
    character and line breaks among them), bidirectional controls, invisible characters, blanks other than the space,
    halves of characters. Letters of any script stay."""
    return _NOT_PLAIN.sub(_escaped, text)


def printable_json(document: str) -> str:
    """A JSON document that means the same and has nothing in its strings that is not printable; it needs no other care,
    since outside its strings JSON is ASCII. Line feeds stay: in JSON they stand between values only."""
    return _NOT_PLAIN.sub(lambda match: match[0] if match[0] == "\n" else _escaped_in_json(match[0]), document)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _escaped_in_json(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))

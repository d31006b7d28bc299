"""Makes foreign text safe for terminals, logs and tables: it can move no cursor and forge no line."""

from __future__ import annotations

import re

_NOT_PLAIN = re.compile(r"[^ -~]")


def printable(text: str) -> str:
    """The text with unprintable characters escaped as in Python: controls (C0 and C1 with escape and line breaks),
    bidirectional controls, invisible characters, blanks other than the space, halves of characters. Letters of any
    script stay."""
    return _NOT_PLAIN.sub(_escaped, text)


def printable_json(document: str) -> str:
    """The same JSON document with the unprintable characters in its strings escaped. Outside of strings JSON is ASCII.
    Line feeds stay, because in JSON they occur only between values."""
    return _NOT_PLAIN.sub(lambda match: match[0] if match[0] == "\n" else _escaped_in_json(match[0]), document)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _escaped_in_json(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def counted(number: int, noun: str) -> str:
    """The number with its noun, which takes an s in the plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

"""Durations as text, such as `30s` and `1h30m`, and as floats of seconds.

A number without a unit is seconds. Only decimal digits are valid: no signs, no exponents, no infinity.
"""

from __future__ import annotations

import re

LONGEST_S = 366 * 86_400.0
"""The longest duration of a setting or an option, as on the wire: no timer and no date overflows."""

_SECONDS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_PART = rf"({_NUMBER})\s*(ms|sec|s|min|m|h|d)\s*"

_LARGEST_FIRST = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))


def parse_duration(text: str) -> float:
    """Seconds from `30s`, `500ms`, `1h30m`, `2 min`, or a plain number of seconds.

    Raises:
        ValueError: any other text; the message has the valid forms.
    """
    stripped = text.strip()
    if re.fullmatch(_NUMBER, stripped):
        return float(stripped)
    pattern, position, seconds = re.compile(_PART), 0, 0.0
    while part := pattern.match(stripped, position):
        seconds += float(part[1]) * _SECONDS[part[2]]
        position = part.end()
    if not stripped or position != len(stripped):
        shown = text if len(text) <= 80 else f"{text[:80]}…"
        raise ValueError(f"{shown!r} is no duration: write 30s, 500ms, 5m, 1h30m or 2d")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest exact spelling down to milliseconds: `90.5` is `1m30s500ms`, `0` is `0s`."""
    rest = round(seconds * 1_000)
    parts: list[str] = []
    for unit, size in _LARGEST_FIRST:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"

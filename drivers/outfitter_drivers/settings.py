"""Reads a driver's `param.*` settings with types. Errors have the key, the value and the valid values.

Driver authors may use it. A driver sees only strings: the service handles files, precedence and the resource's keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from outfitter_proto.support.units import format_duration, parse_duration

MAX_DEVICES = 10_000
"""More devices of one resource than any host has. A larger number is a typing error."""

_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)
_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class SettingError(ValueError):
    """A setting of a driver is wrong.

    `key`: its name without `param.`. `problem`: the rest of the sentence, with the value and the valid values.
    `suggestion`: the name that was probably meant.
    """

    def __init__(self, key: str, problem: str, *, suggestion: str | None = None) -> None:
        super().__init__(f"{key} {problem}" + (f"; did you mean {suggestion!r}?" if suggestion is not None else ""))
        self.key = key
        self.problem = problem
        self.suggestion = suggestion


def reject_unknown(params: Mapping[str, str], known: Collection[str], *, prefixes: Collection[str] = ()) -> None:
    """Raise SettingError for the first setting that is neither `known` nor starts with one of `prefixes`."""
    for key in params:
        if key in known or any(key.startswith(prefix) for prefix in prefixes):
            continue
        valid = [*known, *(f"{prefix}…" for prefix in prefixes)]
        nearest = difflib.get_close_matches(key, valid, n=1)
        known_are = "" if nearest else f"; known are {', '.join(valid)}"
        raise SettingError(key, f"is an unknown setting{known_are}", suggestion=nearest[0] if nearest else None)


def whole_number(params: Mapping[str, str], key: str, *, minimum: int, maximum: int) -> int | None:
    """The setting as a decimal number between the bounds; None if it is missing.

    Raises:
        SettingError: any other value.
    """
    text = params.get(key)
    if text is None:
        return None
    stripped = text.strip()
    if not _NUMBER.fullmatch(stripped) or not minimum <= int(stripped) <= maximum:
        raise SettingError(key, f"is {text!r}; valid is a whole number from {minimum} to {maximum}")
    return int(stripped)


def seconds(params: Mapping[str, str], key: str, *, default: float, maximum: float) -> float:
    """The setting as a duration in seconds (see `outfitter_proto.support.units`); `default` if it is missing.

    Raises:
        SettingError: any other value, or above `maximum` seconds.
    """
    text = params.get(key)
    if text is None:
        return default
    try:
        value = parse_duration(text)
    except ValueError as problem:
        raise SettingError(key, f"cannot be read: {problem}") from None
    if not 0 < value <= maximum:
        raise SettingError(key, f"is {text!r}; valid is above 0 and at most {format_duration(maximum)}")
    return value


def require_amount(amount: int) -> None:
    """Raise ValueError unless `amount` is 1 or more."""
    if amount < 1:
        raise ValueError(f"{amount} devices wanted; valid is 1 or more")


def flag(params: Mapping[str, str], key: str, *, default: bool) -> bool:
    """The setting as a truth value; `default` if it is missing.

    Raises:
        SettingError: any other value.
    """
    text = params.get(key)
    if text is None:
        return default
    value = _FLAGS.get(text.strip().lower())
    if value is None:
        raise SettingError(key, f"is {text!r}; valid is true or false")
    return value


def items(text: str) -> list[str]:
    """The trimmed items of a list split on `;` (as `external-resources` is), without blank ones."""
    return [item for part in text.split(";") if (item := part.strip())]

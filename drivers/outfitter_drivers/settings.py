"""Reading a driver's `param.*` settings: typed, and with errors that name the key, what was found and what is valid.

Driver authors may use it; nothing obliges them to. Not a configuration system: files, precedence and the
resource's own keys are the service's, a driver sees only strings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|sec|m|min|h)?", re.ASCII)
_UNIT_SECONDS = {None: 1.0, "ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def reject_unknown(params: Mapping[str, str], known: Collection[str], *, prefixes: Collection[str] = ()) -> None:
    """Raise ValueError for the first setting that is neither `known` nor starts with one of `prefixes`."""
    for key in params:
        if key in known or any(key.startswith(prefix) for prefix in prefixes):
            continue
        valid = [*known, *(f"{prefix}…" for prefix in prefixes)]
        nearest = difflib.get_close_matches(key, valid, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(valid)}"
        raise ValueError(f"unknown setting {key!r}; {hint}")


def whole_number(params: Mapping[str, str], key: str, *, minimum: int, maximum: int) -> int | None:
    """The setting as a decimal number between the bounds, None if it is not there.

    Raises:
        ValueError: it is anything else.
    """
    text = params.get(key)
    if text is None:
        return None
    stripped = text.strip()
    if not _NUMBER.fullmatch(stripped) or not minimum <= int(stripped) <= maximum:
        raise ValueError(f"{key} is {text!r}; valid is a whole number from {minimum} to {maximum}")
    return int(stripped)


def seconds(params: Mapping[str, str], key: str, *, default: float, maximum: float) -> float:
    """The setting as a duration in seconds: a number with an optional unit (ms, s, min, h), above 0.

    Raises:
        ValueError: it is anything else, or above `maximum` seconds.
    """
    text = params.get(key)
    if text is None:
        return default
    match = _DURATION.fullmatch(text.strip())
    value = float(match[1]) * _UNIT_SECONDS[match[2]] if match else 0.0
    if not 0 < value <= maximum:
        raise ValueError(f"{key} is {text!r}; valid is a duration such as 10s or 500ms, above 0, at most {maximum:g}s")
    return value


def flag(params: Mapping[str, str], key: str, *, default: bool) -> bool:
    """The setting as a yes or no.

    Raises:
        ValueError: it is neither.
    """
    text = params.get(key)
    if text is None:
        return default
    value = _FLAGS.get(text.strip().lower())
    if value is None:
        raise ValueError(f"{key} is {text!r}; valid is true or false")
    return value


def items(text: str) -> list[str]:
    """The trimmed items of a list that is split on `;`, as `external-resources` is; blank ones are left out."""
    return [item for part in text.split(";") if (item := part.strip())]

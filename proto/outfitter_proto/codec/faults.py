"""Finds the exact field of a fault in a refused message.

msgspec says `$.resources[...].amount` without the resource. So this module halves the mapping and keeps the half that
msgspec still refuses for the same reason, until one key is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from outfitter_proto.records import Register, Registration

MAX_SHOWN = 80

A_NAME = "Expected a name (1 to 253 letters, digits, '.', '_' and '-', the first a letter or a digit)"

_AT = re.compile(r"^(?P<problem>.*) - at `(?P<path>\$[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>[0-9]+)\]|(?P<any>\[\.\.\.\])")
_PLAIN = re.compile(r"[A-Za-z_@][A-Za-z0-9_@-]{0,80}")

_HALF = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
    rb"(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Everything before the first escape that is half of a surrogate pair, and that escape."""

_UTF_16 = "the message is UTF-16; send UTF-8"
_NO_TEXT = {
    b"\xef\xbb\xbf": "the message begins with a byte order mark; leave these three bytes out",
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"{\0": _UTF_16,
    b"\0{": _UTF_16,
    b"\0": "the message begins with a zero byte, as a schema registry's frame does (the schema's id follows, 4 bytes); "
    "send plain JSON",
}
"""What a message that some programs write begins with, in this order. Of the frame: Confluent's wire format."""

Step = str | int
_NOTHING = object()


class Fault(NamedTuple):
    """A fault. `field`: its JSON path (`$.resources.gpu.amount`), None if the whole message is wrong."""

    problem: str
    field: str | None


def not_text(body: bytes) -> str | None:
    """Why `body` is no JSON text, in clearer words than msgspec's; None if all of it is text."""
    for beginning, problem in _NO_TEXT.items():
        if body.startswith(beginning):
            return problem
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"the message is not UTF-8 (byte {error.start})"
    half = _HALF.match(body)
    if half is None:
        return None
    shown, at = half[1].decode(), half.start(1)
    return f"{shown} is half of a character: the other half of the surrogate pair is missing (byte {at})"


def locate(body: bytes, kind: Any, error: Exception) -> Fault:
    """The fault in `body`. msgspec has refused with `error` to decode it as `kind`."""
    text = str(error)
    match = _AT.match(text)
    if match is None and not _MISSING.match(text):
        return Fault(not_text(body) or text, None)
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Fault(match["problem"] if match else text, match["path"] if match else None)
    if match is None:
        return Fault(text, path(_missing(text, ())))
    steps = _Search(kind, text).concrete(document, match["path"])
    if steps is None:
        return Fault(match["problem"], match["path"])
    value = _value_at(document, steps)
    problem = match["problem"]
    if problem.startswith("Invalid value "):  # the message has the value already
        return Fault(problem, path(steps))
    if _MISSING.match(problem):
        return Fault(problem, path(_missing(problem, steps)))
    return Fault(f"{problem}; found {_shown(value)}" if value is not _NOTHING else problem, path(steps))


def misnamed(message: Registration, is_name: Callable[[str], object]) -> Fault:
    """The first invalid name in `message`, which has one. `is_name` tests a name."""
    for field in ("host", "worker", "incarnation"):
        value = getattr(message, field)
        if value is not None and not is_name(value):
            return Fault(f"{A_NAME}; found {_shown(value)}", f"$.{field}")
    mappings: dict[tuple[str, ...], Iterable[str]] = {}
    if isinstance(message, Register):
        operators = message.operators or {}
        mappings = {("resources",): message.resources or (), ("operators",): operators}
        mappings |= {("operators", operator): requests for operator, requests in operators.items()}
    return next(
        Fault(f"{A_NAME} as a key; found {_shown(key)}", path(steps))
        for steps, keys in mappings.items()
        for key in keys
        if not is_name(key)
    )


def _missing(problem: str, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    match = _MISSING.match(problem)
    return (*steps, match["field"]) if match else steps


class _Search:
    """Finds the keys for `[...]` in a path of a fault. `text`: msgspec's error for the whole message."""

    def __init__(self, kind: Any, text: str) -> None:
        self._kind = kind
        self._text = text

    def concrete(self, document: Any, path: str) -> tuple[Step, ...] | None:
        """The path with its real keys; None if not found."""
        steps: tuple[Step, ...] = ()
        for step in _STEP.finditer(path):
            if step["any"]:
                key = self._guilty(document, steps)
                if key is None:
                    return None
                steps += (key,)
            else:
                steps += (int(step["index"]) if step["index"] else step["name"],)
        return steps

    def _guilty(self, document: Any, steps: tuple[Step, ...]) -> str | None:
        mapping = _value_at(document, steps)
        if not isinstance(mapping, dict):
            return None
        keys = list(mapping)
        while len(keys) > 1:
            half = keys[: len(keys) // 2]
            refused = self._refused(_with(document, steps, {key: mapping[key] for key in half}))
            keys = half if refused else keys[len(half) :]
        return str(keys[0]) if keys else None

    def _refused(self, document: Any) -> bool:
        try:
            msgspec.convert(document, self._kind)
        except msgspec.ValidationError as error:
            return str(error) == self._text
        return False


def _value_at(document: Any, steps: Iterable[Step]) -> Any:
    """The value at a path; `_NOTHING` if there is none."""
    for step in steps:
        try:
            document = document[step]
        except (KeyError, IndexError, TypeError):
            return _NOTHING
    return document


def _with(document: Any, steps: tuple[Step, ...], value: Any) -> Any:
    """A copy of `document`, as deep as necessary, with another value at `steps`."""
    if not steps:
        return value
    copy: Any = document.copy()
    copy[steps[0]] = _with(copy[steps[0]], steps[1:], value)
    return copy


def path(steps: Iterable[Step]) -> str:
    """The JSON path of these steps: `$.resources.gpu.amount`."""
    parts = ["$"]
    for step in steps:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        else:
            parts.append(f".{step}" if _PLAIN.fullmatch(step) else f"[{_shown(step)}]")
    return "".join(parts)


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"

"""Kinds of a context's arguments. A wrong kind is refused in words, before it fails where nobody wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outfitter.errors import InvalidRequestError
from outfitter_proto.records import Owner

_TEXT = (str,), "text"
_AMOUNTS = (Mapping,), "amounts by resource, such as {'gpu': 1}"
_REQUESTS = (
    (Mapping,),
    "amounts by resource, such as {'gpu': 1}, or {'gpu': {'amount': 1, 'where': {'model': '*H100*'}}}",
)
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "resources": _REQUESTS,
    "operators": ((Mapping,), "amounts by operator and resource, such as {'infer': {'gpu': 1}}"),
    "labels": ((Mapping,), "text by name"),
    "operator": _TEXT,
    "bus": _TEXT,
    "cluster": _TEXT,
    "host": _TEXT,
    "worker": _TEXT,
    "shared": _TEXT,
    "wait_for_manager": ((bool, int, float), "True, False or seconds"),
    "owner": ((bool, Owner), "True, False or an Owner; `ends_with` takes a pid"),
    "on_lease_at_risk": ((Callable,), "a function"),  # type: ignore[dict-item]  # an abstract class
    "ends_with": ((int, str, Owner), "a pid, a command's name or an Owner"),
}
"""By argument: its types, and the same in words. None is a value of every argument."""


def check_kinds(**arguments: object) -> None:
    """Return if each argument has a type that it may have.

    Raises:
        InvalidRequestError: one has not; the message names it.
    """
    for name, value in arguments.items():
        _check(name, value, *_KINDS[name])
    operators = arguments.get("operators")
    if isinstance(operators, Mapping):
        for operator, amounts in operators.items():
            _check(f"operators.{operator}", amounts, *_AMOUNTS)
    if isinstance(arguments.get("ends_with"), bool):  # it is an int, too
        _check("ends_with", arguments["ends_with"], (), _KINDS["ends_with"][1])


def _check(name: str, value: object, types: tuple[type, ...], words: str) -> None:
    if value is not None and not isinstance(value, types):
        raise InvalidRequestError(f"{name} is {value!r}; it must be {words}", code="invalid-request")

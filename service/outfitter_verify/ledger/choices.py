"""Each worker that takes certain devices only has such devices, and its record keeps saying so until then.

Written from the documentation alone (proto/README.md, Which devices), as all of the checker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import islice, product
from typing import Any

from outfitter_verify.wire import Allocation, Choice

_NUMBER = re.compile(r"(?P<sign>-?)(?P<digits>\d{1,19}(\.\d{1,19}){0,7}) ?(?P<unit>k|[KMGTPE]i|[MGTPE])?B?", re.ASCII)
_POWERS = " kMGTPE"
_WORDS = frozenset({"is", "not", "min", "max", "exists"})
MOST_LISTED = 64
"""So many values of a list count. Where there are more, nobody knows which it has not."""
MOST_GROUPS = 4096
"""In so many groups of devices with something in common one device is looked for."""


def faults(record: Allocation, before: Allocation | None) -> Iterator[str]:
    """The faults in a grant, as text. `before`: the record of the waiting worker, or None."""
    waited, counted = before.request.choices if before is not None else {}, record.request.choices
    granted = record.body.get("resources") or {}
    for resource in waited:
        if resource in record.request.amounts and waited[resource] != counted.get(resource):
            yield f"{record.key} was granted {resource} by other clauses than those with which it waited"
    for resource, choice in {**waited, **counted}.items():
        infos = granted.get(resource) or []
        for info in infos:
            for name, clause in choice.where.items():
                if not meets(clause, name, info):
                    yield f"{record.key} has {info['id']} of {resource}, which is not as its clause on {name} says"
        for name in choice.same if len({info["id"] for info in infos}) > 1 else ():
            if not set.intersection(*[{_value(each) for each in _listed(_text(info, name))} for info in infos]):
                yield f"{record.key} has {len(infos)} {resource}, which have no value of {name} in common"


def could_take(waiter: Allocation, resource: str, granted: Allocation) -> bool:
    """Whether an earlier waiter surely takes some device of another one's grant, as one of this resource."""
    choice = waiter.request.choices.get(resource)
    if choice is None:
        return True
    infos = (granted.body.get("resources") or {}).get(resource) or []
    return not choice.same and any(
        all(meets(clause, name, info) for name, clause in choice.where.items()) for info in infos
    )


def largest(choice: Choice, devices: Iterable[str], properties: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The most of these devices that a worker takes together. `properties`: as the host's record has them."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for device in devices:
        info = {"local_index": "none", **properties[device], "id": device}
        if all(meets(clause, name, info) for name, clause in choice.where.items()):
            common = [dict.fromkeys(map(_value, _listed(_text(info, name)))) for name in choice.same]
            for values in islice(product(*common), MOST_GROUPS):
                groups.setdefault(values, []).append(device)
    return max(groups.values(), key=len, default=[])


def is_known(record: Allocation) -> bool:
    """Whether this version knows all words of a record's clauses."""
    clauses = [clause for choice in record.request.choices.values() for clause in choice.where.values()]
    return all(clause.keys() <= _WORDS for clause in clauses if isinstance(clause, dict))


def meets(clause: Any, name: str, info: Mapping[str, str]) -> bool:
    """Whether a device, by its info, meets a clause on the property `name`."""
    if name == "index" and info.get(name) == info.get("local_index"):
        return True  # a device without a number of its own has its place in the grant there
    said = clause if isinstance(clause, dict) else {"is": clause}
    text = _text(info, name)
    values = list(dict.fromkeys([text, *_listed(text)])) if text else []
    if "exists" in said and said["exists"] != bool(values):
        return False
    if "not" in said and (text.count(",") >= MOST_LISTED or any(_is(value, said["not"]) for value in values)):
        return False
    return not said.keys() & {"is", "min", "max"} or any(_fits(value, said) for value in values)


def _text(info: Mapping[str, Any], name: str) -> str:
    text = info.get(name)
    return text if isinstance(text, str) else ""


def _fits(value: str, said: Mapping[str, Any]) -> bool:
    if "is" in said and not _is(value, said["is"]):
        return False
    number = _number(value)
    if "min" in said and (number is None or number < (_number(str(said["min"])) or [])):
        return False
    return "max" not in said or (number is not None and number <= (_number(str(said["max"])) or []))


def _is(value: str, said: Any) -> bool:
    return any(_matches(value, str(one)) for one in (said if isinstance(said, list) else [said]))


def _matches(value: str, said: str) -> bool:
    if "*" not in said and "?" not in said:
        return _value(value) == _value(said)
    reached = {0}
    for char in said:  # the places in `value` that the pattern can have reached
        if char == "*":
            reached = set(range(min(reached), len(value) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(value) and char in ("?", value[at])}
        if not reached:
            return False
    return len(value) in reached


def _value(text: str) -> str | tuple[int, ...]:
    number = _number(text)
    return text if number is None else tuple(number)


def _listed(text: str) -> list[str]:
    if "," not in text:
        return [text] if text else []
    return [part.strip() for part in text.split(",")[:MOST_LISTED] if part.strip()]


def _number(text: str) -> list[int] | None:
    """The number that a text is: its parts between dots, without zeros at the end; None: it is no number."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, parts, unit = -1 if match["sign"] else 1, match["digits"].split("."), match["unit"]
    if unit:
        power = _POWERS.index(unit[0]) if unit[0] != "K" else 1
        whole = Fraction(match["digits"]) * (1024 if unit.endswith("i") else 1000) ** power if len(parts) < 3 else None
        return [sign * whole.numerator] if whole is not None and whole.denominator == 1 else None
    numbers = [int(part) for part in parts]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return None if sign < 0 and len(numbers) > 1 else [sign * numbers[0], *numbers[1:]]

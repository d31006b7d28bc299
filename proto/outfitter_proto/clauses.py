"""Choosing devices by their properties: what a clause means, the same for managers, workers and tests.

A worker says of each resource which devices it takes. `where` has a clause for each property that counts, and a device
must meet all of them. `same` names properties of which all devices of the grant have a value in common. There is no
language and no order: each clause is data, so every refusal can name the clause and count what it excluded.

Properties are text. This module says what the text means:

- A property with commas is a list. Such a device meets a clause if the whole text does, or one of its values.
- A text is a number if it is whole (`8`, `-1`), has dots (`8.10`, `550.54.14`) or a unit (`40Gi`, `80GB`, `1.5k`). Two
  numbers are compared as numbers, and those with dots as versions: 8.9 is less than 8.10. Any other text is text.
- `*` stands for any text in a clause, `?` for one character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

from msgspec import UNSET, Struct, UnsetType

from outfitter_proto.records import (
    MAX_CLAUSES,
    MAX_SAME,
    Clause,
    ClauseValue,
    Condition,
    ResolvedRequest,
    ResourceChoice,
)

MAX_VALUES = 64
"""Most values of one clause."""
MAX_PATTERNS = 16
"""Most values with `*` or `?` in `where` of one resource: only these are compared one by one."""
MAX_TEXT = 256
"""Most characters of a property's name, and of a value in a clause."""
MAX_LISTED = 64
"""Most values of a property that is a list. The values behind these do not count, and no `not` is met."""

UNITS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
"""What a unit multiplies by. A B may follow it."""
NUMBER_FORMS = "8, 8.10, 40Gi, 80GB"
"""Numbers as they are written, for messages."""

OF_THE_GRANT = frozenset({"local_index", "health", "health.reason"})
"""Properties that a device has only in a grant, so that nothing can be chosen by them."""

_NUMBER = re.compile(r"(-?)([0-9]{1,19}(?:\.[0-9]{1,19}){0,7}) ?(?:(k|Ki|[MGTPE]i?)?B?)")
_SHOWN = 64
"""Most characters of a device's property in a message."""
_ANY = frozenset("*?")

Number = tuple[int, ...]
"""A number as its parts between the dots, without zeros at its end: it compares as a version."""


class Clauses(Struct, frozen=True, omit_defaults=True):
    """What a request says of one resource's devices. Equal requests have equal clauses, which can be keys."""

    where: tuple[tuple[str, Condition], ...] = ()
    """By property, in alphabetical order."""
    same: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.where or self.same)


def clauses_of(where: Mapping[str, Clause] | UnsetType | None, same: Sequence[str] | UnsetType | None) -> Clauses:
    """The clauses of a request. A clause that is only a value or a list means `is`."""
    return Clauses(
        where=tuple([(name, condition_of(clause)) for name, clause in sorted((where or {}).items())]),
        same=tuple(sorted(set(same or ()))),
    )


def choice_of(clauses: Clauses) -> ResourceChoice:
    """Clauses as they stand in a record."""
    return ResourceChoice(where=dict(clauses.where), same=list(clauses.same))


def chosen(request: ResolvedRequest) -> dict[str, Clauses]:
    """The clauses of a record by resource, without resources that have none."""
    if request.choices is UNSET:
        return {}
    return {name: clauses_of(choice.where, choice.same) for name, choice in request.choices.items()}


def condition_of(clause: Clause) -> Condition:
    return clause if isinstance(clause, Condition) else Condition(is_=clause)


# --- numbers, lists, patterns ---------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def number(text: str) -> Number | None:
    """The number that a text is, or None."""
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_TEXT else None
    if match is None:
        return None
    sign, digits, unit = match.groups(default="")
    if unit:
        if digits.count(".") > 1:
            return None
        amount = Fraction(digits) * UNITS[unit]
        parts = [amount.numerator] if amount.denominator == 1 else []
    else:
        parts = [int(part) for part in digits.split(".")]
        while len(parts) > 1 and not parts[-1]:
            parts.pop()
    if not parts or (sign and len(parts) > 1):
        return None
    return (-parts[0], *parts[1:]) if sign else tuple(parts)


def listed(text: str) -> list[str]:
    """The values of a property."""
    if "," not in text:
        return [text] if text else []
    return [value for part in text.split(",", MAX_LISTED)[:MAX_LISTED] if (value := part.strip())]


def alike(text: str) -> str | Number:
    """What a value is compared by: equal values have an equal one, such as 41943040Ki and 40Gi."""
    as_number = number(text)
    return text if as_number is None else as_number


def is_pattern(value: ClauseValue) -> bool:
    return isinstance(value, str) and not _ANY.isdisjoint(value)


def pattern(text: str) -> Callable[[str], bool]:
    """Whether a text matches a pattern: `*` stands for any text, `?` for one character, all else for itself.

    The parts between two `*` are looked for from left to right, so the time does not explode as that of a regular
    expression may.
    """
    first, *parts = text.split("*")
    if not parts:
        whole = _part(first)
        return lambda value: whole.fullmatch(value) is not None
    *middle, last = parts
    begin, end, between = _part(first), _part(last), [_part(part) for part in middle if part]

    def matches(value: str) -> bool:
        found = begin.match(value)
        if found is None:
            return False
        position = found.end()
        for part in between:
            found = part.search(value, position)
            if found is None:
                return False
            position = found.end()
        at = len(value) - len(last)
        return at >= position and end.fullmatch(value, at) is not None

    return matches


def _part(text: str) -> re.Pattern[str]:
    return re.compile("".join("." if char == "?" else re.escape(char) for char in text), re.DOTALL)


class _Values:
    """The values of one clause, so that one of a device's is looked up and not compared with each."""

    def __init__(self, values: Iterable[ClauseValue]) -> None:
        given = [*values]
        self._exact = {alike(str(value)) for value in given if not is_pattern(value)}
        self._patterns = [pattern(str(value)) for value in given if is_pattern(value)]

    def has(self, text: str) -> bool:
        if self._exact and alike(text) in self._exact:
            return True
        return any(matches(text) for matches in self._patterns)


def values_of(said: ClauseValue | tuple[ClauseValue, ...] | UnsetType) -> tuple[ClauseValue, ...]:
    """The values that a part of a clause names."""
    if said is UNSET:
        return ()
    return said if isinstance(said, tuple) else (said,)


# --- conditions -----------------------------------------------------------------------------------------


class _Test:
    """A condition, made ready for many devices."""

    def __init__(self, condition: Condition) -> None:
        self._is = None if condition.is_ is UNSET else _Values(values_of(condition.is_))
        self._not = None if condition.not_ is UNSET else _Values(values_of(condition.not_))
        self._min = None if condition.min is UNSET else number(str(condition.min))
        self._max = None if condition.max is UNSET else number(str(condition.max))
        self._condition = condition
        self._needs_value = self._is is not None or condition.min is not UNSET or condition.max is not UNSET

    def fault(self, name: str, text: str | None) -> str | None:
        """How a device's property excludes the device, or None. `text`: the property; None: the device lacks it."""
        if not text:
            if self._needs_value or self._condition.exists is True:
                return f"no {name}"
            return None
        if self._condition.exists is False:
            return f"has {name}"
        values = listed(text)
        every = [text, *values] if "," in text else values
        if self._not is not None and (any(map(self._not.has, every)) or text.count(",") >= MAX_LISTED):
            return f"{name} is {_shown(text)}"
        if not self._needs_value:
            return None
        left = every if self._is is None else [value for value in every if self._is.has(value)]
        if not left:
            return f"{name} is {_shown(text)}"
        return self._outside(name, text, left)

    def _outside(self, name: str, text: str, values: Iterable[str]) -> str | None:
        least, most = self._min, self._max
        if least is None and most is None:
            return None
        numbers = [found for value in values if (found := number(value)) is not None]
        if not numbers:
            return f"{name} is {_shown(text)}, which is no number"
        enough = numbers if least is None else [found for found in numbers if found >= least]
        if not enough:
            return f"{name} below {self._condition.min}"
        if most is not None and not any(found <= most for found in enough):
            return f"{name} above {self._condition.max}"
        return None


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class Sieve:
    """`where`, made ready for many devices. It remembers what it found of equal properties."""

    def __init__(self, clauses: Clauses) -> None:
        self._tests: list[tuple[str, _Test, dict[str | None, str | None]]] = [
            (name, _Test(condition), {}) for name, condition in clauses.where
        ]

    def fault(self, properties: Mapping[str, str]) -> str | None:
        """The first clause that a device does not meet, as what the device is instead; None: it meets all."""
        for name, test, known in self._tests:
            text = properties.get(name)
            try:
                fault = known[text]
            except KeyError:
                fault = known[text] = test.fault(name, text)
            if fault is not None:
                return fault
        return None

    def may_pass(self, properties: Mapping[str, str]) -> bool:
        """Whether a device might meet all, if it had the properties that it lacks."""
        named = [(name, test, text) for name, test, _ in self._tests if (text := properties.get(name))]
        return all(test.fault(name, text) is None for name, test, text in named)


def fault(clauses: Clauses, devices: Sequence[Mapping[str, str]]) -> str | None:
    """Why devices, by their properties, do not meet a request's clauses; None: they do."""
    sieve = Sieve(clauses)
    for properties in devices:
        if (found := sieve.fault(properties)) is not None:
            return f"device {_shown(properties.get('id', '?'))}: {found}"
    if len({properties.get("id", str(number)) for number, properties in enumerate(devices)}) > 1:
        for name in clauses.same:
            if not set.intersection(*[set(common_values(properties, name)) for properties in devices]):
                return f"the {len(devices)} devices have no value of {name} in common"
    return None


def common_values(properties: Mapping[str, str], name: str) -> list[str | Number]:
    """The values of a property by which two devices may be the same."""
    return list(dict.fromkeys(map(alike, listed(properties.get(name, "")))))


# --- words ----------------------------------------------------------------------------------------------


def in_words(clauses: Clauses) -> str:
    """The clauses as people say them: `model is *H100* and memory.total_bytes at least 40Gi, with one nvlink.group`."""
    where = " and ".join([each for name, condition in clauses.where for each in _condition_words(name, condition)])
    same = f"one {' and one '.join(clauses.same)} for all" if clauses.same else ""
    return ", ".join(filter(None, (where, same)))


def _condition_words(name: str, condition: Condition) -> Iterator[str]:
    if condition.is_ is not UNSET:
        yield f"{name} is {_listed(condition.is_)}"
    if condition.not_ is not UNSET:
        yield f"{name} is not {_listed(condition.not_)}"
    if condition.min is not UNSET:
        yield f"{name} at least {condition.min}"
    if condition.max is not UNSET:
        yield f"{name} at most {condition.max}"
    if condition.exists is not UNSET:
        yield f"{name} is {'there' if condition.exists else 'not there'}"


def _listed(said: ClauseValue | tuple[ClauseValue, ...]) -> str:
    return " or ".join(map(str, values_of(said)))


def problem(clauses: Clauses) -> str | None:
    """What is wrong with clauses, and what would be valid; None: they can be judged."""
    names = [*[name for name, _ in clauses.where], *clauses.same]
    if len(clauses.where) > MAX_CLAUSES:
        return f"where names {len(clauses.where)} properties; at most {MAX_CLAUSES} are compared"
    if len(clauses.same) > MAX_SAME:
        return f"same names {len(clauses.same)} properties; at most {MAX_SAME} are compared"
    for name in names:
        if not name or len(name) > MAX_TEXT:
            return f"{_shown(name)!r} is no property's name; write one of 1 to {MAX_TEXT} characters"
        if name in OF_THE_GRANT:
            return f"{name} is no property to choose by: a device has it only when it is granted"
    patterns = sum([is_pattern(value) for _, condition in clauses.where for value in _all_values(condition)])
    if patterns > MAX_PATTERNS:
        return f"where has {patterns} values with * or ?; at most {MAX_PATTERNS} are compared"
    return next(filter(None, [_condition_problem(name, condition) for name, condition in clauses.where]), None)


def _all_values(condition: Condition) -> tuple[ClauseValue, ...]:
    return (*values_of(condition.is_), *values_of(condition.not_))


def _condition_problem(name: str, condition: Condition) -> str | None:
    values = _all_values(condition)
    if condition == Condition():
        return f"where.{name} says nothing; write a value, a list, or one of is, not, min, max, exists"
    if len(values) > MAX_VALUES:
        return f"where.{name} has {len(values)} values; at most {MAX_VALUES} are compared"
    if () in (condition.is_, condition.not_):
        return f"where.{name} is an empty list, which nothing meets; write a value"
    for value in values:
        if not 0 < len(str(value)) <= MAX_TEXT:
            return f"where.{name} has a value of {len(str(value))} characters; write 1 to {MAX_TEXT}"
    for word, bound in (("min", condition.min), ("max", condition.max)):
        if bound is not UNSET and number(str(bound)) is None:
            return (
                f"where.{name}.{word} is {_shown(str(bound))!r}, which is no number; write one such as {NUMBER_FORMS}"
            )
    least, most = number(str(condition.min)), number(str(condition.max))
    if least is not None and most is not None and least > most:
        return f"where.{name} has min {condition.min} above max {condition.max}, which nothing meets"
    needs_value = condition.is_ is not UNSET or condition.min is not UNSET or condition.max is not UNSET
    if condition.exists is False and needs_value:
        return f"where.{name} says exists false and a value, which nothing meets; leave one out"
    return None

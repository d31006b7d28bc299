"""What drivers connect: which names mean one device, which of them stands for all, and which devices are parts of
others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NewType, TypeVar

from msgspec import Struct

CanonicalName = NewType("CanonicalName", str)
"""The name that stands for all names of a device on its host. A driver's id or alias need not be canonical."""

_Name = TypeVar("_Name", bound=str)

Classes = Mapping[str, tuple[str, ...]]
"""All names of one device, sorted, by each of its names. Only devices with several names."""

NO_CLASSES: Classes = {}

Parts = Iterable[tuple[str, str]]
"""Pairs of a part and the device that it is a part of, each by any of its names."""


class Links(Struct, frozen=True):
    """What a resource's driver connects."""

    names: tuple[tuple[str, ...], ...] = ()
    """Groups of names; those of a group mean one device."""
    parts: tuple[tuple[str, str], ...] = ()
    """Pairs of a part and its whole, as in `Parts`."""

    @property
    def is_empty(self) -> bool:
        return not self.names and not self.parts


NO_LINKS = Links()


def one_name_each(groups: Iterable[Sequence[str]]) -> tuple[dict[str, CanonicalName], Classes]:
    """Join groups of names that have a name in common, directly or through other groups, into classes. Returns the
    least name of each class by its other names, and the whole class by each of its names."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while (above := parent.setdefault(name, name)) != name:
            parent[name] = parent.setdefault(above, above)
            name = parent[name]
        return name

    for first, *others in groups:
        for other in others:
            lesser, greater = sorted((root(first), root(other)))
            parent[greater] = lesser
    members: dict[str, list[str]] = {}
    for name in sorted(parent):
        members.setdefault(root(name), []).append(name)
    same: dict[str, CanonicalName] = {}
    classes: dict[str, tuple[str, ...]] = {}
    for top, names in members.items():
        if len(names) > 1:
            whole = tuple(names)
            for name in names:
                classes[name] = whole
                if name != top:
                    same[name] = CanonicalName(top)
    return same, classes


def wholes_of(parts: Parts, synonyms: Mapping[str, CanonicalName]) -> dict[CanonicalName, tuple[CanonicalName, ...]]:
    """What each part is a part of, by canonical names: a part of a part is a part of the whole, too. Nothing is a part
    of itself, whatever drivers say."""
    direct: dict[CanonicalName, dict[CanonicalName, None]] = {}
    for part, whole in parts:
        name = synonyms.get(part, CanonicalName(part))
        direct.setdefault(name, {})[synonyms.get(whole, CanonicalName(whole))] = None
    above: dict[CanonicalName, tuple[CanonicalName, ...]] = {}
    for name, wholes in direct.items():
        found: dict[CanonicalName, None] = {}
        todo = list(wholes)
        while todo:
            whole = todo.pop()
            if whole != name and whole not in found:
                found[whole] = None
                todo.extend(direct.get(whole, ()))
        if found:
            above[name] = tuple(found)
    return above


def by_whole(parts: Iterable[tuple[_Name, _Name]]) -> dict[_Name, list[_Name]]:
    """The parts of each whole, as a host's record has them."""
    found: dict[_Name, list[_Name]] = {}
    for part, whole in parts:
        found.setdefault(whole, []).append(part)
    return found


def pairs(parts: Mapping[str, Sequence[str]]) -> tuple[tuple[str, str], ...]:
    """What `by_whole` was made of."""
    return tuple([(part, whole) for whole, names in parts.items() for part in names])

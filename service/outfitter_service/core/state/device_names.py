"""Devices with several names: which names mean one device, and which of them stands for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NewType

CanonicalName = NewType("CanonicalName", str)
"""The name that stands for all names of a device on its host. A driver's id or alias need not be canonical."""

Classes = Mapping[str, tuple[str, ...]]
"""All names of one device, sorted, by each of its names. Only devices with several names."""

NO_CLASSES: Classes = {}


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

"""A small bipartite matching: how many of which devices each resource gets where resources have devices in common.

Devices of the same set of resources form a class, and are counted instead of listed. The cost depends on the number of
classes, which is small, and not on the number of devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise

from msgspec import Struct

ResourceSet = tuple[str, ...]
"""A class of devices: those that exactly these resources have."""


class Shortage(Struct, frozen=True):
    """A request that cannot be met: `resources` want more than the `devices` that they have together."""

    resources: frozenset[str]
    devices: int


def counts(devices: Iterable[ResourceSet]) -> dict[ResourceSet, int]:
    """How many devices there are of each class."""
    counted: dict[ResourceSet, int] = {}
    for viewers in devices:
        counted[viewers] = counted.get(viewers, 0) + 1
    return counted


def match(
    demands: Mapping[str, int], classes: Mapping[ResourceSet, int]
) -> dict[str, dict[ResourceSet, int]] | Shortage:
    """How many devices of each class every resource gets, each device for one resource; or why that is impossible.

    `demands`: amounts by resource. Earlier resources are served first, but give way where another would get too few.
    """
    shown: dict[str, list[ResourceSet]] = {resource: [] for resource in demands}
    for viewers in classes:
        for resource in viewers:
            if resource in shown:
                shown[resource].append(viewers)
    spare = dict(classes)
    given: dict[str, dict[ResourceSet, int]] = {resource: {} for resource in demands}
    for resource, amount in demands.items():
        missing = amount
        while missing:
            path = _path(resource, shown, spare, given)
            if isinstance(path, frozenset):
                return Shortage(path, sum(classes[one] for one in {one for name in path for one in shown[name]}))
            missing -= _shift(path, missing, spare, given)
    return given


_Path = list[tuple[str, ResourceSet]]
"""Each resource takes devices from the class beside it, which the next resource gives up."""


def _path(
    start: str,
    shown: Mapping[str, list[ResourceSet]],
    spare: Mapping[ResourceSet, int],
    given: Mapping[str, Mapping[ResourceSet, int]],
) -> _Path | frozenset[str]:
    """The shortest path to one more device for `start`, or the resources that have too few together."""
    reached: dict[str, tuple[str, ResourceSet] | None] = {start: None}
    tried: set[ResourceSet] = set()
    waiting = deque([start])
    while waiting:
        resource = waiting.popleft()
        for viewers in shown[resource]:
            if viewers in tried:
                continue
            tried.add(viewers)
            if spare[viewers]:
                path = [(resource, viewers)]
                while (step := reached[path[-1][0]]) is not None:
                    path.append(step)
                path.reverse()
                return path
            for other in viewers:
                if other in given and other not in reached and given[other].get(viewers):
                    reached[other] = resource, viewers
                    waiting.append(other)
    return frozenset(reached)


def _shift(path: _Path, most: int, spare: dict[ResourceSet, int], given: dict[str, dict[ResourceSet, int]]) -> int:
    """Move devices along a path, at most `most`. Returns how many."""
    moved = min(most, spare[path[-1][1]])
    for (_, viewers), (giver, _) in pairwise(path):
        moved = min(moved, given[giver][viewers])
    for place, (taker, viewers) in enumerate(path):
        given[taker][viewers] = given[taker].get(viewers, 0) + moved
        if place + 1 < len(path):
            given[path[place + 1][0]][viewers] -= moved
    spare[path[-1][1]] -= moved
    return moved

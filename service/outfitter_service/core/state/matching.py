"""A small bipartite matching: how many of which devices each resource gets where resources have devices in common.

Devices that the same set of resources has form a class, and are counted instead of listed. The cost depends on the
number of classes, which is small, and not on the number of devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise

from msgspec import Struct

ResourceSet = tuple[str, ...]
"""The names of resources. It stands for a class of devices: those that exactly these resources have."""


class Shortage(Struct, frozen=True):
    """A request that cannot be met: `resources` want more than the `devices` that they have together."""

    resources: frozenset[str]
    devices: int


def counts(devices: Iterable[ResourceSet]) -> dict[ResourceSet, int]:
    """How many devices each class has. `devices`: the class of each device."""
    count_of: dict[ResourceSet, int] = {}
    for resources in devices:
        count_of[resources] = count_of.get(resources, 0) + 1
    return count_of


def match(
    demands: Mapping[str, int], classes: Mapping[ResourceSet, int]
) -> dict[str, dict[ResourceSet, int]] | Shortage:
    """How many devices of each class every resource gets, each device for one resource; or why that is impossible.

    `demands`: amounts by resource. `classes`: the number of devices of each class. Earlier resources are served first,
    but give way where another would get too few.
    """
    classes_of: dict[str, list[ResourceSet]] = {resource: [] for resource in demands}
    for resources in classes:
        for resource in resources:
            if resource in classes_of:
                classes_of[resource].append(resources)
    spare = dict(classes)
    given: dict[str, dict[ResourceSet, int]] = {resource: {} for resource in demands}
    for resource, amount in demands.items():
        missing = amount
        while missing:
            path = _path(resource, classes_of, spare, given)
            if isinstance(path, frozenset):
                short_classes = {resources for name in path for resources in classes_of[name]}
                return Shortage(path, sum(classes[resources] for resources in short_classes))
            missing -= _shift(path, missing, spare, given)
    return given


_Path = list[tuple[str, ResourceSet]]
"""Each resource takes devices from the class beside it, which the next resource gives up."""


def _path(
    start: str,
    classes_of: Mapping[str, list[ResourceSet]],
    spare: Mapping[ResourceSet, int],
    given: Mapping[str, Mapping[ResourceSet, int]],
) -> _Path | frozenset[str]:
    """The shortest path to one more device for `start`, or the resources that have too few together."""
    reached: dict[str, tuple[str, ResourceSet] | None] = {start: None}
    tried: set[ResourceSet] = set()
    waiting = deque([start])
    while waiting:
        resource = waiting.popleft()
        for resources in classes_of[resource]:
            if resources in tried:
                continue
            tried.add(resources)
            if spare[resources]:
                path = [(resource, resources)]
                while (step := reached[path[-1][0]]) is not None:
                    path.append(step)
                path.reverse()
                return path
            for other in given:  # and not in the order of a set, so that the same request always has the same devices
                if other in resources and other not in reached and given[other].get(resources):
                    reached[other] = resource, resources
                    waiting.append(other)
    return frozenset(reached)


def _shift(path: _Path, most: int, spare: dict[ResourceSet, int], given: dict[str, dict[ResourceSet, int]]) -> int:
    """Move devices along a path, at most `most`. Returns how many."""
    moved = min(most, spare[path[-1][1]])
    for (_, resources), (giver, _) in pairwise(path):
        moved = min(moved, given[giver][resources])
    for index, (taker, resources) in enumerate(path):
        given[taker][resources] = given[taker].get(resources, 0) + moved
        if index + 1 < len(path):
            given[path[index + 1][0]][resources] -= moved
    spare[path[-1][1]] -= moved
    return moved

"""Which resources get how many of which devices where several of them show the same: a small bipartite matching.

Devices that the same resources show are alike and are counted, never listed: what it costs depends on how many
different sets of resources show a device, hardly ever more than a handful, and not on how many devices there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise

from msgspec import Struct

Viewers = tuple[str, ...]
"""The resources that show a device, as a class of devices: all that are shown by these and by no others."""


class Shortage(Struct, frozen=True):
    """A request that can not be met: `resources` want more devices between them than the `devices` they show."""

    resources: frozenset[str]
    devices: int


def counts(devices: Iterable[Viewers]) -> dict[Viewers, int]:
    """How many devices there are of each class."""
    counted: dict[Viewers, int] = {}
    for viewers in devices:
        counted[viewers] = counted.get(viewers, 0) + 1
    return counted


def match(demands: Mapping[str, int], classes: Mapping[Viewers, int]) -> dict[str, dict[Viewers, int]] | Shortage:
    """How many devices of each class every resource gets, each device for one resource, or why that is not possible.

    `demands` are the devices wanted, by resource. Resources that are earlier in it are served first, but give way
    where another one would get too few.
    """
    shown: dict[str, list[Viewers]] = {resource: [] for resource in demands}
    for viewers in classes:
        for resource in viewers:
            if resource in shown:
                shown[resource].append(viewers)
    spare = dict(classes)
    given: dict[str, dict[Viewers, int]] = {resource: {} for resource in demands}
    for resource, amount in demands.items():
        missing = amount
        while missing:
            found = _path(resource, shown, spare, given)
            if isinstance(found, frozenset):
                return Shortage(found, sum(classes[one] for one in {one for name in found for one in shown[name]}))
            missing -= _shift(found, missing, spare, given)
    return given


_Path = list[tuple[str, Viewers]]
"""Each resource takes from the class beside it; what it takes from there the next one gives up."""


def _path(
    start: str,
    shown: Mapping[str, list[Viewers]],
    spare: Mapping[Viewers, int],
    given: Mapping[str, Mapping[Viewers, int]],
) -> _Path | frozenset[str]:
    """The shortest way to one more device for `start`, or the resources that would all have to get more."""
    reached: dict[str, tuple[str, Viewers] | None] = {start: None}
    tried: set[Viewers] = set()
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


def _shift(path: _Path, most: int, spare: dict[Viewers, int], given: dict[str, dict[Viewers, int]]) -> int:
    """Move as many devices along a path as it bears, `most` of them; how many."""
    moved = min(most, spare[path[-1][1]])
    for (_, viewers), (giver, _) in pairwise(path):
        moved = min(moved, given[giver][viewers])
    for place, (taker, viewers) in enumerate(path):
        given[taker][viewers] = given[taker].get(viewers, 0) + moved
        if place + 1 < len(path):
            given[path[place + 1][0]][viewers] -= moved
    spare[path[-1][1]] -= moved
    return moved

"""Who has what of a device, and what fits beside it, by brute force: the truth of the world of property tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from support.exclusivity import Held

Pair = tuple[str, str]
"""A part and its whole, each by one name."""

REPLICAS = 2
"""How many each device has of a resource that has replicas."""


class Use(NamedTuple):
    """One device, by one name, and how somebody has it: `alone`, `shared` or as a `replica`."""

    device: str
    how: str


def uses_of(held: Held) -> list[Use]:
    """What a record has."""
    return [
        *[Use(device, "alone") for device in sorted(held.alone)],
        *[Use(device, "shared") for device in sorted(held.together)],
        *[Use(device, "replica") for device in held.replicas],
    ]


def exclude(one: Use, other: Use, parts: Collection[Pair]) -> bool:
    """Whether two workers may not have that at once. Whether there are enough replicas is another question."""
    hows = {one.how, other.how}
    if one.device == other.device:
        return hows not in ({"shared"}, {"replica"})
    for part, whole in ((one, other), (other, one)):
        if (part.device, whole.device) in parts:
            return part.how != "shared" or whole.how == "alone"
    return False


def may_exclude(one: Use, other: Use, parts: Collection[Pair]) -> bool:
    """The same of what an earlier waiter wants: of replicas there may be too few, too."""
    return exclude(one, other, parts) or (one.device == other.device and one.how == other.how == "replica")


class Room(NamedTuple):
    """What others have, and what earlier waiters want, where some devices are `parts` of others. `repeats`: one worker
    may have several replicas of a device."""

    parts: Collection[Pair]
    taken: Sequence[Use] = ()
    wanted: Sequence[Use] = ()
    repeats: bool = False

    def has(self, use: Use) -> bool:
        """Whether a worker can have that, if it wants nothing else."""
        if any(exclude(use, other, self.parts) for other in self.taken):
            return False
        if any(may_exclude(use, other, self.parts) for other in self.wanted):
            return False
        return use.how != "replica" or self.taken.count(use) < REPLICAS

    def fits(self, candidates: Mapping[str, Iterable[Use]], amounts: Mapping[str, int]) -> bool:
        """Whether a worker can have so many of each exclusive resource's candidates together."""
        lists = [(sorted(filter(self.has, candidates[name])), amount) for name, amount in amounts.items()]
        if any(
            len({use.device for use in uses}) * (REPLICAS if self.repeats else 1) < amount for uses, amount in lists
        ):
            return False
        return self._fits(lists, [])

    def _fits(self, lists: Sequence[tuple[Sequence[Use], int]], chosen: list[Use]) -> bool:
        if not lists:
            return True
        (uses, amount), *others = lists
        each = [use for use in uses for _ in range(REPLICAS if use.how == "replica" and self.repeats else 1)]
        return any(
            self._together([*chosen, *more]) and self._fits(others, [*chosen, *more])
            for more in combinations(each, amount)
        )

    def _together(self, chosen: Sequence[Use]) -> bool:
        for one, other in combinations(chosen, 2):
            is_repeated = one == other and one.how == "replica" and self.repeats
            if (one.device == other.device and not is_repeated) or exclude(one, other, self.parts):
                return False
        return all(self.taken.count(use) + chosen.count(use) <= REPLICAS for use in chosen if use.how == "replica")

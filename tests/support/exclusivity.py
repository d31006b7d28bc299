"""Promise 1, said once for all judges but the checker: no two have one device, unless both share it, or each has a
replica of it; nor has one a device, and another one a part of it, unless both share these.

Each judge has evidence of its own, which it makes `Held` of: tests/README.md lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Held(NamedTuple):
    """The devices that somebody has `alone`, those that somebody has `together` with others, and those of which
    somebody has `replicas`, each as often as that. A device has one name in all that are compared, or the same names.
    """

    alone: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()
    replicas: tuple[str, ...] = ()

    @property
    def own(self) -> frozenset[str]:
        """The devices that somebody has alone, or a replica of."""
        return self.alone.union(self.replicas)

    def clash(self, other: Held) -> frozenset[str]:
        """The devices that both have, and one of them alone; or one of them shares it, and the other has a replica."""
        mine, its = self.own | self.together, other.own | other.together
        return (self.alone & its) | (other.alone & mine) | (self.together & other.own) | (self.own & other.together)

    def beside(self, other: Held, wholes_of: Callable[[str], Iterable[str]]) -> frozenset[tuple[str, str]]:
        """The parts that one of them has, each with its whole that the other one has, unless both share these. Who
        shares a part is in nobody's way who has a replica of the whole. `wholes_of`: what a device is a part of."""
        return frozenset(
            (part, whole)
            for one, another in ((self, other), (other, self))
            for part in one.own | one.together
            for whole in wholes_of(part)
            if whole in another.alone or (part in one.own and whole in another.own | another.together)
        )


def lent_too_often(held: Iterable[Held], replicas: int) -> list[str]:
    """The devices of which all of them together have more than so many replicas."""
    counts = Counter(device for each in held for device in each.replicas)
    return sorted(device for device, count in counts.items() if count > replicas)

"""Which devices of a resource meet a request's clauses. A free list remembers it, until its devices change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice, product

from outfitter_proto.clauses import Clauses, Number, Sieve, common_values
from outfitter_service.core.model import KnownDevice
from outfitter_service.core.state.lending import Block

MOST_MEMBERS = 65_536
"""Most devices of all groups of one selection together, each counted in each of its groups. Groups beyond are not
looked at."""


class Selection:
    """The devices of one resource that a request's clauses select, by their positions in the free list."""

    __slots__ = ("_most", "_serving", "faults", "groups", "is_whole", "lendable", "members", "positions", "unsaid")

    def __init__(self, devices: Sequence[KnownDevice], blocks: Sequence[Block | None], clauses: Clauses) -> None:
        sieve, named = Sieve(clauses), any(name == "id" for name, _ in clauses.where)
        self.faults: Counter[str] = Counter()
        """What the others are instead, and how many of them."""
        self.unsaid = 0
        """How many of the others only lack properties. Their driver may name these later."""
        positions = []
        for position, device in enumerate(devices):
            properties = {**device.properties, "id": device.id} if named else device.properties
            fault = sieve.fault(properties)
            if fault is None:
                positions.append(position)
            else:
                self.faults[fault] += 1
                self.unsaid += sieve.may_pass(properties)
        self.positions = frozenset(positions)
        """Those that meet `where`, also such as are lent to nobody."""
        self.lendable = frozenset([position for position in positions if blocks[position] is None])
        """Those of them that nothing blocks."""
        self.groups: tuple[frozenset[int], ...] | None = None
        """Those of them that have a value of each property of `same` in common. None: there is no such property."""
        self.is_whole = True
        """There are no other groups."""
        if clauses.same:
            self.groups, self.is_whole = _groups(devices, positions, clauses.same)
        self.members = sum(map(len, self.groups or ()))
        """Those of all groups."""
        self._most: dict[bool, int] = {}
        self._serving: dict[int, frozenset[int]] = {}

    def most(self, *, lendable: bool) -> int:
        """The most devices of one grant. `lendable`: without those that are lent to nobody."""
        chosen = self.lendable if lendable else self.positions
        if self.groups is None or not chosen:
            return len(chosen)
        if lendable not in self._most:
            self._most[lendable] = max(1, max([len(group & chosen) for group in self.groups], default=0))
        return self._most[lendable]

    def serving(self, amount: int) -> frozenset[int]:
        """The devices that could be in a grant of so many, if nobody held any."""
        if self.groups is None or amount < 2:
            return self.lendable
        if amount not in self._serving:
            fitting = [group for each in self.groups if len(group := each & self.lendable) >= amount]
            self._serving[amount] = frozenset[int]().union(*fitting)
        return self._serving[amount]


def _groups(
    devices: Sequence[KnownDevice], positions: Sequence[int], same: Sequence[str]
) -> tuple[tuple[frozenset[int], ...], bool]:
    """The groups of devices with common values, and whether these are all."""
    members: dict[tuple[str | Number, ...], list[int]] = {}
    count, named = 0, "id" in same
    known: dict[tuple[str | None, ...], list[tuple[str | Number, ...]]] = {}
    for position in positions:
        properties = devices[position].properties
        if named:
            properties = {**properties, "id": devices[position].id}
        texts = tuple([properties.get(name) for name in same])
        if texts not in known:
            each = product(*[common_values(properties, name) for name in same])
            known[texts] = list(islice(each, MOST_MEMBERS + 1))
        for values in known[texts]:
            if count == MOST_MEMBERS:
                return _distinct(members), False
            count += 1
            members.setdefault(values, []).append(position)
    return _distinct(members), True


def _distinct(members: Mapping[tuple[str | Number, ...], Sequence[int]]) -> tuple[frozenset[int], ...]:
    return tuple(dict.fromkeys(map(frozenset, members.values())))

"""Which GPUs share NVLink: groups in which each GPU reaches each other one.

On a machine with NVSwitches all GPUs are one group; bridges make pairs. Where GPUs are linked directly and not all to
all, as on the first DGX-1, a GPU is in several groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

SWITCH = "switch"
MOST_GROUPS = 64


def peers(ends: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
    """Which GPUs each reaches. `ends`: by the GPU's bus id, the other ends of its links: bus ids, and `SWITCH`."""
    found: dict[str, set[str]] = {gpu: set() for gpu in ends}
    for one, other in itertools.combinations(ends, 2):
        if other in ends[one] or one in ends[other] or (SWITCH in ends[one] and SWITCH in ends[other]):
            found[one].add(other)
            found[other].add(one)
    return {gpu: frozenset(reached) for gpu, reached in found.items()}


def groups(reached: Mapping[str, frozenset[str]]) -> dict[str, list[int]]:
    """The numbers of each GPU's groups, from 0; a GPU that reaches none has none."""
    numbers: dict[str, list[int]] = {gpu: [] for gpu in reached}
    linked = frozenset(gpu for gpu, others in reached.items() if others)
    whole = {reached[gpu] | {gpu} for gpu in linked}
    if sum(map(len, whole)) == len(linked):  # each reaches all that it is linked with: nearly every machine
        cliques: Iterable[frozenset[str]] = whole
    else:
        cliques = itertools.islice(_cliques(reached, frozenset(), linked, frozenset()), MOST_GROUPS)
    for number, clique in enumerate(sorted(sorted(clique) for clique in cliques)):
        for gpu in clique:
            numbers[gpu].append(number)
    return numbers


def _cliques(
    reached: Mapping[str, frozenset[str]], inside: frozenset[str], may: frozenset[str], done: frozenset[str]
) -> Iterator[frozenset[str]]:
    """The largest sets in which each reaches each other one: Bron and Kerbosch's algorithm with a pivot."""
    if not may and not done:
        if len(inside) > 1:
            yield inside
        return
    pivot = max(sorted(may | done), key=lambda gpu: len(reached[gpu] & may))
    for gpu in sorted(may - reached[pivot]):
        yield from _cliques(reached, inside | {gpu}, may & reached[gpu], done & reached[gpu])
        may, done = may - {gpu}, done | {gpu}

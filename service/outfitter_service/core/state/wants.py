"""What a waiter with clauses wants of one resource. Waiters that want the same stand behind each other."""

from __future__ import annotations

from msgspec import UNSET, Struct

from outfitter_proto.clauses import Clauses, chosen
from outfitter_proto.records import ResolvedRequest

MOST_WANTS = 32
"""So many different wants of one resource are kept apart. Where there are more, each of them counts as a wish for any
device, so that the time of a decision does not grow with their number."""


class Want(Struct, frozen=True):
    """`amount` counts only where all devices must have something in common; else it is 0."""

    clauses: Clauses
    amount: int


NO_WANTS: dict[str, Want] = {}


def wants_of(request: ResolvedRequest) -> dict[str, Want]:
    """What a request wants, by resource, without resources of which any device will do."""
    if request.choices is UNSET:
        return NO_WANTS
    return {
        name: Want(clauses, request.amounts[name] if clauses.same else 0)
        for name, clauses in chosen(request).items()
        if name in request.amounts
    }

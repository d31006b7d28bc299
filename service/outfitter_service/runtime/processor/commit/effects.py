"""What follows from one commit."""

from __future__ import annotations

from collections import defaultdict

from msgspec import Struct, field

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Allocation, Note, Registration, Transition
from outfitter_service.core import model as m

LOGGED = 20
"""Most transitions of one commit that get a log line each: a flood of workers must not become a flood of lines."""


class Effects(Struct):
    """What follows from one commit once it has returned. It begins empty, and its commit fills it."""

    # --- what the manager does ---

    commands: list[m.Command] = []
    """What drivers must do."""
    follow_ups: dict[m.Event, None] = {}
    """Events that are decided for the next commit."""
    failed_events: list[m.Event] = []
    """Events that met a defect. They are decided again later."""
    renewed: dict[AllocationKey, None] = {}
    """Allocations whose worker gave a sign of life."""
    final_leases: dict[AllocationKey, None] = {}
    """Allocations whose last lease starts."""
    announced: dict[str, None] = {}
    """Hosts whose records changed."""
    hosts: dict[str, None] = {}
    """Hosts with changed allocations."""
    allocations: dict[AllocationKey, Allocation | None] = {}
    """The changed allocations by key, None where deleted."""
    before: dict[AllocationKey, Allocation] = {}
    """The records of these before."""

    # --- what it counts and logs ---

    kinds: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """The number of events by kind."""
    steps: list[tuple[str, Transition]] = []
    """History's steps by key; of fast grants only those that are logged."""
    notes: list[Note] = []
    """What decisions say in history besides."""
    unlogged: int = 0
    """The number of the other fast grants."""
    granted: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """When the registrations of fast grants were sent, by resource, in ms since 1970."""
    registered_ms: dict[str, int] = {}
    """The same of other registrations, by key."""
    unknown_fields: list[tuple[Registration, list[str]]] = []
    """Messages with warnings."""
    about: dict[str, dict[str, str | None]] = {}
    """Log fields of a dead letter's sender, by the letter's key."""

    def fast_step(self, key: str, step: Transition) -> None:
        """Add a fast grant's step. Most commits consist of fast grants, so only some are logged."""
        if len(self.steps) < LOGGED:
            self.steps.append((key, step))
        else:
            self.unlogged += 1

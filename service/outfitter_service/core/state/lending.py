"""Why a device is not lent. Everybody who decides it, counts it or shows it asks here.

There are two kinds of reasons:

- **A block** stands against everybody, whoever holds the device. A worker that lacks blocked devices is infeasible, and
  blocks nobody behind it.
- **A use** is that somebody holds the device, under whatever name. A worker that lacks used devices is busy, and later
  workers leave them to it.
"""

from __future__ import annotations

import enum

from outfitter_proto.records import Health

HELD_BACK = "held back: "
"""How the reason of a held-back device begins. Records say it, and have no other mark of it."""

NOT_LENT_TO = "which Outfitter did not lend to"
"""What is said of the process that uses a device as a stranger."""


class Block(enum.StrEnum):
    """Why a device is lent to nobody."""

    CORDONED = "cordoned"
    """An operator's order says so; see `cordons`."""
    UNHEALTHY = "unhealthy"
    """Its driver says that it is ill."""
    UNKNOWN = "unknown"
    """Nobody knows how it is."""
    HELD_BACK = "held-back"
    """A worker may hold it under an id that is no longer reported; see `held_back_devices`."""
    STRANGER = "used-by-stranger"
    """A process uses it to which it was not lent. The runtime finds these in its driver's looks."""


class Use(enum.StrEnum):
    """How a device is held by those who hold it."""

    ALONE = "alone"
    """Somebody holds it and shares it with nobody."""
    SHARED = "shared"
    """Whoever holds it shares it."""
    REPLICA = "replica"
    """Others have replicas of it, and one is left."""
    PART = "part"
    """Somebody holds a part of it, or what it is a part of."""


def block_of(health: str, reason: str | None, *, cordoned: bool = False, stranger: bool = False) -> Block | None:
    """Why a device of that health is lent to nobody, or None. `reason`: of its health. `cordoned`: an operator's order
    applies to it, which weighs more than its health. `stranger`: a process uses it to which it was not lent, which
    weighs least."""
    if cordoned:
        return Block.CORDONED
    if health == Health.HEALTHY:
        return Block.STRANGER if stranger else None
    if health == Health.UNHEALTHY:
        return Block.UNHEALTHY
    return Block.HELD_BACK if reason is not None and reason.startswith(HELD_BACK) else Block.UNKNOWN


def use_of(*, alone: bool, shared: bool, has_replica: bool = False, overlaps: bool = False) -> Use | None:
    """How a device is held: by anybody alone, and by anybody who shares it. `has_replica`: there is one for somebody
    else. `overlaps`: somebody holds a part of it, or what it is a part of, and not as one who only shares."""
    if overlaps and not alone:
        return Use.PART
    if alone:
        return Use.REPLICA if has_replica and not overlaps else Use.ALONE
    return Use.SHARED if shared else None


def not_lent(block: Block | None, use: Use | None, *, shares: bool) -> Block | Use | None:
    """Why a resource lends a device to nobody more now; None: it would. A block weighs more than a use. `shares`:
    whether the resource shares its devices."""
    if block is not None:
        return block
    return None if use is Use.REPLICA or (shares and use is Use.SHARED) else use

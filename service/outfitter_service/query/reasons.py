"""What programs must tell apart in reasons, which are for people."""

from __future__ import annotations

from outfitter_service.core.reasons import HEALING
from outfitter_service.core.state.resource_state import HELD_BACK


def says_held_back(reason: str | None) -> bool:
    """Whether it is the reason of a device that is held back. The health of such a device is unknown."""
    return (reason or "").startswith(HELD_BACK)


def waits_for_healing(reason: str | None) -> bool:
    """Whether illness of devices alone keeps a worker waiting."""
    return HEALING in (reason or "")

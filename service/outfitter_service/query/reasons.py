"""What programs must tell apart in reasons, which are for people."""

from __future__ import annotations

from outfitter_service.core.reasons import HEALING


def waits_for_healing(reason: str | None) -> bool:
    """Whether illness of devices alone keeps a worker waiting."""
    return HEALING in (reason or "")

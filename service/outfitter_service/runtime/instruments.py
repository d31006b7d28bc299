"""What all parts of one manager measure and report with."""

from __future__ import annotations

from msgspec import Struct

from outfitter_service.metrics import Metrics
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.outage_log import OutageLog


class Instruments(Struct, frozen=True, kw_only=True):
    """`metrics`, the `clock`, and what the log says of a bus that is away (`outage`)."""

    metrics: Metrics
    clock: Clock
    outage: OutageLog

    @classmethod
    def of(cls, metrics: Metrics, clock: Clock = SYSTEM) -> Instruments:
        """Those of a manager that starts now."""
        return cls(metrics=metrics, clock=clock, outage=OutageLog(clock))

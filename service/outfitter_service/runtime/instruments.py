"""The instruments of one manager: metrics, clock, and the log of outages. All its parts share them."""

from __future__ import annotations

from msgspec import Struct

from outfitter_service.metrics import Metrics
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.outage_log import OutageLog, SilenceLog


class Instruments(Struct, frozen=True, kw_only=True):
    """The instruments. `outage`: logs outages of the bus. `silence`: logs lost signs of life."""

    metrics: Metrics
    clock: Clock
    outage: OutageLog
    silence: SilenceLog

    @classmethod
    def of(cls, metrics: Metrics, clock: Clock = SYSTEM) -> Instruments:
        """The instruments of a manager that starts now."""
        return cls(metrics=metrics, clock=clock, outage=OutageLog(clock), silence=SilenceLog())

"""An independent checker: it reads a cluster's committed records and reports which promises were kept.

It shares no code with the manager and uses only the wire contract. It imports no other package of ours, reads Kafka
with another client (confluent-kafka), and the embedded bus's file with the standard library. It writes nothing and
joins no group.
"""

from __future__ import annotations

from outfitter_verify.buses import UnreadableError
from outfitter_verify.check import check
from outfitter_verify.logs import Control, Log, Partition, Place, Reading, Record
from outfitter_verify.report import CHECKS, CheckResult, Report, Violation
from outfitter_verify.sources import verify

__all__ = [
    "CHECKS",
    "CheckResult",
    "Control",
    "Log",
    "Partition",
    "Place",
    "Reading",
    "Record",
    "Report",
    "UnreadableError",
    "Violation",
    "check",
    "verify",
]

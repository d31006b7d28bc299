"""An independent checker: reads what a cluster has committed and says which promises it kept, and which it did not.

It knows the wire contract and nothing of the code that is checked: it imports no other package of ours, reads Kafka
with another client (confluent-kafka), and the embedded bus's file with the standard library. It decides nothing,
writes nothing, joins no group.
"""

from __future__ import annotations

from outfitter_verify.check import check
from outfitter_verify.logs import Log, Partition, Place, Reading, Record
from outfitter_verify.report import CHECKS, CheckResult, Report, Violation
from outfitter_verify.sources import UnreadableError, verify

__all__ = [
    "CHECKS",
    "CheckResult",
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

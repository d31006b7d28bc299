"""Tells this ledger's history from an earlier one's, which the same topic still has where a ledger was lost.

Each commit names the id of the topic that its ledger is in. No manager can write to the earlier ledger once its topic
is gone, so what comes before this ledger's first commit is the earlier one's.
"""

from __future__ import annotations

from collections.abc import Set

from outfitter_verify import wire
from outfitter_verify.logs import Log, Record


def begin(history: Log, ledger: Log, ledger_ids: Set[str]) -> int:
    """The offset after the last commit of an earlier ledger in this partition; 0 if there is none. `ledger_ids`: those
    in the checkpoints of `ledger`."""
    if not ledger_ids and ledger.end > 0:
        return 0  # it does not say which it is
    offset = 0
    for record in history.records:
        of = _ledger_id(record)
        if of in ledger_ids:
            break
        if of is not None:
            offset = record.offset + 1
    return offset


def _ledger_id(record: Record) -> str | None:
    """The id of the ledger that a commit names; None for other records."""
    if record.value is None or b'"ledger_id"' not in record.value:
        return None
    try:
        body = wire.parse(record.value)
        return wire.checkpoint(body["checkpoint"]).ledger_id if body.get("type") == "commit" else None
    except (wire.DamagedError, AttributeError, LookupError, TypeError, RecursionError):
        return None  # it is reported with the others

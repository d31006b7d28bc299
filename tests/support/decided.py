"""What was decided, in the one form that tests compare and apply."""

from __future__ import annotations

from outfitter_proto.codec import encode
from outfitter_service.core.decision import Decision
from outfitter_service.core.fast_path import FastGrant
from outfitter_service.core.state.ledger import Ledger, PutAllocation


def decision_of(decided: Decision | FastGrant) -> Decision:
    """A plain grant as the decision that the steps come to."""
    if isinstance(decided, Decision):
        return decided
    key = decided.key
    return Decision(
        kind="register",
        changes=[PutAllocation(key, decided.record, encode(decided.record))],
        history=[(key, decided.step())],
        renewed=[key],
    )


def apply(decided: Decision | FastGrant, ledger: Ledger) -> None:
    """Do to the ledger what a batch does to it."""
    if isinstance(decided, FastGrant):
        ledger.grant(decided.key, decided.record, decided.names)
    else:
        ledger.apply(decided.changes)

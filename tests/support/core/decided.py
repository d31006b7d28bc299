"""What was decided, in the one form that tests compare and apply."""

from __future__ import annotations

from collections.abc import Iterable

from outfitter_proto.codec import encode
from outfitter_proto.records import Allocation, StateRecord
from outfitter_service.core.decision import Decision
from outfitter_service.core.fast_path import FastGrant
from outfitter_service.core.state.ledger import Ledger, LedgerChange, PutAllocation
from outfitter_service.core.state.ledger import _key as changed_key


def decision_of(decided: Decision | FastGrant) -> Decision:
    """A fast grant as the decision that the steps come to."""
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
        change_all(ledger, decided.changes)


def change_all(ledger: Ledger, changes: Iterable[LedgerChange]) -> None:
    """Apply the changes, one after the other."""
    for change in changes:
        ledger.change(change)


def is_committed(ledger: Ledger) -> bool:
    """Whether the ledger has no change that a rollback would undo."""
    return not ledger._undo and not ledger._in_commit


def touched(ledger: Ledger) -> list[tuple[str, Allocation | StateRecord | None]]:
    """The keys changed since the last commit began, with what is under them now (None: a tombstone)."""
    keys = dict.fromkeys(key for change in ledger._undo if (key := changed_key(change)))
    return [(key, ledger.record(key)) for key in keys]

"""The kinds of records in the ledger: a row for each kind except allocations and checkpoints.

Everything else is the same for each kind, and written once: a restore puts the record into `Ledger.records`, history
has its new value in a `put`, snapshots and replays carry its bytes. Allocations change by steps, and have rules and
indexes of their own. The checkpoint ends each commit, and no ledger in memory holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from outfitter_proto.records import Cordon, Device, Host
from outfitter_service.core.state.host_state import HostState

ORDERS = "orders"
"""The ledger has, or had, records of operators' orders."""
PARTS = "parts"
"""It has, or had, a device that is part of another, or one that is lent several times."""
CHOICES = "choices"
"""Somebody waits in it, or waited, for certain devices. Version 0.2 would grant any."""
NEEDS = frozenset({CHOICES, ORDERS, PARTS})
"""What this version knows."""


class RecordKind(Struct, frozen=True, kw_only=True):
    """How one kind of record differs from the others."""

    after_grants: bool
    """The record stands behind the grants in a commit; a record that bars a device stands before them."""
    needs: Callable[[Any], str | None] = lambda _: None
    """What a manager must know to work on a ledger that has, or had, this record: one of `NEEDS`. None: every version
    can. See `runtime.changelog.ledger_format`."""
    index: Callable[[HostState, Any, Any], object] | None = None
    """Updates the host's indexes. It gets the records before and after a change, None where there is none."""


KINDS: Mapping[type, RecordKind] = {
    Host: RecordKind(
        after_grants=True,
        needs=lambda host: PARTS if any(entry.parts for entry in host.resources.values()) else None,
        index=lambda host_state, _, host: host_state.set_record(host),
    ),
    Device: RecordKind(after_grants=False),
    Cordon: RecordKind(
        after_grants=False,
        needs=lambda _: ORDERS,
        index=lambda host_state, before, after: host_state.set_cordon(before, after),
    ),
}
"""By the types of `StateRecord`."""

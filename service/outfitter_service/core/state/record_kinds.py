"""What may stand under a key of the ledger: a row for each kind of record that is neither allocation nor checkpoint.

All else is the same for each kind, and written once: a restore puts the record into `Ledger.records`, history says with
a `put` what it is now, a snapshot and a replay carry its bytes. Allocations change by steps and are many: they have
rules and indexes of their own. The checkpoint ends each batch; no ledger in memory holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from outfitter_proto.records import Device, Host
from outfitter_service.core.state.host_state import HostState


class RecordKind(Struct, frozen=True, kw_only=True):
    """`after_grants` is the record's place in a commit's batch: what bars a device from grants stands before them.
    `index` brings its host's indexes up to date; it gets the records before and after a change, None where there is
    none."""

    after_grants: bool
    index: Callable[[HostState, Any, Any], object] | None = None


KINDS: Mapping[type, RecordKind] = {
    Host: RecordKind(after_grants=True, index=lambda host_state, _, host: host_state.set_record(host)),
    Device: RecordKind(after_grants=False),
}
"""By the types of `StateRecord`."""

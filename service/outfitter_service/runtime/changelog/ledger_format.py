"""The ledger's format: which ledgers this version can work on.

Format 1 is what every version knows. A checkpoint of format 2 lists in `needs` what a manager must know besides, so
that it misreads no record. The first record that needs something has it listed by the checkpoint of the same commit,
and no earlier one (`RecordKind.needs`). From then on it stays. A manager that lacks one refuses the ledger and names
it. Until something is needed, checkpoints have format 1, and version 0.2 can work on the ledger.
"""

from __future__ import annotations

from outfitter_proto.records import Checkpoint
from outfitter_service.core.state.record_kinds import NEEDS

NEWEST = 2
"""The newest `Checkpoint.format` that this version can work on."""
MOST_SHOWN = 200
"""Most characters of unknown needs that an error names."""


def refusal(checkpoint: Checkpoint) -> str | None:
    """Why this version cannot work on the ledger of this checkpoint, or None."""
    if checkpoint.format > NEWEST:
        return (
            f"{checkpoint.key} has format {checkpoint.format}, and this version knows {NEWEST}: run the version of "
            "Outfitter that wrote it, or a newer one, here"
        )
    if unknown := ", ".join(sorted(set(checkpoint.needs or ()) - NEEDS)):
        known = ", ".join(sorted(NEEDS)) or "nothing of that"
        shown = unknown if len(unknown) <= MOST_SHOWN else f"{unknown[:MOST_SHOWN]}…"
        return (
            f"{checkpoint.key} needs {shown}, and this version knows {known}: run the version of Outfitter that "
            "wrote it, or a newer one, here"
        )
    return None

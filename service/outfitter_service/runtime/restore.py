"""Replaying the ledger: what a manager knows when it starts is what the compacted topic says.

Reads one partition up to what was committed when it was called, keeps the last value of each key of its
own, and builds the core's ledger from it. It repairs nothing: a record it cannot read refuses the host.
"""

from __future__ import annotations

import time

from msgspec import Struct

from outfitter_proto.bus import Bus, OffsetOutOfRangeError
from outfitter_proto.codec import UnknownTypeError, WireError, decode_ledger
from outfitter_proto.records import Allocation, AllocationState, Checkpoint, Device, Host
from outfitter_service.core.ledger import Ledger, PutAllocation, PutHost, SetToken
from outfitter_service.runtime.remit import Remit

_KNOWN_STATES = frozenset(AllocationState)

LEDGER_FORMAT = 1
"""The newest `Checkpoint.format` that this version can work on."""

MARKERS_WAIT_S = 0.05
"""How long one fetch may wait: where nothing but transaction markers is left, nothing comes, and the position moves."""


class LedgerRefusedError(RuntimeError):
    """The ledger holds something of this writer that this version must not work on."""


class Restored(Struct, frozen=True, kw_only=True):
    """A replayed ledger: the state, the newest checkpoint of this writer (None: it is new here), and figures. `rivals`
    are the writers of the other scope that wrote about this one's hosts."""

    ledger: Ledger
    checkpoint: Checkpoint | None
    rivals: list[str]
    records: int
    seconds: float


async def restore(bus: Bus, topic: str, partition: int, remit: Remit) -> Restored:
    """Replay what of the ledger is `remit`'s.

    Raises:
        LedgerRefusedError: a damaged record, or one of a later version; says which and what to do.
        BusError: the bus could not be read.
    """
    begun = time.monotonic()
    last, rivals, count = await _last_values(bus, topic, partition, remit)
    ledger = Ledger()
    checkpoint: Checkpoint | None = None
    allocations: list[Allocation] = []
    for key, value in last.items():
        try:
            record = decode_ledger(value, key=key)
        except UnknownTypeError as error:
            raise LedgerRefusedError(
                f"{error}. A later version of Outfitter wrote it: run that version, or a newer one, here"
            ) from error
        except WireError as error:
            raise LedgerRefusedError(
                f"{error}. The ledger in {topic}/{partition} is damaged there; to go on without this record, stop the "
                "manager, write a tombstone under its key, and start again"
            ) from error
        match record:
            case Allocation():
                if record.state not in _KNOWN_STATES:
                    raise LedgerRefusedError(
                        f"allocation {record.key} is in state {record.state!r}, which this version does not know: "
                        "run the version of Outfitter that wrote it, or a newer one, here"
                    )
                allocations.append(record)
            case Host():
                ledger.restore(PutHost(record))
            case Device():
                ledger.devices[record.key] = record
            case Checkpoint():
                if record.format > LEDGER_FORMAT:
                    raise LedgerRefusedError(
                        f"{record.key} is of format {record.format} and this version knows {LEDGER_FORMAT}: "
                        "run the version of Outfitter that wrote it, or a newer one, here"
                    )
                checkpoint = record
    allocations.sort(key=lambda record: (record.since, record.source.offset))
    for record in allocations:
        ledger.restore(PutAllocation(record))
    if checkpoint is not None:
        ledger.restore(SetToken(checkpoint.token))
        ledger.commits = checkpoint.commit
    return Restored(
        ledger=ledger, checkpoint=checkpoint, rivals=rivals, records=count, seconds=time.monotonic() - begun
    )


async def _last_values(bus: Bus, topic: str, partition: int, remit: Remit) -> tuple[dict[bytes, bytes], list[str], int]:
    """The last value of each key that is the remit's, its rivals, and how many records were read."""
    end = await bus.stable_end(topic, partition)
    last: dict[bytes, bytes] = {}
    rivals: dict[str, None] = {}
    count = 0
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        while reader.position < end:
            try:
                messages = await reader.fetch(max_records=10_000, timeout=MARKERS_WAIT_S)
            except OffsetOutOfRangeError as error:
                # the log's start moved while it was read: what was there is superseded by what is still there
                await reader.seek(error.start)
                continue
            count += len(messages)
            for message in messages:
                key = message.key
                if key is None:
                    continue
                if not remit.owns(key):
                    rival = remit.rival(key)
                    if rival is not None and message.value is not None:
                        rivals[rival] = None
                    elif rival is not None:
                        rivals.pop(rival, None)
                elif message.value is None:
                    last.pop(key, None)
                else:
                    last[key] = message.value
    return last, list(rivals), count

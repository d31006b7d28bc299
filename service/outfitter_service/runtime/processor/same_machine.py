"""Warns when this machine has live allocations under another host name: its devices may be lent twice.

A machine that was renamed starts as a new host. The manager only warns, because containers of one machine may be hosts
of their own on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import structlog

from outfitter_proto.bus import BusError
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_ledger
from outfitter_proto.keys import HOST, host_of
from outfitter_proto.records import HOLDING_STATES, Allocation, Host
from outfitter_service.runtime.changelog.restore import Restored
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.input.assignment import Assignment

log = structlog.get_logger("outfitter.processor")


async def warn(assignment: Assignment, restored: Restored) -> bool:
    """Warn of each other host of this machine and this boot that has live allocations in this partition. Returns False
    if that could not be found out."""
    if assignment.identity.host is None or assignment.identity.machine_id is None:
        return True
    others = set(_others(assignment.identity, restored))
    try:
        held = await _held(assignment, others, restored.end) if others else {}
    except BusError:
        return False  # the tenure fails as well, and the next one asks again
    for other, allocations in sorted(held.items()):
        log.warning(
            "this machine has live allocations under another host name: the same devices may be lent twice. Give "
            "the machine its old name with --host, or wait until those allocations are over",
            host=assignment.identity.host,
            other_host=other,
            allocations=allocations,
        )
    return True


def _others(identity: Identity, restored: Restored) -> Iterator[str]:
    """The other hosts whose last manager ran on this machine in this boot. A reboot ends all earlier processes."""
    machine_id = (identity.machine_id or "").encode()
    for key, value in restored.neighbours.items():
        if not key.startswith(HOST) or machine_id not in value:
            continue
        try:
            record = decode_ledger(value, key=key)
        except WireError:
            continue
        if isinstance(record, Host) and record.manager.machine_id == identity.machine_id:
            boots = {identity.boot_id, record.manager.boot_id}
            if len(boots) == 1 or None in boots:
                yield record.host


async def _held(assignment: Assignment, hosts: set[str], end: int) -> Counter[str]:
    """How many live allocations these hosts have."""
    topic, partition = assignment.topics.allocations, assignment.partition
    live: dict[bytes, str] = {}
    async with await assignment.bus.open_reader(topic, partition, start=None, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                key = message.key or b""
                host = host_of(key)
                if host is None or host not in hosts:
                    continue
                live.pop(key, None)
                if message.value is not None and _holds(message.value):
                    live[key] = host
    return Counter(live.values())


def _holds(value: bytes) -> bool:
    try:
        record = decode_ledger(value)
    except WireError:
        return False
    return isinstance(record, Allocation) and record.state in HOLDING_STATES

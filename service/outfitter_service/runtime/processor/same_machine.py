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
from outfitter_service.runtime.input.assignment import Assignment

log = structlog.get_logger("outfitter.processor")


class SameMachine:
    """Checks once, when a manager of host scope has restored its ledger."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._is_done = assignment.identity.host is None or assignment.identity.machine_id is None

    async def warn_once(self, restored: Restored) -> None:
        """Warn of each other host of this machine and this boot that has live allocations in this partition."""
        if self._is_done:
            return
        others = set(self._others(restored))
        try:
            held = await self._held(others, restored.end) if others else {}
        except BusError:
            return  # the tenure fails as well, and the next one checks again
        self._is_done = True
        for other, allocations in sorted(held.items()):
            log.warning(
                "this machine has live allocations under another host name: the same devices may be lent twice. Give "
                "the machine its old name with --host, or wait until those allocations are over",
                host=self._assignment.identity.host,
                other_host=other,
                allocations=allocations,
            )

    def _others(self, restored: Restored) -> Iterator[str]:
        """The other hosts whose last manager ran on this machine in this boot. A reboot ends all earlier processes."""
        identity = self._assignment.identity
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

    async def _held(self, hosts: set[str], end: int) -> Counter[str]:
        """How many live allocations these hosts have."""
        assignment = self._assignment
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

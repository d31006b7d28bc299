"""Writes into host records who manages a processor's hosts: at the start, for a new host, and at the end.

Many hosts need several commits. The announcer only writes into batches, and commits nothing.
"""

from __future__ import annotations

from collections import deque

from msgspec import structs

from outfitter_proto.codec import encode
from outfitter_proto.records import Host
from outfitter_service.core.hosts import host_record
from outfitter_service.core.state.ledger import Ledger, PutRecord
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.processor.commit.batch import Batch


class HostAnnouncer:
    """The announcements of one tenure."""

    def __init__(self, assignment: Assignment, ledger: Ledger, *, most: int) -> None:
        """`most`: the most hosts that one manager serves in this partition."""
        self._assignment = assignment
        self._ledger = ledger
        self._most = most
        self._waiting = deque(self._unannounced())
        self._unstopped: deque[str] | None = None

    def _unannounced(self) -> list[str]:
        """The hosts whose records must be rewritten. In host scope our own record is always rewritten; in cluster scope
        only records that say nobody manages the host."""
        own = self._assignment.identity.host
        if own is not None:
            return [own]
        hosts = self._ledger.hosts.items()
        return [
            name
            for name, host_state in hosts
            if host_state.incarnations
            and (host_state.record is None or host_state.record.manager.stopped_at is not None)
        ]

    def on_new_host(self, batch: Batch, host: str) -> str | None:
        """Announce a host that the ledger does not know, or return why it is not served."""
        if len(self._ledger.hosts) >= self._most:
            return f"host {host!r} is new, and this manager serves at most {self._most} hosts of one partition"
        self.announce(batch, host)
        return None

    def announce_waiting(self, batch: Batch, most: int) -> None:
        """Announce waiting hosts while the batch has room for their records and less than `most` events. Each host
        counts as an event."""
        while self._waiting and batch.events < most and self.announce(batch, self._waiting[0]):
            self._waiting.popleft()

    def announce(self, batch: Batch, host: str) -> bool:
        """Write into the record of `host` who manages it, and its resources. Returns False if the batch has no room."""
        host_state = self._ledger.host_state(host)
        manager = self._assignment.manager()
        before = host_state.record or Host(host=host, manager=manager, since=batch.now)
        record = structs.replace(before, manager=manager)
        held = bool(host_state.live)
        return batch.announce(host_record(record, batch.rules, host_state.inventories, batch.now, held=held) or record)

    def say_stopped(self, batch: Batch, full: float, *, hosts: bool) -> bool:
        """Write since when nobody manages the hosts, until the ledger's batch has `full` bytes. `hosts`: whether host
        records are written at all. Returns whether all hosts are done."""
        if self._unstopped is None:
            self._unstopped = deque(self._ledger.hosts if hosts else ())
        while self._unstopped:
            record = self._ledger.host_state(self._unstopped[0]).record
            if record is not None:
                stopped = structs.replace(record, manager=self._assignment.manager(batch.now))
                if batch.output.ledger_bytes and batch.output.ledger_bytes + len(encode(stopped)) > full:
                    return False
                batch.apply([PutRecord(stopped)])
            self._unstopped.popleft()
        return True

"""What the ledger says of who manages a processor's hosts: at the beginning, for a host that is new, and at the end.

With many hosts it takes several commits, each as full as the others. It only writes into batches.
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
        """`most`: how many hosts are served at most."""
        self._assignment = assignment
        self._ledger = ledger
        self._most = most
        self._waiting = deque(self._unannounced())
        self._parting: deque[str] | None = None

    def _unannounced(self) -> list[str]:
        """The hosts whose records do not say that they are managed now. The one of a host's own manager always is
        said anew; who owns a partition of many leaves those that were managed as they are."""
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
        """A host that was never heard of: it is served from now on, or this is why not."""
        if len(self._ledger.hosts) >= self._most:
            return f"host {host!r} is new, and this manager serves at most {self._most} hosts of one partition"
        self.announce(batch, host)
        return None

    def go_on(self, batch: Batch, full: float, most: int) -> None:
        """Announce those that wait for it, as many as there is room for. Each counts as an event, of which a batch may
        have `most`: where commits are too large, each of them is one of its own."""
        while self._waiting and batch.output.ledger_bytes < full and batch.events < most:
            self.announce(batch, self._waiting.popleft())

    def announce(self, batch: Batch, host: str) -> None:
        """Say who manages `host`, and what its resources are."""
        host_state = self._ledger.host_state(host)
        manager = self._assignment.manager()
        before = host_state.record or Host(host=host, manager=manager, since=batch.now)
        named = structs.replace(before, manager=manager)
        batch.announce(host_record(named, batch.rules, host_state.inventories, batch.now) or named)

    def say_stopped(self, batch: Batch, full: float, *, hosts: bool) -> bool:
        """Say since when nobody manages the hosts (with `hosts`), as far as there is room; whether all is said."""
        if self._parting is None:
            self._parting = deque(self._ledger.hosts if hosts else ())
        while self._parting:
            record = self._ledger.host_state(self._parting[0]).record
            if record is not None:
                manager = self._assignment.manager(batch.now)
                told = structs.replace(record, manager=manager)
                if batch.output.ledger_bytes and batch.output.ledger_bytes + len(encode(told)) > full:
                    return False
                batch.apply([PutRecord(told)])
            self._parting.popleft()
        return True

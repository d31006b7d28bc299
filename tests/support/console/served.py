"""An API in a thread of its own, whose model a test changes: for tests that drive a browser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from outfitter_proto import keys
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import DeadLetter, Transition
from outfitter_service.api.access import Guard
from outfitter_service.api.application import MOST_CONNECTIONS, application
from outfitter_service.api.follower import Follower
from outfitter_service.http.listener import Listening, serving
from support.api import OPEN, PARTITIONS, change, fleet_of, follower_of, message


class ServedFleet:
    """A fleet behind a real API on a port of its own. `url`: of the console."""

    def __init__(self, portal: BlockingPortal, records: Iterable[Any], guard: Guard) -> None:
        self.follower = _follower_of(records)
        self._portal = portal
        self._guard = guard
        self._server = ExitStack()
        self._address = "127.0.0.1:0"
        self._offset = 0

    @property
    def url(self) -> str:
        return f"http://{self._address}/"

    def start(self) -> None:
        """Serve; after a stop at the same address."""
        listening = Listening(address=self._address, most=MOST_CONNECTIONS)
        server = serving(lambda connections: application(self.follower, connections, self._guard), listening)
        self._address = self._server.enter_context(self._portal.wrap_async_context_manager(server))

    def stop(self) -> None:
        """End the server and all its streams. The model stays."""
        self._server.close()

    def restart_with(self, records: Iterable[Any]) -> None:
        """Serve another model, as an API does that was started anew."""
        self.stop()
        self.follower = _follower_of(records)
        self.start()

    def change(self, *records: Any) -> None:
        """New records, and their events."""
        self._portal.call(self._change, records)

    def delete(self, key: str) -> None:
        """The deletion of a record, and its event."""
        self._portal.call(self._delete, key)

    def add_steps(self, *steps: Transition) -> None:
        """Steps of history, and their events."""
        self._portal.call(self._add_steps, steps)

    def add_letters(self, *letters: DeadLetter) -> None:
        """Dead letters, and their events."""
        self._portal.call(self._add_letters, letters)

    def say_outage(self, reason: str | None) -> None:
        """The bus is away, or back."""
        self.follower.outage = reason

    def _next_offset(self) -> int:
        self._offset += 1
        return self._offset

    def _change(self, records: Iterable[Any]) -> None:
        for record in records:
            self._fleet.change(change(record, offset=self._next_offset()))

    def _delete(self, key: str) -> None:
        partition = partition_of(keys.host_of(key.encode()) or "", PARTITIONS)
        self._fleet.change(change(None, key=key, partition=partition, offset=self._next_offset()))

    def _add_steps(self, steps: Iterable[Transition]) -> None:
        for step in steps:
            record = message(step, key=step.record.key, offset=self._next_offset())
            self._fleet.add_step(record, step, announce=True)

    def _add_letters(self, letters: Iterable[DeadLetter]) -> None:
        for letter in letters:
            record = message(letter, key=letter.key, partition=0, offset=self._next_offset())
            self._fleet.add_letter(record, letter, announce=True)

    @property
    def _fleet(self) -> Any:
        assert self.follower.fleet is not None
        return self.follower.fleet


def _follower_of(records: Iterable[Any]) -> Follower:
    """A follower whose model is as prepared as after a start."""
    fleet = fleet_of(*records)
    for host in fleet.hosts:
        fleet.prepare(host)
    return follower_of(fleet)


@contextmanager
def served(records: Iterable[Any], guard: Guard = OPEN) -> Iterator[ServedFleet]:
    """A fleet that is served until the block ends."""
    with start_blocking_portal("asyncio") as portal:
        fleet = ServedFleet(portal, records, guard)
        fleet.start()
        try:
            yield fleet
        finally:
            fleet.stop()

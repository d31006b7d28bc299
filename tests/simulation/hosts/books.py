"""A script that keeps its own books of who has which devices of a host, and the driver that calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from outfitter_drivers.api import TemporaryDriverError, Worker
from outfitter_drivers.gpu.discovery_script import AllocateReleaseDriver
from outfitter_drivers.script import ScriptOutcome

if TYPE_CHECKING:
    from simulation.hosts.hardware import Bench

DEVICES = ("0", "1")
KILLED = ScriptOutcome(-9, b"", b"")


class Books:
    """Who has which devices, as the script has written down. It answers a repeated call as it answered the first."""

    def __init__(self) -> None:
        self.entries: dict[str, Sequence[str]] = {}

    def allocate(self, amount: int, who: str) -> ScriptOutcome:
        """Write down devices for a worker, unless it has some."""
        taken = {device for devices in self.entries.values() for device in devices}
        free = [device for device in DEVICES if device not in taken]
        if who not in self.entries:
            if len(free) < amount:
                return ScriptOutcome(1, b"", b"too few are free")
            self.entries[who] = free[:amount]
        return ScriptOutcome(0, ",".join(self.entries[who]).encode(), b"")

    def release(self, who: str) -> ScriptOutcome:
        """Strike a worker out."""
        self.entries.pop(who, None)
        return ScriptOutcome(0, b"", b"")


class BookedDriver(AllocateReleaseDriver):
    """The driver of scripts with books, whose script is the books of a bench. An offer stands until its worker goes."""

    offer_stands = math.inf

    def __init__(self, benches: Mapping[str, Bench]) -> None:
        super().__init__("books")
        self._benches = benches

    async def _call(
        self, verb: str, amount: int, worker: Worker, *, token: int | None, devices: Sequence[str] | None = None
    ) -> ScriptOutcome:
        """Take time, do it, and take time again: the manager or the script may be killed before and after."""
        bench = self._benches[worker.host or ""]
        try:
            await bench.take_time()
            who = f"{worker.host}/{worker.worker}/{worker.incarnation}"
            outcome = bench.books.allocate(amount, who) if verb == "allocate" else bench.books.release(who)
            await bench.take_time()
        except TemporaryDriverError:
            return KILLED
        return outcome

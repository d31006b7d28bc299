"""The devices of a simulated host: what drivers do to them stays when managers die.

It obeys the rules that drivers must keep at the moment at which something takes effect (a token below the highest seen
for a device changes nothing, nor does a prepare with one that was taken back), and writes down where a manager made a
device ready for two workers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from outfitter_drivers.api import (
    Device,
    ExternalResourceDriver,
    ExternalResourceInfo,
    Grant,
    InUseCheck,
    Inventory,
    Preparation,
    TemporaryDriverError,
    Worker,
)
from outfitter_service.core.model import ResourceSpec
from outfitter_service.runtime.supervisor import Loaded

RESOURCE = "gpu"
LOOK_S = 3.0
"""How often a driver looks at the devices."""


class Bench:
    """One host's devices. `slow_s`: how long a driver's call takes at most; `failing`: how often it fails."""

    def __init__(self, host: str, count: int, *, dice: random.Random) -> None:
        self.host = host
        self.ids = [f"{host}-{RESOURCE}-{index}" for index in range(count)]
        self.missing: set[str] = set()
        self.slow_s = 0.0
        self.failing = 0.0
        self.ready_for: dict[str, str] = {}
        self.violations: list[str] = []
        self.stale = 0
        self._highest: dict[str, tuple[int, bool]] = {}
        self._dice = dice

    async def take_time(self) -> None:
        """What hardware does: it takes its time, and now and then it fails."""
        await asyncio.sleep(self._dice.random() ** 3 * self.slow_s)
        if self._dice.random() < self.failing:
            raise TemporaryDriverError("the hardware did not want to")

    def fresh(self, grant: Grant, *, back: bool = False) -> bool:
        """Whether a call may take effect now. What was taken `back` can be prepared with a later token only."""
        rank = (grant.token, back)
        if any(rank < self._highest.get(device, (0, False)) for device in grant.device_ids):
            self.stale += 1
            return False
        self._highest.update(dict.fromkeys(grant.device_ids, rank))
        return True


def load(benches: Mapping[str, Bench], *, prepares: bool) -> dict[str, Loaded]:
    """The resource, with a driver of one manager's own that reaches the benches of several hosts."""
    driver = PreparingDriver(benches) if prepares else ListingDriver(benches)
    spec = ResourceSpec(name=RESOURCE, amount=1, prepares=prepares, confirms=prepares)
    return {RESOURCE: Loaded(spec=spec, driver=driver)}


class ListingDriver(ExternalResourceDriver, Inventory):
    """Names the devices that are there."""

    def __init__(self, benches: Mapping[str, Bench]) -> None:
        self.benches = benches

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        return []

    async def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        bench = self.benches[host]
        told: list[str] | None = None
        while True:
            found = [name for name in bench.ids if name not in bench.missing]
            if found != told:
                told = found
                yield [Device(id=name, properties={"index": name.rpartition("-")[2]}) for name in found]
            await asyncio.sleep(LOOK_S)


class PreparingDriver(ListingDriver, Preparation, InUseCheck):
    """Makes devices ready and takes them back."""

    async def prepare(self, grant: Grant) -> None:
        bench = self.benches[grant.worker.host]
        await bench.take_time()
        if bench.fresh(grant):
            for device in grant.device_ids:
                other = bench.ready_for.setdefault(device, grant.allocation)
                if other != grant.allocation:
                    bench.violations.append(f"{device} was made ready for {grant.allocation} while it was {other}'s")

    async def unprepare(self, grant: Grant) -> None:
        bench = self.benches[grant.worker.host]
        await bench.take_time()
        if bench.fresh(grant, back=True):
            for device in grant.device_ids:
                other = bench.ready_for.pop(device, grant.allocation)
                if other != grant.allocation:
                    bench.violations.append(f"{device} was taken back from {grant.allocation}, but it was {other}'s")

    async def in_use(self, grant: Grant) -> str | None:
        await self.benches[grant.worker.host].take_time()
        return None

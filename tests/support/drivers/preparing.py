"""A driver for tests that prepares devices and takes them back, and a bench on which one sees what was done to them.

The bench outlives managers, as hardware does; `param.bench` names it, and the driver is configured by its Python path
`support.drivers.preparing:PreparingDriverFactory`. It keeps the rules that drivers must keep (idempotent, no token
below the highest one seen), and writes down where the manager broke its own: two calls about one device at once, a
device prepared for a worker while it is another one's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import anyio

from outfitter_drivers.api import (
    CannotTell,
    Device,
    DriverParams,
    ExternalResourceDriver,
    ExternalResourceDriverFactory,
    ExternalResourceInfo,
    Grant,
    InUseCheck,
    Inventory,
    Preparation,
    Worker,
)

Act = Callable[[Grant], Awaitable[None]]


class Call(NamedTuple):
    """One call as it came."""

    what: str
    allocation: str
    token: int
    devices: tuple[str, ...]


async def well(_: Grant) -> None:
    """Nothing to do, and nothing goes wrong."""


class Bench:
    """The devices `<name>-0`, `<name>-1` … and what was done to them. `preparing`, `unpreparing` and `users` are
    the test's to set."""

    def __init__(self, name: str, count: int = 2) -> None:
        self.name = name
        self.ids = tuple(f"{name}-{index}" for index in range(count))
        self.preparing: Act = well
        self.unpreparing: Act = well
        self.users: dict[str, str | CannotTell] = {}
        self.calls: list[Call] = []
        self.given_back: dict[str, bool] = {}
        """What in-use checks were told of each allocation: whether its worker has given the devices back."""
        self.ready_for: dict[str, str] = {}
        self.stale = 0
        self.violations: list[str] = []
        self._highest: dict[str, int] = {}
        self._busy: set[str] = set()

    def called(self, what: str) -> list[Call]:
        return [call for call in self.calls if call.what == what]

    @contextmanager
    def working(self, what: str, grant: Grant) -> Iterator[bool]:
        """Around a call; False: its token is stale, and it must change nothing."""
        self.calls.append(Call(what, grant.allocation, grant.token, grant.device_ids))
        for device in grant.device_ids:
            if device in self._busy:
                self.violations.append(f"{what} of {device} for {grant.allocation} while another call is under way")
        fresh = all(grant.token >= self._highest.get(device, 0) for device in grant.device_ids)
        self.stale += not fresh
        self._busy.update(grant.device_ids)
        try:
            if fresh:
                self._highest.update(dict.fromkeys(grant.device_ids, grant.token))
            yield fresh
        finally:
            self._busy.difference_update(grant.device_ids)


BENCHES: dict[str, Bench] = {}


class PreparingDriver(ExternalResourceDriver, Inventory, Preparation, InUseCheck):
    """See the module."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        return [ExternalResourceInfo({"index": str(index)}) for index in range(len(self._bench.ids))]

    async def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        yield [Device(id=name, properties={"index": str(index)}) for index, name in enumerate(self._bench.ids)]
        await anyio.sleep_forever()

    async def prepare(self, grant: Grant) -> None:
        bench = self._bench
        with bench.working("prepare", grant) as fresh:
            await bench.preparing(grant)
            for device in grant.device_ids if fresh else ():
                other = bench.ready_for.setdefault(device, grant.allocation)
                if other != grant.allocation:
                    bench.violations.append(f"{device} made ready for {grant.allocation} while it is {other}'s")

    async def unprepare(self, grant: Grant) -> None:
        bench = self._bench
        with bench.working("unprepare", grant) as fresh:
            await bench.unpreparing(grant)
            for device in grant.device_ids if fresh else ():
                if bench.ready_for.pop(device, grant.allocation) != grant.allocation:
                    bench.violations.append(f"{device} taken back from {grant.allocation}, which does not have it")

    async def in_use(self, grant: Grant) -> str | CannotTell | None:
        self._bench.given_back[grant.allocation] = grant.is_given_back
        return next((self._bench.users[name] for name in grant.device_ids if name in self._bench.users), None)


class PreparingDriverFactory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config: DriverParams) -> PreparingDriver:
        return PreparingDriver(BENCHES[config["bench"]])

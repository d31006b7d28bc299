"""A driver whose inventory is what a test says, when it says it: `SOURCES[name].report(...)`. `CheckingFactory` makes
one that can also say who uses a device, as `SOURCES[name].in_use` has it.

It is configured by its Python path, `support.drivers.reporting:ReportingFactory`, and finds its source by
`param.source`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence

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
    Worker,
)


class Source:
    """The inventories of one resource, the newest of which counts. Nothing is reported before the first one."""

    def __init__(self) -> None:
        self._newest: Sequence[Device] | None = None
        self._failure: Exception | None = None
        self._changed = anyio.Event()
        self.in_use: dict[str, str | CannotTell] = {}
        """Who uses a device that is given back, by its id."""

    def report(self, *devices: Device) -> None:
        self._newest, self._failure = devices, None
        self._change()

    def fail(self, failure: Exception) -> None:
        """Raise this error at each look, until the next report."""
        self._failure = failure
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def inventories(self) -> AsyncIterator[Sequence[Device]]:
        while True:
            changed = self._changed
            if self._failure is not None:
                raise self._failure
            if self._newest is not None:
                yield self._newest
            await changed.wait()


SOURCES: dict[str, Source] = {}


class ReportingDriver(ExternalResourceDriver, Inventory):
    """See the module."""

    call_timeout = 60.0
    """Seconds: the first inventory comes when the test has it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        raise NotImplementedError

    def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        return self._source.inventories()


class ReportingFactory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config: DriverParams) -> ReportingDriver:
        return ReportingDriver(SOURCES[config["source"]])


class CheckingDriver(ReportingDriver, InUseCheck):
    """See the module."""

    async def in_use(self, grant: Grant) -> str | CannotTell | None:
        return next((self._source.in_use[name] for name in grant.device_ids if name in self._source.in_use), None)


class CheckingFactory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config: DriverParams) -> CheckingDriver:
        return CheckingDriver(SOURCES[config["source"]])


def reporting(*sources: str, extra: str = "", factory: str = "ReportingFactory") -> str:
    """TOML of resources of these names, each with its own source; `extra` are settings of the last one."""
    resources = [
        f'[external-resource.{name}]\namount = 1\ndriver = "support.drivers.reporting:{factory}"\n'
        f'param.source = "{name}"\n'
        for name in sources
    ]
    return "".join([f"external-resources = {list(sources)}\n", *resources, extra])

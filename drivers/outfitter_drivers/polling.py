"""Base of drivers that poll all their devices. A driver implements only `look`, which is one poll."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence

import anyio

from outfitter_drivers import settings
from outfitter_drivers.api import (
    Device,
    ExternalResourceDriver,
    ExternalResourceInfo,
    Inventory,
    NotEnoughDevicesError,
    TemporaryDriverError,
    Worker,
)
from outfitter_proto.records import Health

GRACE_S = 5.0
"""Seconds beyond `call_timeout` for a driver that limits its looks itself, and can say more of what took so long."""


class PollingDriver(ExternalResourceDriver, Inventory):
    """Polls once for each call, and every `poll_interval` seconds for the inventory."""

    def __init__(self, *, poll_interval: float) -> None:
        self._poll_interval = poll_interval

    @abstractmethod
    async def look(self) -> list[Device]:
        """All current devices, in the order of preference, within `call_timeout`. A longer look is cancelled.

        Raises:
            TemporaryDriverError, PermanentDriverError: see these classes.
        """

    @abstractmethod
    def shortage(self, amount: int, *, healthy: int, known: int) -> str:
        """The error message for a request of `amount` devices, if only `healthy` of the `known` devices are healthy."""

    async def retrieve_resource_info(
        self,
        amount: int,
        worker: Worker,  # noqa: ARG002  the same devices for all workers
    ) -> Collection[ExternalResourceInfo]:
        settings.require_amount(amount)
        devices = await self.look()
        usable = [device.info() for device in devices if device.health is Health.HEALTHY]
        if len(usable) < amount:
            raise NotEnoughDevicesError(self.shortage(amount, healthy=len(usable), known=len(devices)))
        return usable[:amount]

    async def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:  # noqa: ARG002  this machine's
        shown: list[Device] | None = None
        while True:
            devices = await self._look_in_time()
            if devices != shown:
                shown = devices
                yield list(devices)
            await self.until_next_look()

    async def until_next_look(self) -> None:
        """Wait for the poll interval, or for less if the driver knows that something has changed."""
        await anyio.sleep(self._poll_interval)

    async def _look_in_time(self) -> list[Device]:
        limit = self.call_timeout + GRACE_S
        with anyio.move_on_after(limit):
            return await self.look()
        raise TemporaryDriverError(f"its driver did not answer within {limit:g} s")

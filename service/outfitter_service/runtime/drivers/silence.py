"""A driver that does not answer, again and again: nobody knows how the devices are that it named."""

from __future__ import annotations

import time

import anyio
from msgspec import structs

from outfitter_proto.records import Health
from outfitter_service.core import model as m

SILENT_LOOKS = 3
"""After so many failed looks in a row, and `SILENT_S`, nobody knows how an inventory's devices are."""
SILENT_S = 10.0
"""Seconds from the first failed look on. So neither one slow call nor a short remount changes anything."""
LONGEST_PAUSE_S = 30.0
"""A driver that will not be asked for longer than this, in seconds, is silent at once."""
LONGEST_WORDS = 200
"""Most characters of the driver's message in a device's reason. A record repeats it for each device."""


class Silence:
    """What one driver named last, and how long it has not answered since."""

    def __init__(self) -> None:
        self._devices: tuple[m.KnownDevice, ...] = ()
        self._unknown: tuple[m.KnownDevice, ...] = ()
        self._failures = 0
        self._begun = 0.0
        self._since = ""

    def answered(self, devices: tuple[m.KnownDevice, ...]) -> None:
        """The driver has named these devices."""
        self._devices, self._unknown, self._failures = devices, (), 0

    def failed(self, reason: str, *, pause_s: float) -> tuple[m.KnownDevice, ...]:
        """A look has failed, and the next one comes after a pause. Returns the devices, the healthy ones as unknown,
        once the driver has been silent for long; until then none. Their reason stays the first one, whatever later
        looks say: else each of them would change the record of each holder."""
        if not self._failures:
            self._begun, self._since = anyio.current_time(), time.strftime("%Y-%m-%d %H:%M:%S")
        self._failures += 1
        is_long = self._failures >= SILENT_LOOKS and anyio.current_time() >= self._begun + SILENT_S
        if not self._unknown and (is_long or pause_s > LONGEST_PAUSE_S):
            words = f"its driver has not answered since {self._since}: {reason[:LONGEST_WORDS]}"
            self._unknown = tuple([_unknown(device, words) for device in self._devices])
        return self._unknown


def _unknown(device: m.KnownDevice, reason: str) -> m.KnownDevice:
    """The device, of which nobody knows any more whether it is healthy. An ill one stays as it was seen."""
    is_healthy = device.health == Health.HEALTHY
    return structs.replace(device, health=Health.UNKNOWN, reason=reason) if is_healthy else device

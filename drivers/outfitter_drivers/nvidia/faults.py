"""The last Xid of each GPU that makes it ill, from NVML's events.

Kept in memory: for as long as this manager, its driver's version and the boot last. A release of the GPUs ends it, too,
because it is made to reset them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from outfitter_drivers.nvidia import health
from outfitter_drivers.nvidia.health import Verdict
from outfitter_drivers.nvidia.snapshot import Event, Gpu, MigInstance
from outfitter_drivers.nvidia.xid import ILL, XidClasses
from outfitter_proto.records import Health
from outfitter_proto.support.printable import printable

logger = logging.getLogger("outfitter.drivers")

_MOST_LOGGED = 1000
"""Xids that were logged. A broken program may cause thousands of one kind."""

_Place = tuple[str, int | None, int | None]


class Faults:
    """What the classes of Xids say of the GPUs."""

    def __init__(self, classes: XidClasses) -> None:
        self._classes = classes
        self._last: dict[_Place, int] = {}
        self._logged: set[tuple[str | None, int]] = set()
        self._driver_version: str | None = None

    def note(self, events: Iterable[Event]) -> None:
        """Remember what makes a GPU ill, and log the first Xid of a kind on each GPU."""
        for event in events:
            if (code := event.xid) is None:
                continue
            kind = self._classes.of(code)
            if event.uuid is not None and kind in ILL:
                self._last[event.uuid, event.gpu_instance, event.compute_instance] = code
            if (event.uuid, code) not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add((event.uuid, code))
                about = "a GPU" if event.uuid is None else printable(event.uuid)
                logger.warning(
                    "NVML reports Xid %d on %s: %s", code, about, kind or "no known Xid, so look at its health"
                )

    def forget(self) -> None:
        """The GPUs may have been reset."""
        self._last.clear()
        self._logged.clear()

    def at_driver(self, version: str | None) -> None:
        """Forget if the driver's version has changed: it was loaded anew."""
        if version is not None and version != self._driver_version:
            if self._driver_version is not None:
                self.forget()
            self._driver_version = version

    def verdict(self, gpu: Gpu) -> Verdict:
        return health.of_gpu(gpu, self._last.get((gpu.uuid or "", None, None)), self._classes)

    def verdict_of_instance(self, gpu: Gpu, instance: MigInstance) -> Verdict:
        """An instance is as ill as its GPU, and by events about itself alone."""
        whole = self.verdict(gpu)
        uuid, number = gpu.uuid or "", instance.gpu_instance
        # An event may be about all compute instances of a GPU instance.
        own = self._last.get((uuid, number, instance.compute_instance), self._last.get((uuid, number, None)))
        if whole.health is not Health.HEALTHY or own is None:
            return health.of_parts(gpu, whole)
        return health.of_gpu(gpu, own, self._classes)

"""What drivers remark about hardware that works, for `outfitter config check` and `doctor`.

A driver that cannot look has no remarks: `doctor` shows its error elsewhere, and `config check` is also for
machines without the hardware.
"""

from __future__ import annotations

from collections.abc import Iterator

import anyio

from outfitter_drivers.api import ExternalResourceDriver, Remarks
from outfitter_service.config import Inspection, Problem, Severity
from outfitter_service.runtime.drivers.building import build_served
from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code, written

WITHIN_S = 15.0
"""Time limit for a driver's look."""
CLOSE_WITHIN_S = 2.0
"""Time limit for closing a driver."""


async def remarks_of(driver: ExternalResourceDriver) -> list[str]:
    """The driver's remarks; none if it has none, or cannot look."""
    if not isinstance(driver, Remarks):
        return []
    found: list[str] = []
    with anyio.move_on_after(min(WITHIN_S, driver.call_timeout)):
        try:
            with foreign_code():
                found = [written(str(remark)) for remark in await driver.remarks()]
        except DriverCallError:
            return []
    return found


def remark_problems(inspection: Inspection) -> Iterator[Problem]:
    """A warning for each remark of a configured driver about this machine."""
    if inspection.settings is None:
        return
    for config in inspection.settings.resources:
        if config.driver is None or not config.in_effect:
            continue
        try:
            driver = build_served(config, inspection.settings.scope, lambda _: None).driver
        except Exception:  # noqa: BLE001, S112 - foreign code, of which the check of drivers speaks
            continue
        for remark in anyio.run(_once, driver):
            yield Problem(
                file=inspection.origins.get(config.key("driver-factory.class"), ""),
                key=config.key("driver-factory.class"),
                found=config.driver,
                problem=f"its driver says: {remark}",
                severity=Severity.WARNING,
                resource=config.name,
            )


async def _once(driver: ExternalResourceDriver) -> list[str]:
    try:
        return await remarks_of(driver)
    finally:
        with anyio.move_on_after(CLOSE_WITHIN_S, shield=True):
            try:
                with foreign_code():
                    await driver.aclose()
            except DriverCallError:
                pass

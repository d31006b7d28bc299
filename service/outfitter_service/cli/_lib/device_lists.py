"""What configured drivers list, for `outfitter config check` and `doctor`: each lists its devices once.

A driver without a list is not asked, because it would hand devices out.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import anyio

from outfitter_drivers.api import Device
from outfitter_service.config import ConfigProblem, Inspection, ResourceConfig, Settings, Severity
from outfitter_service.core import reasons
from outfitter_service.core.decision import Rules
from outfitter_service.core.model import DriverFailure, KnownDevice
from outfitter_service.core.state import names_room
from outfitter_service.core.state.resource_state import RefusedNames, ResourceState
from outfitter_service.runtime.drivers.building import ServableDriver, build_served
from outfitter_service.runtime.drivers.health_checks import merged, words_of
from outfitter_service.runtime.drivers.health_script import HealthScript
from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code, known_devices

ANSWER_WITHIN_S = 15.0
"""How long a driver may take for its first report, if its own limit is longer: less than `doctor` waits for all."""
CLOSE_WITHIN_S = 2.0
"""Time limit for closing a driver."""


def lists(
    settings: Settings, *, with_scripts: bool = False
) -> Iterator[tuple[ResourceConfig, tuple[KnownDevice, ...] | DriverCallError]]:
    """Each resource whose driver can be built and has a list, with its devices or why it gave none. `with_scripts`: ask
    health scripts, too."""
    for config in settings.resources:
        if config.driver is None:
            continue
        try:
            served = build_served(config, settings.scope, lambda _: None)
        except Exception:  # noqa: BLE001, S112 - foreign code, of which the check of drivers speaks
            continue
        if (inventory := served.inventory) is None:
            continue
        try:
            found = anyio.run(_listed, config.name, served, inventory.inventory(settings.host))
            if with_scripts and served.health_script is not None:
                found = anyio.run(_with_words, served.health_script, settings.host, config.name, found)
            yield config, found
        except DriverCallError as error:
            yield config, error


async def _listed(
    resource: str, served: ServableDriver, reports: AsyncIterator[Sequence[Device]]
) -> tuple[KnownDevice, ...]:
    """The driver's first report.

    Raises:
        DriverCallError: there is none.
    """
    limit = min(served.timeout_s, ANSWER_WITHIN_S)
    try:
        with anyio.fail_after(limit), foreign_code():
            return await known_devices(resource, await anext(reports))
    except TimeoutError as error:
        raise DriverCallError(DriverFailure(reason=f"no answer within {limit:g} s")) from error
    finally:
        with anyio.move_on_after(CLOSE_WITHIN_S, shield=True), contextlib.suppress(DriverCallError), foreign_code():
            await served.driver.aclose()


async def _with_words(
    script: HealthScript, host: str, resource: str, devices: tuple[KnownDevice, ...]
) -> tuple[KnownDevice, ...]:
    words = await words_of(script, host, resource, devices, within_s=ANSWER_WITHIN_S)
    return tuple([merged(device, words[device.id]) for device in devices])


def refused(found: Mapping[str, tuple[KnownDevice, ...]]) -> dict[str, str]:
    """The resources whose reports a manager would refuse, because a host's record has no room for the names of these
    devices, and the reason of each. `found`: the devices in the order of the configuration."""
    wanted = {name: names_room.size(ResourceState.of(devices).links) for name, devices in found.items()}
    most = names_room.most_bytes(Rules(writer="", specs={}).max_bytes)
    return {
        name: reasons.names_refused(name, RefusedNames(size=wanted[name], room=room, most=most))
        for name, room in names_room.without_room(wanted, {}, most).items()
    }


def name_problems(inspection: Inspection) -> Iterator[ConfigProblem]:
    """A warning for each report that a manager would refuse on this machine."""
    if inspection.settings is None:
        return
    found = {config.name: devices for config, devices in lists(inspection.settings) if isinstance(devices, tuple)}
    reasons_of = refused(found)
    for config in inspection.settings.resources:
        if config.name in reasons_of:
            yield ConfigProblem(
                file=inspection.origins.get(config.key("driver-factory.class"), ""),
                key=config.key("driver-factory.class"),
                found=config.driver,
                problem=reasons_of[config.name],
                severity=Severity.WARNING,
                resource=config.name,
            )

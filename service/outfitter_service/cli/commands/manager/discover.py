"""`outfitter discover`: one call of one resource's driver, for all devices or as Flink makes it. No manager, no bus, no
ledger."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.cli._lib.errors import warn
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_drivers.api import Device, ExternalResourceDriver, ExternalResourceInfo, Inventory, Worker
    from outfitter_service.config import Inspection, ResourceConfig
    from outfitter_service.runtime.drivers.building import ServableDriver
    from outfitter_service.runtime.drivers.health_script import HealthScript


T = TypeVar("T")

CLOSE_WITHIN = 5.0
"""Time limit in seconds for closing a driver."""
SCRIPT_WITHIN_S = 60.0
"""Time limit for the health script's runs for all devices."""


@click.command()
@click.argument("resource")
@options.config
@options.host
@click.option("--amount", type=int, help="Ask for so many healthy devices, as Flink does. Default: show all devices.")
@options.json_output
def discover(resource: str, config: str | None, host: str | None, amount: int | None, as_json: bool) -> None:
    """Run the driver of RESOURCE once, and print all its devices with their health and properties.

    A driver without an inventory, or with --amount any driver, is asked for devices as Flink asks. It may name more
    than the amount. With --json: a list of property objects. If it fails, the exit code is 1, and standard error has
    the reason.
    """
    import anyio

    from outfitter_drivers.api import Inventory, Worker
    from outfitter_proto.names import default_host
    from outfitter_service.config import inspect

    if amount is not None and not 0 < amount < 2**63:
        raise OutfitterCliError(f"--amount is {amount}; valid is a whole number from 1 to {2**63 - 1}")
    chosen = _chosen(inspect(config, {} if host is None else {"host": host}, required=True), resource)
    least = amount or chosen.amount
    if not least:
        raise OutfitterCliError(chosen.reason or f"{chosen.key('amount')} is not known; use --amount")
    with contextlib.redirect_stdout(sys.stderr):  # a driver's prints are no data
        served = _build(chosen)
        driver = served.driver
        worker = Worker(host=host or default_host(), resource=resource)
        if isinstance(driver, Inventory) and amount is None:
            ask = partial(_inventory, driver, worker, served.health_script)
            found = anyio.run(_call_until_signal, driver, resource, ask)
            infos = [_with_health(device) for device in found]
            _warn_of_few(found, least, resource)
            _warn_of_variables(resource, found)
        else:
            asked = anyio.run(_call_until_signal, driver, resource, partial(_ask, driver, least, worker))
            infos = [dict(info) for info in asked]
            _warn_of_variables(resource, (driver.device(info) for info in asked))
    if as_json:
        output.print_json(infos)
        return
    keys = list(dict.fromkeys(key for info in infos for key in info))
    output.print_table(keys, ([info.get(key) for key in keys] for info in infos))


def _with_health(device: Device) -> dict[str, str]:
    named = {"name": device.name} if device.name is not None and "name" not in device.properties else {}
    told = {"health.reason": device.reason} if device.reason else {}
    return {**device.properties, **named, "health": str(device.health), **told}


def _warn_of_few(devices: Sequence[Device], least: int, resource: str) -> None:
    healthy = sum(device.health == "healthy" for device in devices)
    if healthy < least:
        warn(f"{healthy} of {len(devices)} {resource} {'is' if healthy == 1 else 'are'} healthy; a worker gets {least}")


def _warn_of_variables(resource: str, devices: Iterable[Device]) -> None:
    """Warn of the devices' variables that a worker must allow. `devices`: foreign code may make them."""
    from outfitter_service.cli._lib.driver_remarks import must_allow, not_allowed, variables_of
    from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code

    variables: set[str] = set()
    with contextlib.suppress(DriverCallError), foreign_code():
        variables = variables_of(devices)
    if names := not_allowed(variables):
        warn(must_allow({resource: names}))


def _chosen(inspection: Inspection, resource: str) -> ResourceConfig:
    from outfitter_service.config import ConfigurationError

    if inspection.settings is None:
        raise ConfigurationError(inspection.errors)
    resources = {config.name: config for config in inspection.settings.resources}
    if resource not in resources:
        raise OutfitterCliError(
            f"resource {resource!r} is not configured; configured: {', '.join(resources) or 'none'}"
        )
    wrong = [problem for problem in inspection.errors if problem.resource == resource]
    if wrong:
        raise ConfigurationError(wrong)
    return resources[resource]


def _build(config: ResourceConfig) -> ServableDriver:
    from outfitter_service.runtime.drivers.building import build_error_text, build_served

    if config.driver is None:
        raise OutfitterCliError(
            config.reason or f"{config.name} has no driver; set {config.key('driver-factory.class')}"
        )
    try:
        # build it for host scope, whatever is configured: this command looks at its own machine
        return build_served(config, "host", lambda warning: warn(f"{config.key('param.')}{warning}"))
    except Exception as error:
        # foreign code: report any error of it
        raise OutfitterCliError(f"the driver of {config.name} cannot be built: {build_error_text(error)}") from error


async def _call_until_signal(
    driver: ExternalResourceDriver, resource: str, ask: Callable[[], Awaitable[list[T]]]
) -> list[T]:
    """Call the driver, and close it. A signal that ends this process ends the call first, with the programs that the
    driver started.

    Raises:
        OutfitterCliError: see `ask`.
    """
    import anyio

    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    ending: signal.Signals | None = None
    answer: list[T] | Exception = []

    async def call() -> None:
        nonlocal answer
        try:
            answer = await _call(driver, resource, ask)
        except Exception as error:  # noqa: BLE001 - it is raised outside of the task group, which would wrap it
            answer = error
        tasks.cancel_scope.cancel()

    with anyio.open_signal_receiver(*heard) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            async for number in signals:
                ending = number
                tasks.cancel_scope.cancel()
    if ending is not None:
        signal.raise_signal(ending)
        sys.exit(128 + ending)  # the first process of a PID namespace survives its own signals
    if isinstance(answer, Exception):
        raise answer
    return answer


async def _call(driver: ExternalResourceDriver, resource: str, ask: Callable[[], Awaitable[list[T]]]) -> list[T]:
    import anyio

    from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code

    try:
        return await ask()
    finally:
        with anyio.move_on_after(CLOSE_WITHIN, shield=True):
            try:
                with foreign_code():
                    await driver.aclose()
            except DriverCallError as error:
                warn(f"the driver of {resource} did not close well: {error}")


@contextlib.contextmanager
def _within_its_limit(driver: ExternalResourceDriver, resource: str) -> Iterator[None]:
    """Raises OutfitterCliError: the driver failed, or took too long."""
    import anyio

    from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code

    limit = driver.call_timeout
    try:
        with anyio.fail_after(limit), foreign_code():
            yield
    except TimeoutError as error:
        raise OutfitterCliError(f"the driver of {resource} has not answered within {limit:g} s") from error
    except DriverCallError as error:
        raise OutfitterCliError(f"the driver of {resource} failed: {error}") from error


async def _inventory(driver: Inventory, worker: Worker, script: HealthScript | None) -> list[Device]:
    """All devices that the driver names at first, also the ill ones, with what a health script says of them.

    Raises:
        OutfitterCliError: it failed, took too long, named none, or named what is no device.
    """
    from outfitter_drivers.api import Device
    from outfitter_service.runtime.drivers.translation import within_limit

    found: list[Device] = []
    with _within_its_limit(driver, worker.resource):  # type: ignore[arg-type]  # whatever has an inventory is a driver
        reports = driver.inventory(worker.host)
        async for report in reports:
            found = list(within_limit(worker.resource, report))
            break
        if isinstance(reports, AsyncGenerator):
            await reports.aclose()
    if wrong := [device for device in found if not isinstance(device, Device)]:
        raise OutfitterCliError(f"the driver of {worker.resource} returned {wrong[0]!r}, which is no Device")
    if not found:
        raise OutfitterCliError(f"the driver of {worker.resource} names no device")
    return found if script is None else await _with_words(script, worker, found)


async def _with_words(script: HealthScript, worker: Worker, devices: Sequence[Device]) -> list[Device]:
    """The devices, each as ill as its driver or the health script says.

    Raises:
        OutfitterCliError: one of them cannot be lent as it is.
    """
    from msgspec import structs

    from outfitter_service.runtime.drivers.health_checks import merged, words_of
    from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code, known_devices

    try:
        with foreign_code():
            known = await known_devices(worker.resource, devices)
    except DriverCallError as error:
        raise OutfitterCliError(f"the driver of {worker.resource} failed: {error}") from error
    words = await words_of(script, worker.host, worker.resource, known, within_s=SCRIPT_WITHIN_S)
    told = [merged(each, words[each.id]) for each in known]
    return [
        structs.replace(device, health=each.health, reason=each.reason)
        for device, each in zip(devices, told, strict=True)
    ]


async def _ask(driver: ExternalResourceDriver, amount: int, worker: Worker) -> list[ExternalResourceInfo]:
    """Make Flink's call once, within its time limit. Fewer devices than `amount` are a failure, unlike in Flink.

    Raises:
        OutfitterCliError: it failed, took too long, or named fewer devices than `amount`.
    """
    from outfitter_drivers.api import ExternalResourceInfo
    from outfitter_service.runtime.drivers.translation import within_limit

    with _within_its_limit(driver, worker.resource):
        infos = list(within_limit(worker.resource, await driver.retrieve_resource_info(amount, worker) or ()))
    if wrong := [info for info in infos if not isinstance(info, ExternalResourceInfo)]:
        raise OutfitterCliError(
            f"the driver of {worker.resource} returned {wrong[0]!r}, which is no ExternalResourceInfo"
        )
    if len(infos) < amount:
        raise OutfitterCliError(f"{amount} {worker.resource} requested, but its driver returned {len(infos)}")
    return infos

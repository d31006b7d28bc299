"""`outfitter discover`: one call of one resource's driver, as Flink makes it. No manager, no bus, no ledger."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.query.errors import OutfitterCliError, warn

if TYPE_CHECKING:
    from outfitter_drivers.api import ExternalResourceDriver, ExternalResourceInfo, Worker
    from outfitter_service.config import Inspection, ResourceConfig


CLOSE_WITHIN = 5.0
"""Time limit in seconds for closing a driver."""


@click.command()
@click.argument("resource")
@options.config
@options.host
@click.option("--amount", type=int, help="How many devices to ask for. Default: the configured amount.")
@options.json_output
def discover(resource: str, config: str | None, host: str | None, amount: int | None, as_json: bool) -> None:
    """Run the driver of RESOURCE once, and print the devices' properties.

    The driver may name more devices than the amount. With --json: a list of property objects. If it fails, the exit
    code is 1, and standard error has the reason.
    """
    import anyio

    from outfitter_drivers.api import Worker
    from outfitter_proto.names import default_host
    from outfitter_service.config import inspect

    if amount is not None and not 0 < amount < 2**63:
        raise OutfitterCliError(f"--amount is {amount}; valid is a whole number from 1 to {2**63 - 1}")
    chosen = _chosen(inspect(config, {} if host is None else {"host": host}, required=True), resource)
    amount = amount or chosen.amount
    if not amount:
        raise OutfitterCliError(chosen.reason or f"{chosen.key('amount')} is not known; use --amount")
    with contextlib.redirect_stdout(sys.stderr):  # a driver's prints are no data
        driver = _build(chosen)
        devices = anyio.run(_call_until_signal, driver, amount, Worker(host=host or default_host(), resource=resource))
    infos = [dict(info) for info in devices]
    if as_json:
        output.print_json(infos)
        return
    keys = list(dict.fromkeys(key for info in infos for key in info))
    output.print_table(keys, ([info.get(key) for key in keys] for info in infos))


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


def _build(config: ResourceConfig) -> ExternalResourceDriver:
    from outfitter_service.runtime.drivers.building import build_error_text, build_served

    if config.driver is None:
        raise OutfitterCliError(
            config.reason or f"{config.name} has no driver; set {config.key('driver-factory.class')}"
        )
    try:
        # build it for host scope, whatever is configured: this command looks at its own machine
        return build_served(config, "host", lambda warning: warn(f"{config.key('param.')}{warning}")).driver
    except Exception as error:
        # foreign code: report any error of it
        raise OutfitterCliError(f"the driver of {config.name} cannot be built: {build_error_text(error)}") from error


async def _call_until_signal(driver: ExternalResourceDriver, amount: int, worker: Worker) -> list[ExternalResourceInfo]:
    """Call the driver. A signal that ends this process ends the call first, with the programs that the driver started.

    Raises:
        OutfitterCliError: see `_call`.
    """
    import anyio

    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    ending: signal.Signals | None = None
    answer: list[ExternalResourceInfo] | Exception = []

    async def call() -> None:
        nonlocal answer
        try:
            answer = await _call(driver, amount, worker)
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


async def _call(driver: ExternalResourceDriver, amount: int, worker: Worker) -> list[ExternalResourceInfo]:
    """Call the driver once, within its time limit. Fewer devices than `amount` are a failure, unlike in Flink.

    Raises:
        OutfitterCliError: it failed, took too long, or named fewer devices than `amount`.
    """
    import anyio

    from outfitter_drivers.api import ExternalResourceInfo
    from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code

    limit = driver.call_timeout
    try:
        with anyio.fail_after(limit), foreign_code():
            infos = list(await driver.retrieve_resource_info(amount, worker) or ())
    except TimeoutError as error:
        raise OutfitterCliError(f"the driver of {worker.resource} has not answered within {limit:g} s") from error
    except DriverCallError as error:
        raise OutfitterCliError(f"the driver of {worker.resource} failed: {error}") from error
    finally:
        with anyio.move_on_after(CLOSE_WITHIN, shield=True):
            try:
                with foreign_code():
                    await driver.aclose()
            except DriverCallError as error:
                warn(f"the driver of {worker.resource} did not close well: {error}")
    if wrong := [info for info in infos if not isinstance(info, ExternalResourceInfo)]:
        raise OutfitterCliError(
            f"the driver of {worker.resource} returned {wrong[0]!r}, which is no ExternalResourceInfo"
        )
    if len(infos) < amount:
        raise OutfitterCliError(f"{amount} {worker.resource} requested, but its driver returned {len(infos)}")
    return infos

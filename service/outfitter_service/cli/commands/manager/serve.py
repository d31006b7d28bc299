"""`outfitter serve`: the manager in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import click

from outfitter_service import standard_error
from outfitter_service.cli._lib import event_loop, options, setting_flags
from outfitter_service.cli._lib.errors import warn

if TYPE_CHECKING:
    from outfitter_service.api.access import Guard
    from outfitter_service.runtime.manager.service import Service


@click.command()
@options.connection
@setting_flags.add(*setting_flags.NAMES)
@click.option(
    "--take-over", is_flag=True, help="Serve a host whose ledger another machine wrote; that machine must be gone."
)
@click.option(
    "--adopt-ledger",
    is_flag=True,
    help="Accept a ledger whose topic was recreated or restored; it must have every running worker.",
)
@click.pass_context
def serve(ctx: click.Context, /, config: str | None, take_over: bool, adopt_ledger: bool, **_options: object) -> None:
    """Serve this host's workers: answer registrations, run drivers, keep leases, publish allocations."""
    from outfitter_service.runtime.liveness import descriptors

    descriptors.prepare()  # first, so that no lack of descriptors shows as another error

    from outfitter_service import logs, memory
    from outfitter_service.api import access
    from outfitter_service.config import Severity, load
    from outfitter_service.runtime.manager.service import Service

    settings = load(config, options.given(ctx, *setting_flags.NAMES))
    logs.configure(settings.log_format, settings.log_level)
    for problem in settings.problems:
        if problem.severity is not Severity.INFO:
            warn(str(problem))
    guard = access.guard(settings.http, settings.api_token_file) if settings.api else None
    memory.tune()
    service = Service(settings, take_over=take_over, adopt_ledger=adopt_ledger)
    anyio.run(_serve, service, guard, backend_options=event_loop.backend_options())


async def _serve(service: Service, guard: Guard | None) -> None:
    """`guard`: of the API; None: it is not served."""
    # claim the host before the port: a second manager of the host must not be told to use another port
    with service.alone(), anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with _listening(service, guard) as address, anyio.create_task_group() as tasks:
            who = f"host {service.settings.host}" if service.settings.scope == "host" else "cluster scope"
            warn(
                f"{who} on {service.settings.bus} (cluster {service.settings.cluster}), "
                f"metrics at http://{address}/metrics"
            )

            async def stop_on_signal() -> None:
                async for _signal in signals:
                    if not service.stopping:
                        _end_by_force(service.settings.shutdown_timeout)
                    service.stop()

            tasks.start_soon(stop_on_signal)
            await service.run()
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def _listening(service: Service, guard: Guard | None) -> AsyncIterator[str]:
    """Serve the manager's HTTP, with the API if there is a guard; yields the address."""
    from outfitter_service.http.server import listening

    settings = service.settings
    if guard is None:
        async with listening(service, settings.http) as address:
            yield address
        return
    from outfitter_service.api import follower as followers
    from outfitter_service.api.application import MOST_CONNECTIONS, add_to
    from outfitter_service.http.listener import Listening

    where = Listening(address=settings.http, most=MOST_CONNECTIONS)
    host = settings.host if settings.scope == "host" else None
    async with (
        followers.opened(settings.bus, settings.login, settings.cluster, host=host) as follower,
        listening(service, where, add=lambda app: add_to(app, follower, guard)) as address,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(follower.run)
        yield address
        tasks.cancel_scope.cancel()


def _end_by_force(after_s: float) -> None:
    """End the process even if a thread hangs in a driver's blocking call and cannot be cancelled. This is as harmless
    as SIGKILL."""

    def end() -> None:
        warn(f"the shutdown took longer than {after_s:g} s, ending as it stands")
        standard_error.finish()
        os._exit(1)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()

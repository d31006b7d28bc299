"""`outfitter api`: the read API of a whole cluster, in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import anyio
import click

from outfitter_service.cli._lib import event_loop, options, setting_flags
from outfitter_service.cli._lib.errors import warn

if TYPE_CHECKING:
    from outfitter_service.api.access import Guard
    from outfitter_service.config import BusConnection
    from outfitter_service.http.listener import Listening

ADDRESS = "127.0.0.1:9478"


@click.command()
@options.of_cluster
@click.option("--listen", metavar="HOST:PORT", default=ADDRESS, show_default=True, help="Where to serve.")
@click.option(
    "--token-file", metavar="FILE", type=click.Path(), envvar="OUTFITTER_API_TOKEN_FILE", show_envvar=True,
    help="The file with the token that each request must have. Read again for each request.",
)  # fmt: skip
@options.certificate()
@options.client_ca_file
@setting_flags.add("log-format", "log-level", with_defaults=True)
def api(
    where: BusConnection,
    /,
    listen: str,
    token_file: str | None,
    cert_file: str | None,
    key_file: str | None,
    client_ca_file: str | None,
    log_format: str,
    log_level: str,
) -> None:
    """Serve what the topics of the whole cluster say over HTTP, for consoles and programs. It changes nothing.

    No manager needs to run, and a monitor's rights are enough. Other machines can reach it only with --token-file or
    --client-ca-file.
    """
    from outfitter_service import logs, memory
    from outfitter_service.api import access
    from outfitter_service.api.application import MOST_CONNECTIONS
    from outfitter_service.http import tls
    from outfitter_service.http.listener import Listening
    from outfitter_service.runtime.liveness import descriptors

    descriptors.prepare()
    certificate = tls.certificate(cert_file, key_file, client_ca_file)
    guard = access.guard(listen, token_file, mutual_tls=client_ca_file is not None)
    logs.configure(log_format, log_level)
    memory.tune()
    listening = Listening(address=listen, most=MOST_CONNECTIONS, tls=certificate, flag="--listen")
    anyio.run(_serve, where, listening, guard, backend_options=event_loop.backend_options())


async def _serve(where: BusConnection, listening: Listening, guard: Guard) -> None:
    from outfitter_service.api import follower as followers
    from outfitter_service.api.application import application
    from outfitter_service.http.listener import serving

    async with followers.opened(where.bus, where.login, where.cluster) as follower:
        await follower.reach()
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with (
                serving(lambda connections: application(follower, connections, guard), listening) as address,
                anyio.create_task_group() as tasks,
            ):
                scheme = "http" if listening.tls is None else "https"
                at = f"{scheme}://{address}"
                warn(f"cluster {where.cluster} on {where.bus}, console at {at}/, API at {at}/api/v1/status")
                tasks.start_soon(follower.run)
                async for _signal in signals:
                    break
                tasks.cancel_scope.cancel()

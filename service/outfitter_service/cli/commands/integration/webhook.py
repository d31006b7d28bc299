"""`outfitter webhook`: the mutating admission webhook, in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import click

from outfitter_service.cli._lib import event_loop, options, setting_flags
from outfitter_service.cli._lib.errors import warn

if TYPE_CHECKING:
    from aiohttp import web

    from outfitter_service.http.connections import Connections
    from outfitter_service.http.listener import Listening

ADDRESS = "127.0.0.1:9479"


@click.command()
@options.config
@click.option("--listen", metavar="HOST:PORT", default=ADDRESS, show_default=True, help="Where to serve.")
@options.certificate(required=True)
@setting_flags.add("log-format", "log-level", with_defaults=True)
def webhook(
    config: str | None, listen: str, cert_file: str, key_file: str | None, log_format: str, log_level: str
) -> None:
    """Give pods of Kubernetes the devices that they ask for by the annotation `outfitter.dev/resources`.

    It sets the requests and limits of the worker's container to the configured amounts, or to the annotation's. It
    takes AdmissionReviews over TLS. A renewed certificate counts without a restart.
    """
    from functools import partial

    from outfitter_service import logs, memory
    from outfitter_service.cli._lib.configured_drivers import configured, driver_of
    from outfitter_service.http import tls
    from outfitter_service.http.listener import Listening
    from outfitter_service.requests import annotated_amounts
    from outfitter_service.runtime.liveness import descriptors
    from outfitter_service.webhook.application import PATH, application
    from outfitter_service.webhook.metrics import WebhookMetrics

    descriptors.prepare()
    resources = configured(config)
    certificate = tls.Certificate(cert_file, key_file)
    logs.configure(log_format, log_level)
    memory.tune()
    drivers = {item.name: driver_of(item) for item in resources if item.kubernetes_key is None}
    amounts_of = partial(annotated_amounts, resources=resources, driver_of=lambda item: drivers.get(item.name))
    metrics = WebhookMetrics(certificate)
    listening = Listening(address=listen, tls=certificate, flag="--listen")
    names = ", ".join(item.name for item in resources if item.in_effect) or "no resource"
    anyio.run(
        _serve,
        lambda connections: application(connections, amounts_of, metrics),
        listening,
        f"webhook for {names} at https://%s{PATH}",
        backend_options=event_loop.backend_options(),
    )


async def _serve(application: Callable[[Connections], web.Application], listening: Listening, what: str) -> None:
    """`what`: is printed, with the address for `%s`."""
    from outfitter_service.http.listener import serving

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with serving(application, listening) as address:
            warn(what % address)
            async for _signal in signals:
                break

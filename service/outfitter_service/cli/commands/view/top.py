"""`outfitter top`: what needs a person, who waits, and the fleet, in a terminal."""

from __future__ import annotations

import ssl
import sys
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output

if TYPE_CHECKING:
    from outfitter_service.cli._lib.overview.picture import Only
    from outfitter_service.cli._lib.overview.sources import PictureSource
    from outfitter_service.config import BusConnection
    from outfitter_service.query import labels


@click.command()
@options.looking_on
@options.only_devices
@options.only_labels
@click.option(
    "--url", metavar="URL", envvar="OUTFITTER_API_URL", show_envvar=True,
    help="The API to ask, such as http://127.0.0.1:9478, instead of the bus.",
)  # fmt: skip
@click.option(
    "--token-file", metavar="FILE", type=click.Path(), envvar="OUTFITTER_API_TOKEN_FILE", show_envvar=True,
    help="The file with the API's token.",
)  # fmt: skip
@click.option("--ca-file", metavar="FILE", type=click.Path(), help="The authorities of the API's certificate (PEM).")
@click.option("--once", is_flag=True, help="Print one picture and end, as without a terminal.")
def top(
    where: BusConnection,
    /,
    host: str | None,
    resource: str | None,
    model: str | None,
    health: str | None,
    labelled: labels.Wanted,
    url: str | None,
    token_file: str | None,
    ca_file: str | None,
    once: bool,
) -> None:
    """Show what needs a person, who waits and why, and the devices of all hosts, the worst first, until q or Ctrl-C.

    From the bus, with a monitor's rights, or from the API at --url. A device is one sign: # held, . free, ! unhealthy,
    ? unknown, - held back, x cordoned, % used by a stranger. The devices that are shown are counted by resource and
    model.
    """
    import anyio

    from outfitter_service.cli._lib.overview.picture import Only

    _log_nothing()
    only = Only(resource=resource, model=model, health=health, labelled=labelled)
    anyio.run(_show, _source(where, host, only, url, token_file, ca_file), once or not _on_terminal())


def _log_nothing() -> None:
    """The screen says what a log line would."""
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)


def _on_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _source(
    where: BusConnection, host: str | None, only: Only, url: str | None, token_file: str | None, ca_file: str | None
) -> AbstractAsyncContextManager[PictureSource]:
    from outfitter_service.api.access import AccessError, read_token
    from outfitter_service.cli._lib.overview import sources

    if not url:
        return sources.of_bus(where, host, only)
    token, tls = None, None
    if token_file is not None:
        try:
            token = partial(read_token, Path(token_file))
            token()
        except AccessError as error:
            raise click.BadParameter(str(error), param_hint="--token-file") from error
    if ca_file is not None:
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except (OSError, ValueError) as error:
            raise click.BadParameter(f"{ca_file} has no certificates: {error}", param_hint="--ca-file") from error
    return sources.of_api(url, host, only, token=token, tls=tls)


async def _show(source: AbstractAsyncContextManager[PictureSource], once: bool) -> None:
    from outfitter_service.cli._lib.overview import live

    console = output.console(markup=False, emoji=False)
    async with source as opened:
        await (live.once if once else live.run)(opened, console)

"""`outfitter yarn resources`."""

from __future__ import annotations

import re

import click

from outfitter_service.cli._lib import output
from outfitter_service.cli._lib.options import config as config_option
from outfitter_service.cli._lib.options import json_output


@click.group()
def yarn() -> None:
    """Request the configured amounts from YARN."""


@yarn.command()
@config_option
@click.option(
    "--maximum",
    "maxima",
    metavar="KEY=AMOUNT",
    multiple=True,
    help="The most of a resource type that the cluster allows one container. Give all its types; repeatable.",
)
@json_output
def resources(config: str | None, maxima: tuple[str, ...], as_json: bool) -> None:
    """Print the resource information of a container request: type and amount."""
    from outfitter_service.cli._lib.configured_drivers import configured, driver_of
    from outfitter_service.requests import yarn_amounts

    maximum = dict(_maximum(text) for text in maxima) if maxima else None
    amounts = yarn_amounts(configured(config), driver_of, maximum=maximum)
    if as_json:
        output.print_json(amounts)
    else:
        output.print_table(["resource", "amount"], list(amounts.items()))


def _maximum(text: str) -> tuple[str, int]:
    key, separator, amount = text.rpartition("=")
    if not separator or not key or not re.fullmatch("[0-9]{1,19}", amount):
        raise click.BadParameter(f"{text[:80]!r} is not KEY=AMOUNT, such as yarn.io/gpu=8", param_hint="--maximum")
    return key, int(amount)

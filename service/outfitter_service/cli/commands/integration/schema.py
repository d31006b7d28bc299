"""`outfitter schema`."""

from __future__ import annotations

import click

from outfitter_service.cli._lib import output


@click.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["asyncapi", "json-schema"]),
    default="asyncapi",
    show_default=True,
    help="AsyncAPI 3, or JSON Schema 2020-12 of every message and record.",
)
def schema(form: str) -> None:
    """Print the wire contract."""
    from outfitter_proto import schema as contract

    output.print_json(contract.asyncapi() if form == "asyncapi" else contract.json_schema(), indent=2)

"""`outfitter backup`: copy the ledger into a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output

if TYPE_CHECKING:
    from outfitter_service.config import BusConnection
    from outfitter_service.runtime.changelog.backup.save import Saved


@click.command()
@click.option(
    "--out", metavar="FILE", required=True, type=click.Path(path_type=Path), help="The new file, with mode 0600."
)
@options.of_cluster
@options.json_output
def backup(where: BusConnection, /, out: Path, as_json: bool) -> None:
    """Copy all committed records of the ledger into a file, while managers serve.

    The file has who held which device at this moment, who waited, and the registrations that nobody had answered yet.
    History and dead letters are not in it: a ledger needs none of them. `outfitter restore` writes the file into new
    topics.
    """
    import anyio
    from msgspec import structs

    from outfitter_proto.support.printable import counted
    from outfitter_service.query import ledger_view
    from outfitter_service.runtime.changelog.backup.save import save

    if not out.name:
        raise click.BadParameter("names no file", param_hint="'--out'")

    async def connected() -> Saved:
        async with ledger_view.opened(where) as bus:
            return await save(bus, where.cluster, out)

    saved = anyio.run(connected)
    if as_json:
        output.print_json({"file": str(out)} | structs.asdict(saved))
    else:
        output.say(
            f"{out}: {saved.records} records of {saved.partitions} partitions, and "
            f"{counted(saved.registrations, 'unanswered message')}, as of {saved.at:%Y-%m-%dT%H:%M:%SZ}"
        )

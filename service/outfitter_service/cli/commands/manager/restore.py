"""`outfitter restore`: write a backup into new topics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.cli._lib.errors import warn

if TYPE_CHECKING:
    from outfitter_service.config import BusConnection
    from outfitter_service.runtime.changelog.backup.restoration import Restoration


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@options.of_cluster
@click.option(
    "--from",
    "origin",
    metavar="CLUSTER",
    help="The cluster of the backup, if it is another one than that of --cluster.",
)
@options.json_output
def restore(where: BusConnection, /, file: Path, origin: str | None, as_json: bool) -> None:
    """Write a backup into the topics of a cluster, whose ledger must be empty. Stop all managers first.

    The topics may have any number of partitions. What is in the file goes to the partition of its host: records, and
    registrations that nobody had answered, unless the topic still has them there.

    The ledger is then as old as the backup: grants since are missing. So managers start on it only with
    --adopt-ledger, and not while a worker runs that it lacks, as far as they see. If the command is interrupted, no
    manager starts: delete the ledger's topic, create it, and restore again.
    """
    import anyio
    from msgspec import structs

    from outfitter_proto.support.printable import counted
    from outfitter_service.query import ledger_view
    from outfitter_service.runtime.changelog.backup.restoration import restore_backup

    async def connected() -> Restoration:
        async with ledger_view.opened(where) as bus:
            return await restore_backup(bus, where.cluster, file, history=where.history, origin=origin)

    done = anyio.run(connected)
    at = f"{done.at:%Y-%m-%dT%H:%M:%SZ}"
    if as_json:
        output.print_json(structs.asdict(done))
    else:
        output.say(
            f"{file}: {done.records} records of {done.writers} managers are restored, as of {at}, in {done.partitions} "
            f"partitions; {counted(done.registrations, 'registration')} sent again"
        )
        if done.later:
            warn(
                f"{counted(done.later, 'message')} came to cluster {origin!r} after the backup, and will get no "
                "answer. To keep them, delete the new ledger's topic, create it, and restore another backup"
            )
        warn(
            f"end all workers that got devices after {at}, on every host. Then start each manager once with "
            "--adopt-ledger"
        )

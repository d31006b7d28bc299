"""`outfitter topics create` and `check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.cli._lib.errors import warn
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_proto.bus import Bus
    from outfitter_proto.topics import TopicDifference
    from outfitter_service.config import BusConnection

LOCAL_PARTITIONS = 1
"""On the embedded bus, which has one host: there is nothing to divide."""

BROKER_PARTITIONS = 12
"""On a broker. Each worker reads its host's whole partition. With twelve, 12,000 workers are 1,000 a partition."""


@click.group()
def topics() -> None:
    """Create or check the topics of a cluster."""


@topics.command()
@options.of_cluster
@click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help=f"Partitions of each topic. Default: {BROKER_PARTITIONS}, or {LOCAL_PARTITIONS} on the embedded bus. "
    "More of them later need new topics, into which `outfitter restore` writes a backup.",
)
@click.option(
    "--replication",
    type=click.IntRange(1, 100),
    metavar="N",
    help="Copies of each partition. Default: one per broker, at most 3. With 3 or more, 2 must acknowledge.",
)
@options.json_output
def create(where: BusConnection, /, partitions: int | None, replication: int | None, as_json: bool) -> int:
    """Create the missing topics, and leave existing ones as they are.

    Then report what is not as it should be, as `check` does.
    """
    import anyio

    from outfitter_proto.bus import Create, connect

    async def connected() -> tuple[list[str], list[TopicDifference]]:
        async with connect(where.bus, where.login, create=Create.DIRECTORY) as bus:
            return await make(bus, where, partitions, replication)

    made, differences = anyio.run(connected)
    if as_json:
        output.print_json({"created": made, "differences": [item._asdict() for item in differences]})
    else:
        for name in made:
            output.say(name)
        if not made:
            warn("all topics exist already")
        for item in differences:
            warn(f"{item.in_words()}: {item.why}. Remedy: {item.remedy}")
    return 1 if any(item.fatal for item in differences) else 0


@topics.command()
@options.of_cluster
@options.json_output
def check(where: BusConnection, /, as_json: bool) -> int:
    """Report how topics and brokers differ from what they must be, why it matters, and the remedy: exit code 1 if they
    do.

    A difference that says "must be" keeps a manager from starting or from working. A manager logs the others when it
    starts. "(brokers)" are differences of the brokers themselves: an address that this machine does not reach, or
    settings with which no manager can write. The command reads the whole ledger: each host's records must be in the
    partition that its name and the number of partitions give, and in the topic that they were written to. A ledger that
    was recreated empty shows by history, by dead letters, and by the bus's memory of the writers of this host and of
    cluster scope.
    """
    import anyio

    from outfitter_proto import topics as requirements
    from outfitter_proto.bus import MissingBusError
    from outfitter_service.cli._lib import broker_check, ledger_location
    from outfitter_service.query import ledger_view

    async def compare() -> list[TopicDifference]:
        try:
            async with ledger_view.opened(where) as bus:
                differences = await requirements.check(bus, where.cluster, history=where.history)
                obstacles = await broker_check.obstacles(bus, where)
                differences += map(broker_check.difference, obstacles)
                if any(obstacle.kind == broker_check.OUT_OF_REACH for obstacle in obstacles):
                    return differences  # the ledger may be behind what is out of reach
                return differences + await ledger_location.check(bus, where.cluster, where.host)
        except MissingBusError as error:
            warn(str(error))
            return requirements.all_missing(where.cluster, history=where.history)

    differences = anyio.run(compare)
    if as_json:
        output.print_json({"ok": not differences, "differences": [item._asdict() for item in differences]})
    elif differences:
        for item in sorted(differences, key=lambda item: not item.fatal):
            for line in (item.in_words(), f"    why: {item.why}", f"    remedy: {item.remedy}"):
                output.say(line)
    else:
        output.say("ok")
    return 1 if differences else 0


@topics.command(hidden=True, add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("_arguments", nargs=-1, type=click.UNPROCESSED)
def grow(_arguments: tuple[str, ...]) -> None:
    """Say what has taken the place of this command."""
    raise OutfitterCliError(
        "this command is gone: `outfitter backup`, and `outfitter restore` into topics with more partitions, have "
        'taken its place (deploy/README.md, "More partitions")',
        exit_code=2,
    )


async def make(
    bus: Bus, where: BusConnection, partitions: int | None, replication: int | None
) -> tuple[list[str], list[TopicDifference]]:
    """Create the missing topics; return their names and all differences.

    Raises:
        OutfitterCliError: the existing topics have another number of `partitions`.
    """
    from outfitter_proto import topics as requirements

    count = await _partitions(bus, where, partitions)
    made = await requirements.create(
        bus, where.cluster, partitions=count, replication=replication, history=where.history
    )
    if not made:
        await _partitions(bus, where, partitions)  # perhaps a manager has just created them
    return made, await requirements.check(bus, where.cluster, history=where.history)


async def _partitions(bus: Bus, where: BusConnection, requested: int | None) -> int:
    """The number of partitions of new topics: that of the existing ones.

    Raises:
        OutfitterCliError: the command line names another number.
    """
    from outfitter_proto import topics as requirements

    existing = await requirements.partition_count(bus, where.cluster)
    if existing is None:
        return requested or (LOCAL_PARTITIONS if bus.local else BROKER_PARTITIONS)
    if requested not in {None, existing}:
        raise OutfitterCliError(
            f"cluster {where.cluster!r} has {existing} partitions already, and all topics need as many: "
            "leave --partitions out"
        )
    return existing

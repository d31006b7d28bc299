"""`outfitter deregister`: say on behalf of a worker that it is done."""

from __future__ import annotations

import click

from outfitter_service.cli import options, output


@click.command()
@options.connection
@click.option(
    "--worker", metavar="NAME", envvar="OUTFITTER_WORKER", show_envvar=True, required=True, help="The worker's name."
)
@click.option("--incarnation", metavar="ID", help="This run of it alone; the current one otherwise.")
@click.option("--reason", metavar="TEXT", default="by hand", help="What history is to say.")
@options.json_output
@click.pass_context
def deregister(
    ctx: click.Context,
    /,
    config: str | None,
    worker: str,
    incarnation: str | None,
    reason: str,
    as_json: bool,
    **_options: object,
) -> None:
    """Give back what a worker of this host (or --host) holds, or take it out of the queue.

    The command returns when the bus has the message; `outfitter status` shows what came of it.
    """  # fmt: skip
    import anyio

    from outfitter_proto import codec, names
    from outfitter_proto.bus import Entry
    from outfitter_proto.records import Deregister
    from outfitter_service.cli import ledger
    from outfitter_service.config import connection

    where = connection(config, options.given(ctx))
    leaving = Deregister(host=where.host, worker=worker, incarnation=incarnation, reason=reason[:200])
    body = codec.encode(leaving)
    try:
        codec.decode_registration(body)
    except codec.WireError as error:
        raise click.UsageError(f"no manager would take this {error}") from error

    async def publish() -> None:
        async with ledger.opened(where) as bus:
            (partition,) = await ledger.partitions(bus, where.cluster, where.host)
            await bus.publish(names.topics(where.cluster).registrations, partition, Entry(where.host.encode(), body))

    anyio.run(publish)
    if as_json:
        output.print_json({"host": where.host, "worker": worker, "incarnation": incarnation})
    else:
        click.echo(f"{where.host}/{worker} is deregistered")

"""`outfitter hold`: devices for another process, its parent by default, for programs in any language."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import click

from outfitter_service.cli._lib import options, registration_options

DESCRIPTORS = 24
"""File descriptors that must be free: for the event loop and the bus."""
WRITTEN_WITHIN = 2.0
"""Seconds in which the owner must take the last line."""


@click.command()
@options.connection
@registration_options.request(wait="Give up after this time (exit code 124).")
@click.option(
    "--owner-pid",
    type=click.IntRange(1, 2**31 - 1),
    metavar="PID",
    help="The process that has the devices and whose end releases them. Default: the parent.",
)
@click.option("--incarnation", metavar="ID", callback=options.named("incarnation"),
    help="A name for this run of the worker. A restart with the same one, and the same other options, goes on with it.",
)  # fmt: skip
@click.option(
    "--survivors",
    is_flag=True,
    help="Processes that outlive the owner keep the devices, if the record's host, worker and incarnation are in their "
    "environment: OUTFITTER_HOST, OUTFITTER_WORKER, OUTFITTER_INCARNATION.",
)
@click.option("--wait-for-manager", is_flag=True, help="Wait until there is a manager, however long.")
@registration_options.allow_env
@click.option("--no-stdin", is_flag=True, help="Do not read standard input: its end does not give the devices back.")
@click.pass_context
def hold(
    ctx: click.Context,
    /,
    config: str | None,
    owner_pid: int | None,
    incarnation: str | None,
    wait: float | None,
    wait_for_manager: bool,
    no_stdin: bool,
    survivors: bool,
    allowed: frozenset[str],
    bus: str | None,
    host: str | None,
    cluster: str | None,
    **request: Any,
) -> NoReturn:
    """Hold devices for the process that started this one, and print them as JSON.

    The first line on standard output is the allocation record, as on the bus, once it is granted. Each later line
    replaces the one before: the changed record, {"type":"at-risk",...} while the lease is in danger, or
    {"type":"error",...} as the last line. Standard error is for people.

    It gives the devices back and ends when standard input ends, when nobody reads standard output, or at SIGTERM from
    the owner. When the owner ends, it ends, too. If anything else ends it, the owner keeps the devices while it lives;
    start it again with the same --worker and --incarnation.

    The exit code is 0 after an orderly end, 123 if the allocation is lost, 124 if it waited longer than --wait, and
    125 if Outfitter failed.
    """  # fmt: skip
    del bus, host, cluster  # `connection` has read them, also from other sources
    from outfitter_service.cli._lib.holding import streams

    reads_stdin = streams.check(reads_stdin=not no_stdin)
    if incarnation is not None and not (request["worker"] or os.environ.get("OUTFITTER_WORKER")):
        raise click.UsageError("--incarnation needs the worker's name: --worker NAME", ctx)

    from outfitter_proto.support import descriptors

    descriptors.require(DESCRIPTORS, "`outfitter hold`")

    import anyio

    from outfitter_proto.support.processes import survivors_of
    from outfitter_service import standard_error
    from outfitter_service.cli._lib.holding import lines, owner
    from outfitter_service.cli._lib.holding.hold_session import ENDING, HoldRequest, HoldSession, problem_of
    from outfitter_service.cli._lib.running.signals import SignalFile
    from outfitter_service.config import connection

    with SignalFile(ENDING) as signals:
        standard_error.go_background()
        writer = streams.LineWriter()

        async def work() -> int:
            process = owner.chosen(owner_pid)
            where = connection(config, options.given(ctx))
            message = registration_options.registration(
                where.host,
                **request,
                owner=process.identity,
                wait_s=wait,
                incarnation=incarnation,
                survivors=survivors_of(process.identity) if survivors else None,
            )
            asked = HoldRequest(
                where, message, process, incarnation is not None, reads_stdin, wait_for_manager, allowed
            )
            return await HoldSession(asked, signals=signals, writer=writer).run()

        try:
            code = anyio.run(work)
        except Exception as error:
            writer.put(lines.of_error(error))
            raise
        finally:
            writer.finish(WRITTEN_WITHIN)
    if not code and writer.error is not None and not writer.taken:  # it has ended before that was known
        code = problem_of(writer)
    # Everything is closed, and an interpreter's shutdown takes as long as its start, so skip it.
    standard_error.finish()
    os._exit(code)

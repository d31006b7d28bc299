"""`outfitter deregister`: deregister a worker and print the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from outfitter_service.cli._lib import options, output
from outfitter_service.cli._lib.errors import warn
from outfitter_service.cli._lib.registration_options import Duration
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_proto.keys import AllocationKey
    from outfitter_proto.records import Allocation, Deregister
    from outfitter_service.cli._lib.conversation import Conversation
    from outfitter_service.config import BusConnection
    from outfitter_service.query.ledger_view import StoredAllocation

ANSWERED_WITHIN = 15.0
"""Default seconds to wait for the answer: enough for a manager that is busy or just starting."""

REPEATED_WITHIN = 2.0
"""Seconds to wait if the allocation is over already. The manager need not answer then, but a newer registration may be
on its way."""


class Ending(Struct, frozen=True, kw_only=True):
    """The result of a deregistration. `state` is `sent` without waiting."""

    host: str
    worker: str
    incarnation: str | None
    state: str
    reason: str | None = None


@click.command()
@options.connection
@click.option(
    "--worker", metavar="WORKER", type=options.WORKER, envvar="OUTFITTER_WORKER", show_envvar=True, required=True,
    help=f"The worker: {options.WORKER_FORMS}.",
)  # fmt: skip
@click.option("--incarnation", metavar="ID", help="Only this run of the worker. Default: the current one.")
@click.option("--reason", metavar="TEXT", default="by hand", help="The reason that history shows.")
@click.option(
    "--wait", type=Duration(), metavar="DURATION", default=ANSWERED_WITHIN, show_default=True,
    help="How long to wait for the manager's answer; 0 only sends.",
)  # fmt: skip
@options.json_output
@click.pass_context
def deregister(
    ctx: click.Context,
    /,
    config: str | None,
    worker: options.WorkerNames,
    incarnation: str | None,
    reason: str,
    wait: float,
    as_json: bool,
    **_options: object,
) -> None:
    """Give back what a worker of this host (or --host) holds, or take it out of the queue.

    The exit code is 0 if the manager has ended the allocation or has begun to take its devices back (`releasing`), or
    if it had ended before. It is 1, with the reason, if the worker does not exist or no manager answers.
    """  # fmt: skip
    import anyio

    from outfitter_proto import codec
    from outfitter_proto.records import Deregister
    from outfitter_service.config import connection

    if worker.incarnation and incarnation not in {None, worker.incarnation}:
        raise click.UsageError(
            f"--incarnation is {incarnation}, but the worker is {worker}: leave one of them out", ctx
        )
    host = options.host_of(options.given(ctx).get("host"), worker)
    where = connection(config, options.given(ctx) | ({"host": host} if host else {}))
    message = Deregister(
        host=where.host, worker=worker.worker, incarnation=incarnation or worker.incarnation, reason=reason[:200]
    )
    try:
        codec.decode_registration(codec.encode(message))
    except codec.WireError as error:
        raise click.UsageError(f"no manager would accept this {error}") from error
    ending = anyio.run(_send, where, message) if not wait else anyio.run(_end, where, message, wait)
    if as_json:
        output.print_json(ending)
    else:
        run = f"/{ending.incarnation}" if ending.incarnation else ""
        why = f" ({ending.reason})" if ending.reason else ""
        output.say(f"{ending.host}/{ending.worker}{run}  {ending.state}{why}")


async def _send(where: BusConnection, message: Deregister) -> Ending:
    """Send it without waiting."""
    from outfitter_service.cli._lib.conversation import conversing

    async with conversing(where, message.worker) as conversation:
        await conversation.publish(message)
    return Ending(host=message.host, worker=message.worker, incarnation=message.incarnation, state="sent")


async def _end(where: BusConnection, message: Deregister, wait: float) -> Ending:
    """Send it, and wait for the result.

    Raises:
        OutfitterCliError: it had no effect, with the reason; or no manager answers.
    """
    from outfitter_service.cli._lib.conversation import conversing

    async with conversing(where, message.worker) as conversation:
        ledger = await conversation.read_ledger()
        before = {stored.record.key: stored for stored in ledger.allocations if stored.record.worker == message.worker}
        if message.host not in ledger.hosts:
            raise OutfitterCliError(await conversation.no_manager_text())
        current = _target(before, message)
        was_over = current is not None and _is_over(current)
        offset = await conversation.publish(message)

        def ended() -> Allocation | None:
            record = _target(before | conversation.records, message)
            return record if record is not None and record.key in conversation.records and _is_over(record) else None

        def answered() -> bool:
            return ended() is not None or offset in conversation.letters or conversation.decided > offset

        await conversation.wait_for(answered, min(wait, REPEATED_WITHIN) if was_over else wait)
        record = ended()
        if record is None:
            letter = await conversation.letter(offset)
            if letter is not None:
                raise OutfitterCliError(letter.reason)
            if current is None or not was_over:
                raise OutfitterCliError(await _no_answer_text(conversation, message, offset, wait))
            warn(f"it had ended already, at {current.since:%Y-%m-%dT%H:%M:%SZ}")
            record = current
        if record.source.offset < 0:
            raise OutfitterCliError(f"{record.key} is not registered here: {record.reason}")
        _warn_of_older_runs(before, record)
        return Ending(
            host=record.host,
            worker=record.worker,
            incarnation=record.incarnation,
            state=record.state,
            reason=record.reason,
        )


def _target(records: Mapping[AllocationKey, StoredAllocation], message: Deregister) -> Allocation | None:
    """The allocation that a deregistration ends: that of the named incarnation, else of the newest registered one."""
    return max(
        (
            record
            for record, _ in records.values()
            if message.incarnation == record.incarnation or (message.incarnation is None and record.source.offset >= 0)
        ),
        key=lambda record: record.source.offset,
        default=None,
    )


def _is_over(record: Allocation) -> bool:
    from outfitter_proto.records import FINAL_STATES, AllocationState

    return record.state in FINAL_STATES or record.state == AllocationState.RELEASING


def _warn_of_older_runs(before: Mapping[AllocationKey, StoredAllocation], ended: Allocation) -> None:
    from outfitter_proto.records import HOLDING_STATES

    for record, _ in before.values():
        if record.key != ended.key and record.state in HOLDING_STATES:
            command = f"outfitter deregister --worker {record.worker} --incarnation {record.incarnation}"
            warn(
                f"an older run of {record.worker} is still {record.state}: `{command}` ends it, too; "
                "first make sure that nothing uses its devices"
            )


async def _no_answer_text(conversation: Conversation, message: Deregister, offset: int, wait: float) -> str:
    if conversation.decided > offset:
        return (
            f"the manager of {message.host} has read the deregistration without effect: "
            f"{message.host}/{message.worker} seems not to be registered there"
        )
    return (
        f"no answer within {wait:g} s: {await conversation.no_manager_text()}; "
        "the deregistration was sent and takes effect when a manager reads it "
        "(one that refuses very many messages a minute answers only the first of them)"
    )

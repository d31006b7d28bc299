"""`outfitter register`: a registration by hand, for workers that are no processes of this machine, and for trying.

It names no owner and sends no heartbeats: what it gets is held for one lease.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from outfitter_service.cli import options, output, registering
from outfitter_service.cli.errors import OutfitterCliError, warn

if TYPE_CHECKING:
    from outfitter_proto.bus import Bus, Reader
    from outfitter_proto.records import Allocation, Register, Registration
    from outfitter_service.cli.ledger import Stored
    from outfitter_service.config import Connection

LEASE_KNOWN_WITHIN = 3.0
"""Seconds to wait for a manager to say how long its default lease is."""

ENDED_WITHIN = 5.0
"""Seconds to wait for the manager's answer to a withdrawal."""


@click.command()
@options.connection
@registering.request
@click.option(
    "--wait",
    type=registering.Duration(),
    metavar="DURATION",
    help="Wait for the answer and print it. What is still pending by then is deregistered.",
)
@options.json_output
@click.pass_context
def register(
    ctx: click.Context,
    /,
    config: str | None,
    wait: float | None,
    as_json: bool,
    bus: str | None,
    host: str | None,
    cluster: str | None,
    **request: Any,
) -> int:
    """Ask for devices on behalf of a worker, and say until when the registration holds.

    It has no owner process and no heartbeats: register again within its lease, or deregister.

    With --wait: print the final allocation record (with --json as it stands on the bus), and exit with 0 when it
    is allocated and with 1 when it is not.
    """  # fmt: skip
    del bus, host, cluster  # `connection` has looked at them, and at where else they may be
    import anyio

    from outfitter_service.config import connection

    where = connection(config, options.given(ctx))
    asked = registering.registration(where.host, **request)
    if wait is None:
        return anyio.run(_announce, where, asked, as_json)
    return anyio.run(_obtain, where, asked, wait, as_json)


async def _announce(where: Connection, asked: Register, as_json: bool) -> int:
    """Publish, and say until when it holds: one lease from before it was sent."""
    from msgspec import UNSET

    from outfitter_proto.names import allocation_key

    async with _conversing(where, asked) as conversation:
        sent_at = datetime.now(UTC)
        await conversation.publish(asked)
        lease = asked.lease_s
        known = lease is not UNSET or await conversation.heard(lambda _record: True, LEASE_KNOWN_WITHIN)
        if lease is UNSET:
            lease = conversation.last.record.request.lease_s if conversation.last else None
    key = allocation_key(asked.host, asked.worker, asked.incarnation)
    until = sent_at + timedelta(seconds=lease) if isinstance(lease, float | int) else None
    if not known:
        warn(f"no manager of host {where.host} has answered yet; how long this holds is for its default lease to say")
    if as_json:
        output.print_json(
            {"host": asked.host, "worker": asked.worker, "incarnation": asked.incarnation, "holds_until": until}
        )
    elif known:
        limit = "it is deregistered" if until is None else f"{until:%Y-%m-%dT%H:%M:%SZ}"
        click.echo(f"{key} holds until {limit}")
    else:
        click.echo(f"{key}")
    return 0


async def _obtain(where: Connection, asked: Register, wait: float, as_json: bool) -> int:
    """Publish, wait for the final answer, and withdraw what has none by then."""
    import anyio

    from outfitter.standing import Standing, standing
    from outfitter_proto.records import Deregister
    from outfitter_service.cli import ledger

    leaving = Deregister(host=asked.host, worker=asked.worker, incarnation=asked.incarnation, reason="withdrawn")
    async with _conversing(where, asked) as conversation:
        answered = False
        try:
            await conversation.publish(asked)
            answered = await conversation.heard(lambda record: standing(record) is not Standing.WAITING, wait)
        finally:
            if not answered:  # too late, or interrupted
                with anyio.CancelScope(shield=True):
                    await conversation.publish(leaving)
                    await conversation.heard(
                        lambda record: standing(record) in {Standing.OVER, Standing.FAILED}, ENDED_WITHIN
                    )
        if conversation.last is None:
            raise OutfitterCliError(await conversation.nobody())
    record, wire = conversation.last
    if as_json:
        click.echo(wire)
    else:
        why = f" ({record.reason})" if record.reason else ""
        click.echo(f"{record.key}  {record.state}  {ledger.devices_in_words(record)}{why}")
    return 0 if standing(record) is Standing.YOURS else 1


class _Conversation:
    """What is said about one registration, and what is answered from then on. `last` is the newest answer."""

    def __init__(self, bus: Bus, where: Connection, asked: Register, partition: int, answers: Reader) -> None:
        self.last: Stored | None = None
        self._bus = bus
        self._where = where
        self._asked = asked
        self._partition = partition
        self._answers = answers

    async def publish(self, message: Registration) -> None:
        from outfitter_proto import codec, names
        from outfitter_proto.bus import Entry

        topic = names.topics(self._where.cluster).registrations
        await self._bus.publish(topic, self._partition, Entry(message.host.encode(), codec.encode(message)))

    async def heard(self, enough: Callable[[Allocation], bool], within: float) -> bool:
        """Listen until `enough` says so of an answer, for at most `within` seconds; whether it did."""
        import anyio

        from outfitter_proto import names
        from outfitter_proto.records import Allocation
        from outfitter_service.cli import ledger

        key = names.allocation_key(self._asked.host, self._asked.worker, self._asked.incarnation).encode()
        with anyio.move_on_after(within):
            while True:
                for message in await ledger.fetch(self._answers):
                    record = ledger.decode(message).record if message.key == key else None
                    if isinstance(record, Allocation):
                        self.last = ledger.Stored(record, message.value or b"")
                if self.last is not None and enough(self.last.record):
                    return True
        return False

    async def nobody(self) -> str:
        """What to say when there was no answer at all."""
        from outfitter.managers import Survey

        topic_partitions = await self._bus.topic(self._topic)
        survey = Survey(self._bus, self._where.cluster, self._asked.host)
        await survey.run(topic_partitions.partitions)
        return f"no manager answers for host {self._asked.host!r}: {survey.describe()}"

    @property
    def _topic(self) -> str:
        from outfitter_proto import names

        return names.topics(self._where.cluster).allocations


@asynccontextmanager
async def _conversing(where: Connection, asked: Register) -> AsyncIterator[_Conversation]:
    """Connect, and begin to listen before anything is said."""
    from outfitter_proto import names
    from outfitter_service.cli import ledger

    topic = names.topics(where.cluster).allocations
    async with ledger.opened(where) as bus:
        (partition,) = await ledger.partitions(bus, where.cluster, asked.host)
        _, end = await bus.offsets(topic, partition)
        async with await bus.open_reader(topic, partition, start=end, committed=True) as answers:
            yield _Conversation(bus, where, asked, partition, answers)

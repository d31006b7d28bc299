"""`outfitter register`: a registration by hand, for workers that are no processes of this machine, and for tests.

It has no owner and sends no heartbeats, so it holds its devices for one lease.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click
from msgspec import Raw

from outfitter_service.cli._lib import options, output, registration_options
from outfitter_service.cli._lib.errors import warn
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_proto.records import Register
    from outfitter_service.cli._lib.conversation import Conversation
    from outfitter_service.config import BusConnection

LEASE_KNOWN_WITHIN = 3.0
"""Seconds to wait for a record with the manager's default lease."""

ENDED_WITHIN = 5.0
"""Seconds to wait for the manager's answer to a withdrawal."""


@click.command()
@options.connected
@registration_options.request(wait="Wait for the answer and print it. Deregister if it is still pending then.")
@options.json_output
def register(where: BusConnection, /, wait: float | None, as_json: bool, **request: Any) -> int:
    """Ask for devices on behalf of a worker, and print until when its lease lasts.

    The registration has no owner process and no heartbeats: register again within its lease, or deregister.

    Without --wait the command only sends, and does not wait for an answer. With --wait it prints the final
    allocation record (with --json as on the bus). The exit code is 0 if it is allocated, else 1.
    """  # fmt: skip
    import anyio

    message = registration_options.registration(where.host, **request)
    if wait is None:
        return anyio.run(_announce, where, message, as_json)
    return anyio.run(_obtain, where, message, wait, as_json)


async def _announce(where: BusConnection, message: Register, as_json: bool) -> int:
    """Publish, and print when the allocation ends: one lease after the moment of sending."""
    from msgspec import UNSET

    from outfitter_proto.keys import allocation_key
    from outfitter_service.cli._lib.conversation import conversing

    async with conversing(where, message.worker) as conversation:
        await conversation.check_manager(message)
        sent_at = datetime.now(UTC)
        await conversation.publish(message)
        key = allocation_key(message.host, message.worker, message.incarnation)
        lease = message.lease_s
        is_lease_known = lease is not UNSET or await conversation.wait_for(
            lambda: key in conversation.records, LEASE_KNOWN_WITHIN
        )
        if lease is UNSET:
            lease = conversation.records[key].record.request.lease_s if is_lease_known else None
    until = sent_at + timedelta(seconds=lease) if isinstance(lease, float | int) else None
    if not is_lease_known:
        warn(f"no manager of host {where.host} has answered yet; its default lease decides how long this holds")
    if as_json:
        output.print_json(
            {"host": message.host, "worker": message.worker, "incarnation": message.incarnation, "holds_until": until}
        )
    elif is_lease_known:
        limit = "without a lease" if until is None else f"with a lease until {until:%Y-%m-%dT%H:%M:%SZ}"
        output.say(f"{key}  sent, {limit}")
    else:
        output.say(f"{key}  sent")
    return 0


async def _obtain(where: BusConnection, message: Register, wait: float, as_json: bool) -> int:
    """Publish, wait for the final answer, and withdraw if there is none."""
    from outfitter.session.status import AllocationStatus, status_of
    from outfitter_proto.keys import allocation_key
    from outfitter_service.cli._lib.conversation import conversing
    from outfitter_service.query import ledger_view

    key = allocation_key(message.host, message.worker, message.incarnation)
    async with conversing(where, message.worker) as conversation:

        def has_status(*statuses: AllocationStatus) -> bool:
            return key in conversation.records and status_of(conversation.records[key].record) in statuses

        await conversation.check_manager(message)
        answered = False
        try:
            offset = await conversation.publish(message)
            answered = await conversation.wait_for(
                lambda: (
                    offset in conversation.letters
                    or has_status(AllocationStatus.YOURS, AllocationStatus.OVER, AllocationStatus.FAILED)
                ),
                wait,
            )
        finally:
            if not answered:  # too late, or interrupted
                await _withdraw(
                    conversation, message, lambda: has_status(AllocationStatus.OVER, AllocationStatus.FAILED)
                )
        if key not in conversation.records:
            letter = await conversation.letter(offset)
            raise OutfitterCliError(letter.reason if letter is not None else await conversation.no_manager_text())
    record, wire = conversation.records[key]
    for warning in ledger_view.warnings_of(record):
        warn(warning)
    if as_json:
        output.print_json(Raw(wire))
    else:
        why = f" ({record.reason})" if record.reason else ""
        output.say(f"{record.key}  {record.state}  {ledger_view.devices_in_words(record)}{why}")
    return 0 if status_of(record) is AllocationStatus.YOURS else 1


async def _withdraw(conversation: Conversation, message: Register, done: Callable[[], bool]) -> None:
    """Deregister, even after an error or cancellation."""
    import anyio

    from outfitter_proto.records import Deregister

    leaving = Deregister(host=message.host, worker=message.worker, incarnation=message.incarnation, reason="withdrawn")
    with anyio.CancelScope(shield=True):
        await conversation.publish(leaving)
        await conversation.wait_for(done, ENDED_WITHIN)

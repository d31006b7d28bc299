"""What commands share that give or end operators' orders: who says it, and whether a manager has taken it."""

from __future__ import annotations

import getpass
import math
import os
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outfitter_service.cli._lib import output
from outfitter_service.cli._lib.errors import NOT_TAKEN, warn
from outfitter_service.cli._lib.registration_options import Duration
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_proto.bus import Bus
    from outfitter_service.query.orders import FollowedHost, OrderLine, Orders

F = TypeVar("F", bound=Callable[..., Any])

TAKEN_WITHIN = 30.0
"""Default seconds to wait for a manager: enough for one that is busy or just starting."""

LONGEST_AUTHOR = 200
"""Most characters of an author."""


def _author(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str:
    if value is None:
        return default_author()
    if not value.strip() or len(value) > LONGEST_AUTHOR:
        raise click.BadParameter(f"an author has 1 to {LONGEST_AUTHOR} characters, not {len(value.strip())}")
    return value.strip()


author = click.option(
    "--author", metavar="NAME", envvar="OUTFITTER_AUTHOR", show_envvar=True, callback=_author,
    help="Whose order it is. Nobody checks it: it is no proof. Default: user@machine, under sudo its caller.",
)  # fmt: skip
wait = click.option(
    "--wait", type=Duration(), metavar="DURATION", is_flag=False, flag_value=f"{TAKEN_WITHIN:g}s",
    default=TAKEN_WITHIN, show_default=True,
    help="How long to wait until a manager has taken it; 0 only writes it.",
)  # fmt: skip


def _is_an_argument(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(f"the host is an argument: outfitter {ctx.info_name} {value} …", ctx)


not_an_option = click.option(
    "--host", "no_option", hidden=True, is_eager=True, expose_value=False, callback=_is_an_argument
)
"""Every command that looks on has this option. One that changes something must have a host."""
resource = click.option("--resource", metavar="NAME", help="Only devices of this resource.")
device = click.option("--device", metavar="ID", help="Only this device: its id, or any of its other names.")


def default_author() -> str:
    """This user on this machine: under sudo, whoever called it."""
    try:
        user = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a user without an entry
        user = str(os.getuid())
    return f"{user}@{os.uname().nodename}".encode("utf-8", "replace").decode()[:LONGEST_AUTHOR]


async def tidy(bus: Bus, cluster: str, found: Orders, now: datetime) -> None:
    """Delete what ended long ago, as whoever writes next does. Where that fails the next one tries it."""
    from outfitter_proto.bus import BusError
    from outfitter_service.query import orders

    try:
        await orders.delete_old(bus, cluster, found, now)
    except (BusError, OutfitterCliError) as error:
        warn(f"orders that ended long ago could not be deleted: {error}")


async def await_manager(
    bus: Bus,
    cluster: str,
    followed: FollowedHost,
    ids: Collection[str],
    within: float,
    *,
    given: bool,
    until: datetime | None = None,
) -> None:
    """Wait until the orders `ids` are in effect, if they are `given`; else until none of them is. `until`: when they
    end by themselves.

    Raises:
        OutfitterCliError: no manager has taken them in time, with the code `NOT_TAKEN`.
    """
    from outfitter_proto.bus import BusError

    def taken() -> bool:
        return set(ids) <= followed.in_effect.keys() if given else followed.in_effect.keys().isdisjoint(ids)

    shown = f"`outfitter orders {followed.host}` shows whether one has"
    what = f"order {', '.join(ids)}" if given else f"the end of {', '.join(ids)}"
    stands = "the order stands" if given else "until one does, the devices stay out"
    left = math.inf if until is None else max(0.0, (until - datetime.now(UTC)).total_seconds())
    if left < within:
        within, stands = left, "it has ended by itself"
    try:
        if await followed.wait_for(taken, within):
            return
        why = await _why_not(bus, cluster, followed)
    except BusError as error:
        text = f"{what} is written. Whether a manager has taken it is not known: {error}; {shown}"
        raise OutfitterCliError(text, exit_code=NOT_TAKEN) from error
    raise OutfitterCliError(
        f"no manager has taken {what} within {within:.3g} s: {why}; {stands}, and {shown}",
        exit_code=NOT_TAKEN,
    )


async def _why_not(bus: Bus, cluster: str, followed: FollowedHost) -> str:
    """Why no manager has taken what is in the topic, in words."""
    from outfitter_proto import names
    from outfitter_proto.signs_of_life import UNKNOWN, UNSERVED, in_words
    from outfitter_service.query import managers
    from outfitter_service.query.orders import PARTITION

    topic, host = names.control_topic(cluster), followed.host
    verdict = (await managers.lives(bus, cluster, followed.ledger, host)).get(host, UNKNOWN)
    if verdict.life in UNSERVED:
        return f"the manager of {host} {in_words(verdict, output.ago)}"
    checkpoint = followed.checkpoint
    if checkpoint is not None and checkpoint.orders_unread:
        return f"the manager of {host} cannot read orders: {checkpoint.orders_unread}"
    if checkpoint is None or not checkpoint.orders:
        return f"the manager of {host} has never read orders: it may be of an earlier version"
    _, end = await bus.offsets(topic, PARTITION)
    if checkpoint.orders.topic_id != (await bus.topic(topic)).id or checkpoint.orders.to < end:
        return f"the manager of {host} has not said yet that it has read it"
    return f"the manager of {host} has read it: its log may say more"


def in_words(found: Iterable[OrderLine]) -> str:
    """Orders in words: their ids, what they are about, whose they are, and why."""
    return "; ".join(f"{line.id} ({line.what}) by {line.author}: {line.reason}" for line in found)

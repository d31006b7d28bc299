"""`outfitter ledger forget`: delete one record of the ledger by hand, for a ledger that its managers refuse."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

from outfitter_proto import keys
from outfitter_service.cli._lib import options, output
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_proto.bus import Bus
    from outfitter_service.config import BusConnection
    from outfitter_service.query.ledger_view import RecordChange

BODY_SHOWN = 2_000
"""Most characters of the record that are shown before its deletion."""


class Target(NamedTuple):
    """A key's partition, its record, similar keys, and the state of its host's manager."""

    host: str
    partition: int
    change: RecordChange | None
    near: list[str]
    manager: str


@click.group()
def ledger() -> None:
    """Repair the ledger by hand."""


@ledger.command()
@click.argument("key")
@options.of_cluster
@click.option("--yes", is_flag=True, help="Do not ask. The manager must be stopped, and the worker dead.")
def forget(where: BusConnection, /, key: str, yes: bool) -> None:
    """Delete the record under KEY (HOST/WORKER/INCARNATION, @host/HOST, @device/HOST/ID) from the ledger.

    Use it if managers refuse a host because of a damaged record. Their message names the key. The devices of a deleted
    allocation count as free. No history has the deletion, so `outfitter verify` names it afterwards. The command says
    what must be true first, and asks.
    """  # fmt: skip
    import anyio

    target = anyio.run(_find, where, key)
    if target.change is None:
        near = f"; similar keys: {', '.join(target.near)}" if target.near else ""
        raise OutfitterCliError(f"partition {target.partition} of the ledger has no record under {key}{near}")
    if not yes:
        for line in _precautions(target, key):
            output.say(line, err=True)
        _ask()
    anyio.run(_forget, where, key, target.partition)
    output.say(f"{key}  forgotten")


def _ask() -> None:
    if not sys.stdin.isatty():
        raise OutfitterCliError("nothing was deleted: there is no terminal to ask; --yes does not ask")
    if not click.confirm("Delete it?", err=True):
        raise OutfitterCliError("nothing was deleted")


def _precautions(target: Target, key: str) -> Iterator[str]:
    text = ((target.change.message.value if target.change else None) or b"").decode("utf-8", "backslashreplace")
    yield f"The record under {key}, in partition {target.partition}:"
    yield f"  {text[:BODY_SHOWN]}" + ("…" if len(text) > BODY_SHOWN else "")
    yield "Before it is deleted:"
    yield f"- In host scope stop the manager of {target.host}, and start it again afterwards. {target.manager}"
    yield (
        f"- In cluster scope you need not stop anything. Restart the manager that serves partition {target.partition} "
        "afterwards."
    )
    if keys.is_allocation_key(key):
        yield "- The devices of this allocation count as free then. Make sure that its worker is dead."
    yield (
        "- No history has this deletion: `outfitter verify` exits with 1 and names it until the next snapshot, within "
        "24 hours, and of a live allocation as long as the ledger shows it."
    )


async def _find(where: BusConnection, key: str) -> Target:
    from difflib import get_close_matches

    from outfitter_proto import keys
    from outfitter_proto.records import Host
    from outfitter_service.query import ledger_view as reading

    host = keys.host_of(key.encode())
    if keys.writer_of(key.encode()) is not None:
        raise OutfitterCliError(
            f"{key} is a checkpoint: it counts the fencing tokens and has the input position, and must not be deleted"
        )
    if not host:
        raise OutfitterCliError(
            f"{key!r} is no key of the ledger: write HOST/WORKER/INCARNATION, @host/HOST or @device/HOST/ID"
        )
    async with reading.opened(where) as bus:
        (partition,) = await reading.partitions(bus, where.cluster, host)
        records = await _records(bus, where, partition)
    record = records[keys.host_key(host)].record if keys.host_key(host) in records else None
    stopped = record.manager.stopped_at if isinstance(record, Host) else None
    manager = (
        "Its record does not say that it has stopped."
        if stopped is None
        else f"It stopped at {stopped:%Y-%m-%dT%H:%M:%SZ}."
    )
    return Target(host, partition, records.get(key), get_close_matches(key, records, n=3), manager)


async def _records(bus: Bus, where: BusConnection, partition: int) -> dict[str, RecordChange]:
    """The current records in a partition of the ledger, by key."""
    from outfitter_proto import names
    from outfitter_service.query import ledger_view as reading

    changes = await reading.read_partition(bus, names.topics(where.cluster).allocations, partition)
    return {change.key: change for change in changes if change.message.value is not None}


async def _forget(where: BusConnection, key: str, partition: int) -> None:
    from outfitter_proto import names
    from outfitter_proto.bus import Entry
    from outfitter_service.query import ledger_view as reading

    async with reading.opened(where) as bus:
        await bus.publish(names.topics(where.cluster).allocations, partition, Entry(key.encode(), None))

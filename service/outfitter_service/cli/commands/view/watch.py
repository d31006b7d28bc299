"""`outfitter watch`: allocations and hosts as they change."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import click

from outfitter_proto import keys
from outfitter_service.cli._lib import options, output

if TYPE_CHECKING:
    from outfitter_proto.bus import Reader
    from outfitter_service.config import Connection
    from outfitter_service.query.ledger_view import Change


@click.command()
@click.argument("worker", type=options.WORKER, required=False)
@options.looking_on
@options.json_lines
def watch(where: Connection, /, worker: options.WorkerNames | None, host: str | None, as_json: bool) -> None:
    """Print each change of an allocation or of a host's devices as a line, until Ctrl-C.

    Of all hosts, or of --host; of all workers, or of WORKER: its name, HOST/WORKER or HOST/WORKER/INCARNATION. The live
    allocations and hosts at the start come first.
    With --json a line is {"partition", "offset", "key", "record"}: the record as on the bus, or null if it was deleted.
    """
    show = functools.partial(_show_json if as_json else _Words().show, worker)
    output.run_and_print(_follow, where, options.host_of(host, worker), show)


async def _follow(where: Connection, host: str | None, show: functools.partial[None]) -> None:
    import anyio

    from outfitter_proto import names
    from outfitter_service.query import ledger_view

    topic = names.topics(where.cluster).allocations

    async with ledger_view.opened(where) as bus, anyio.create_task_group() as group:
        for partition in await ledger_view.partitions(bus, where.cluster, host):
            end = await bus.stable_end(topic, partition)
            reader = await bus.open_reader(topic, partition, start=None, committed=True)
            group.start_soon(_follow_partition, reader, end, host, show)


async def _follow_partition(reader: Reader, end: int, host: str | None, show: functools.partial[None]) -> None:
    from outfitter_proto.bus.reading import read_on, read_to
    from outfitter_proto.records import FINAL_STATES, Allocation
    from outfitter_service.query import ledger_view

    current: dict[str, Change] = {}
    async with reader:
        async for messages in read_to(reader, end):
            for change in map(ledger_view.decode, messages):
                current.pop(change.key, None)
                current[change.key] = change
        for change in current.values():
            over = isinstance(change.record, Allocation) and change.record.state in FINAL_STATES
            if change.record is not None and not over:
                _show(change, host, show)
        async for messages in read_on(reader):
            for change in map(ledger_view.decode, messages):
                _show(change, host, show)


def _show(change: Change, host: str | None, show: functools.partial[None]) -> None:
    from outfitter_service.query import ledger_view

    if keys.writer_of(change.message.key or b"") is None and (host is None or ledger_view.is_about(change, host)):
        show(change)


def _show_json(worker: options.WorkerNames | None, change: Change) -> None:
    import msgspec

    if not _is_selected(worker, change):
        return
    message = change.message
    record = None if message.value is None else msgspec.Raw(message.value)
    output.print_json({"partition": message.partition, "offset": message.offset, "key": change.key, "record": record})


def _is_selected(worker: options.WorkerNames | None, change: Change) -> bool:
    return worker is None or worker.fits_key(change.key)


class _Words:
    """Prints changes as text. It keeps each worker's last state, to show the one before a change."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}

    def show(self, worker: options.WorkerNames | None, change: Change) -> None:
        if _is_selected(worker, change):
            line = self._line(change)
            if line:
                output.say(f"{_clock()}  {line}")

    def _line(self, change: Change) -> str | None:
        from outfitter_proto.records import Allocation, Device, Host
        from outfitter_service.query import ledger_view

        match change.record:
            case Allocation() as record:
                before = self._states.get(change.key)
                self._states[change.key] = record.state
                step = record.state if before in {None, record.state} else f"{before} -> {record.state}"
                place = "" if record.queue_position is None else f", position {record.queue_position} in the queue"
                why = "" if record.reason is None else f" ({record.reason})"
                return f"{record.host}/{record.worker}  {step}  {ledger_view.devices_in_words(record)}{place}{why}"
            case Host() as record:
                resources = "; ".join(
                    f"{name}: {_inventory(inventory)}" for name, inventory in record.resources.items()
                )
                managed = "managed" if record.manager.stopped_at is None else "its manager has stopped"
                return f"{record.host}  {managed}  {resources or 'no resources'}"
            case Device() as record:
                return f"{record.host}  device {record.id}: {record.state}" + (
                    f" ({record.reason})" if record.reason else ""
                )
            case None if change.message.value is None:
                state = self._states.pop(change.key, None)
                return None if state is None else f"{change.key}  deleted"
            case None:
                return f"{change.key}  has a record that this version cannot read"
            case record:  # of a kind without a text of its own
                return f"{change.key}  has a new record of type {record.__struct_config__.tag}"


def _inventory(inventory: object) -> str:
    from msgspec import UNSET

    from outfitter_proto.records import Health, ResourceInventory

    if not isinstance(inventory, ResourceInventory):
        return "unknown"
    if not inventory.devices:
        return f"{inventory.state}" + (f" ({inventory.reason})" if inventory.reason else "")
    if inventory.total is UNSET or inventory.healthy is UNSET:
        healthy = sum(device.health == Health.HEALTHY for device in inventory.devices)
        return f"{len(inventory.devices)} devices, {healthy} healthy"
    return f"{inventory.total} devices, {inventory.healthy} healthy"


def _clock() -> str:
    from datetime import datetime

    return datetime.now().astimezone().strftime("%H:%M:%S")

"""`outfitter watch`: allocations and hosts as they change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from outfitter_proto import keys, names
from outfitter_proto.signs_of_life import UNKNOWN, UNSERVED, Life, Verdict, in_words
from outfitter_service.cli._lib import options, output, standard_output
from outfitter_service.cli._lib.errors import warn

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from outfitter_proto.bus import Bus
    from outfitter_service.config import BusConnection
    from outfitter_service.query.ledger_view import RecordChange
    from outfitter_service.query.managers import FollowedManagers

NEW_PARTITIONS_AFTER_S = 5.0
"""Seconds until partitions that somebody adds are followed, at most."""


@click.command()
@click.argument("worker", type=options.WORKER, required=False)
@options.looking_on
@options.json_lines
def watch(where: BusConnection, /, worker: options.WorkerNames | None, host: str | None, as_json: bool) -> None:
    """Print each change of an allocation or of a host's devices as a line, until Ctrl-C.

    Of all hosts, or of --host; of all workers, or of WORKER: its name, HOST/WORKER or HOST/WORKER/INCARNATION. The live
    allocations and hosts at the start come first.
    With --json a line is {"partition", "offset", "key", "record"}: the record as on the bus, or null if it was deleted.
    """
    import anyio

    standard_output.check()
    anyio.run(_follow, where, options.host_of(host, worker), worker, as_json)


async def _follow(where: BusConnection, host: str | None, worker: options.WorkerNames | None, as_json: bool) -> None:
    import anyio

    from outfitter_proto.bus import BusUnavailableError
    from outfitter_service.query import known, ledger_view
    from outfitter_service.query.managers import FollowedManagers

    async with ledger_view.opened(where) as bus, anyio.create_task_group() as group:
        if unknown := await known.unknown_host(
            bus, where.cluster, await ledger_view.read(bus, where.cluster, host), host
        ):
            warn(unknown)
        managers = FollowedManagers(bus, where.cluster)
        words = _Words(managers.life)
        show = functools.partial(_show_json if as_json else words.show, worker)
        partitions = _Partitions(bus, where.cluster, host, show, managers, group)
        await partitions.follow_new_ones()
        while True:
            await anyio.sleep(NEW_PARTITIONS_AFTER_S)
            with suppress(BusUnavailableError):  # what it follows says so
                await partitions.follow_new_ones()
            if not as_json and worker is None:
                words.show_lives(host)


class _Partitions:
    """Shows what changes in all partitions or in one host's, also in those of a ledger that was made anew with more."""

    def __init__(
        self,
        bus: Bus,
        cluster: str,
        host: str | None,
        show: functools.partial[None],
        managers: FollowedManagers,
        group: TaskGroup,
    ) -> None:
        self._bus = bus
        self._topic = names.topics(cluster).allocations
        self._host = host
        self._show_change = show
        self._managers = managers
        self._group = group
        self._count = 0
        self._followed: set[int] = set()
        self._live: set[str] = set()
        """The keys whose last shown record was not over."""

    async def follow_new_ones(self) -> None:
        """Ask how many partitions there are, and follow those that are not followed yet."""
        from outfitter_proto.partitioning import partition_of

        count = self._count = (await self._bus.topic(self._topic)).partitions
        partitions = range(count) if self._host is None else (partition_of(self._host, count),)
        new = [partition for partition in partitions if partition not in self._followed]
        self._followed.update(new)
        for partition in new:
            self._group.start_soon(self._follow, partition)

    async def _follow(self, partition: int) -> None:
        import anyio

        from outfitter_proto.bus.reading import read_on, read_to
        from outfitter_service.query import ledger_view

        current: dict[str, RecordChange] = {}
        heard = anyio.Event()
        end = await self._bus.stable_end(self._topic, partition)
        async with await self._bus.open_reader(self._topic, partition, start=None, committed=True) as reader:
            async for messages in read_to(reader, end):
                for change in map(ledger_view.decode, messages):
                    current.pop(change.key, None)
                    current[change.key] = change
                    self._managers.put(change)
            self._group.start_soon(self._managers.follow, partition, self._count, heard.set)
            await heard.wait()
            for change in current.values():
                if change.record is not None and (not _is_over(change) or change.key in self._live):
                    self._show(change)
            async for messages in read_on(reader):
                for change in map(ledger_view.decode, messages):
                    self._managers.put(change)
                    self._show(change)

    def _show(self, change: RecordChange) -> None:
        from outfitter_service.query import ledger_view

        if keys.writer_of(change.message.key or b"") is not None:
            return
        if self._host is not None and not ledger_view.is_about(change, self._host):
            return
        if change.message.value is None or _is_over(change):
            self._live.discard(change.key)
        else:
            self._live.add(change.key)
        self._show_change(change)


def _is_over(change: RecordChange) -> bool:
    from outfitter_proto.records import FINAL_STATES, Allocation

    return isinstance(change.record, Allocation) and change.record.state in FINAL_STATES


def _show_json(worker: options.WorkerNames | None, change: RecordChange) -> None:
    import msgspec

    if not _is_selected(worker, change):
        return
    message = change.message
    record = None if message.value is None else msgspec.Raw(message.value)
    output.print_json({"partition": message.partition, "offset": message.offset, "key": change.key, "record": record})


def _is_selected(worker: options.WorkerNames | None, change: RecordChange) -> bool:
    return worker is None or worker.fits_key(change.key)


class _Words:
    """Prints changes as text. It keeps each worker's last state, to show the one before a change, what each order is
    about, and what was last said of each host's manager."""

    def __init__(self, life: Callable[[str], Verdict] = lambda _: UNKNOWN) -> None:
        """`life`: whether a host's manager lives."""
        self._states: dict[str, str] = {}
        self._orders: dict[str, str] = {}
        """What was said of each order in effect, by key."""
        self._life = life
        self._said: dict[str, tuple[Life, int | None] | None] = {}

    def show_lives(self, only: str | None) -> None:
        """Print of which managers something else is to be said now, without a record of their hosts that says it."""
        for host, said in list(self._said.items()):
            if only in {None, host} and _end_of(self._life(host)) != said:
                output.say(f"{_clock()}  {host}  {self._manager(host)}")

    def _manager(self, host: str) -> str:
        verdict = self._life(host)
        self._said[host] = _end_of(verdict)
        return f"its manager {in_words(verdict, output.ago)}" if _end_of(verdict) else "managed"

    def show(self, worker: options.WorkerNames | None, change: RecordChange) -> None:
        if _is_selected(worker, change):
            line = self._line(change)
            if line:
                output.say(f"{_clock()}  {line}")

    def _line(self, change: RecordChange) -> str | None:
        from outfitter_proto.records import Allocation, Cordon, Device, Host
        from outfitter_service.query import cordons, ledger_view

        match change.record:
            case Allocation() as record:
                before = self._states.get(change.key)
                self._states[change.key] = record.state
                step = record.state if before in {None, record.state} else f"{before} -> {record.state}"
                place = "" if record.queue_position is None else f", position {record.queue_position} in the queue"
                said = record.reason if record.reason is not None else ledger_view.illness_in_words(record)
                why = "" if said is None else f" ({said})"
                return f"{record.host}/{record.worker}  {step}  {ledger_view.devices_in_words(record)}{place}{why}"
            case Host() as record:
                resources = "; ".join(
                    f"{name}: {_inventory(inventory)}" for name, inventory in record.resources.items()
                )
                return f"{record.host}  {self._manager(record.host)}  {resources or 'no resources'}"
            case Device() as record:
                return f"{record.host}  device {record.id}: {record.state}" + (
                    f" ({record.reason})" if record.reason else ""
                )
            case Cordon() as record:
                order = cordons.shown(record)
                self._orders[change.key] = f"{record.host}  {order.about}"
                return f"{self._orders[change.key]} cordoned: {order.in_words}"
            case None if change.message.value is None and change.key in self._orders:
                return f"{self._orders.pop(change.key)} cordoned no more by order {change.key.rpartition('/')[2]}"
            case None if change.message.value is None:
                state = self._states.pop(change.key, None)
                return None if state is None else f"{change.key}  deleted"
            case None:
                return f"{change.key}  has a record that this version cannot read"
            case record:  # of a kind without a text of its own
                return f"{change.key}  has a new record of type {record.__struct_config__.tag}"


def _end_of(verdict: Verdict) -> tuple[Life, int | None] | None:
    """Stopped or dead, with the process that runs all the same; None: neither, as far as is known."""
    return (verdict.life, verdict.process) if verdict.life in UNSERVED else None


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
    cordoned = f", {inventory.cordoned} cordoned" if inventory.cordoned else ""
    strangers = sum(device.used_by is not UNSET for device in inventory.devices)
    used = f", {strangers} used by strangers" if strangers else ""
    return f"{inventory.total} devices, {inventory.healthy} healthy{cordoned}{used}"


def _clock() -> str:
    from datetime import datetime

    return datetime.now().astimezone().strftime("%H:%M:%S")

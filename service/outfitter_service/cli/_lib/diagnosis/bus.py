"""Checks of the bus: its topics, this user's rights there, other managers of this host, and the ledger."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import anyio

from outfitter_proto.bus import Bus, BusError, DamagedTopicError, MissingBusError, UnknownTopicError
from outfitter_proto.bus.schemes import is_local
from outfitter_service.cli._lib import broker_check, output
from outfitter_service.cli._lib.diagnosis.finding import UNCONFIGURED, Finding, Grade, Machine
from outfitter_service.config import BusConnection, ConfigurationError, Settings, connection, inspect

if TYPE_CHECKING:
    from outfitter_proto.topics import TopicDifference

T = TypeVar("T")

_FULL = 1 << 20
"""Free bytes below which a disk counts as full: no commit is larger."""

_UNREADABLE = Finding(
    Grade.NOT_CHECKED,
    "the bus cannot be read",
    "put right what `brokers` or `topics` says, then run this again",
)


def brokers(machine: Machine) -> Iterator[Finding]:
    """Whether each broker can be reached at the address that it advertises, and managers can write and meet there."""
    if (where := _where(machine)) is None:
        yield _UNREADABLE
        return
    settings = inspect(machine.config, machine.given).settings
    try:
        found = _asked(where, lambda bus: broker_check.obstacles(bus, where, settings))
    except MissingBusError:
        return
    except BusError:
        yield _UNREADABLE
        return
    needs_groups = settings is not None and settings.scope == "cluster"
    for item in found:
        verdict = Grade.WARNING if item.kind == "group" and not needs_groups else Grade.PROBLEM
        yield Finding(verdict, f"{item.setting} is {item.found}, not {item.wanted}: {item.why}", item.remedy)


def topics(machine: Machine) -> Iterator[Finding]:
    """Whether the bus can be reached, and its topics are as they must be. On the embedded bus also its files' modes."""
    where = connection(machine.config, machine.given)
    if (room := _lack_of_room(where.bus)) is not None:
        yield room
        if room.verdict is Grade.PROBLEM:
            return
    try:
        found = _asked(where, lambda bus: _differences(bus, where))
    except MissingBusError as error:
        yield Finding(Grade.NOT_CHECKED, str(error), "start the manager or run `outfitter topics create`")
        return
    for item in found:
        verdict = Grade.PROBLEM if item.fatal else Grade.WARNING
        yield Finding(verdict, item.in_words(), item.remedy)


def _lack_of_room(url: str) -> Finding | None:
    """That the disk of an embedded bus is full, or nearly so; None: it is not, or that cannot be told."""
    from outfitter_proto.bus.embedded.connecting.database import JOURNAL_SIZE_LIMIT
    from outfitter_proto.bus.embedded.connecting.location import parse

    if not is_local(url):
        return None
    folder = parse(url).path.parent
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    free = disk.f_bavail * disk.f_frsize
    if free >= JOURNAL_SIZE_LIMIT:
        return None
    seen = f"the disk of {folder} has {free / 1e6:.1f} MB free; the bus needs {JOURNAL_SIZE_LIMIT / 1e6:.1f} MB"
    verdict = Grade.PROBLEM if free < _FULL else Grade.WARNING
    return Finding(
        verdict, f"{seen} for its write-ahead log", "make room there: nothing can be written once it is full"
    )


async def _differences(bus: Bus, where: BusConnection) -> list[TopicDifference]:
    from outfitter_proto import topics as requirements
    from outfitter_proto.names import topics as names_of
    from outfitter_proto.partitioning import partition_of

    found = await requirements.check(bus, where.cluster, history=where.history)
    ledger = names_of(where.cluster).allocations
    layout = (await bus.layouts([ledger])).get(ledger)
    if layout is not None:
        await broker_check.refuse_undecided(bus, ledger, partition_of(where.host, layout.partitions))
    return found


def rights(machine: Machine) -> Iterator[Finding]:
    """Whether the brokers let this principal do what a manager does, sweep, and obey orders."""
    from outfitter_proto import rights as needed

    if isinstance(configured := _configured(machine), Finding):
        yield configured
        return
    where, settings = configured
    scope = settings.scope
    of_manager = needed.of_scope(scope, where.cluster, where.host, history=where.history)
    sweeping = [*needed.of_sweeper(where.cluster), *needed.to_see_sweepers(where.cluster)]
    optional = sweeping if scope == "host" else []
    optional += [*needed.of_signs_of_life(where.cluster), *needed.of_orders(where.cluster)]

    async def lacking(bus: Bus) -> list[tuple[Grade, str]] | None:
        if any(item.kind == broker_check.OUT_OF_REACH for item in await broker_check.obstacles(bus, where, settings)):
            return None  # who answers for the brokers is none of them, perhaps
        return [
            *((Grade.PROBLEM, sentence) for sentence in await bus.missing_rights(of_manager)),
            *((Grade.WARNING, sentence) for sentence in await bus.missing_rights(optional)),
        ]

    try:
        found = _asked(where, lacking)
    except MissingBusError:  # on a file there are no rights but its modes
        return
    except BusError:
        yield _UNREADABLE
        return
    if found is None:
        yield _UNREADABLE
        return
    for verdict, sentence in found:
        seen, _, command = sentence.partition(": ")
        yield Finding(verdict, seen, f"an administrator grants it by {command}")


def managers(machine: Machine) -> Iterator[Finding]:
    """Who else serves this host, and which other hosts this machine serves."""
    from outfitter_service.runtime import machine_lock

    if (where := _where(machine)) is None:
        yield _UNREADABLE
        return
    for name, holder in machine_lock.holders().items():
        if name != machine_lock.socket_name(where.host):
            remedy = "let one manager serve all workers of a machine, unless the two lend different devices"
            other = name.removeprefix(machine_lock.PREFIX)
            yield Finding(Grade.WARNING, f"{holder} serves this machine as host {other!r}", remedy)
        elif holder.uid not in (None, 0, os.geteuid()):
            remedy = "end it, or give the manager's service a directory of its own (RuntimeDirectory=)"
            yield Finding(Grade.WARNING, f"{holder} holds the machine's lock for host {where.host!r}", remedy)
    yield from _elsewhere(where)


def ledger(machine: Machine) -> Iterator[Finding]:
    """Whether a manager would start on the ledger."""
    from outfitter_service.runtime.manager.start_check import refusals

    if isinstance(configured := _configured(machine), Finding):
        yield configured
        return
    where, settings = configured
    try:
        found = _asked(where, lambda bus: refusals(bus, settings))
    except (MissingBusError, UnknownTopicError):  # a manager's first start is without a ledger
        return
    except DamagedTopicError as error:
        yield _damaged(error)
        return
    except BusError:
        yield _UNREADABLE
        return
    for sentences in found:
        seen, _, remedy = sentences.partition(". ")
        yield Finding(Grade.PROBLEM, seen, remedy or "do what the message says, then run this again")


def _damaged(error: DamagedTopicError) -> Finding:
    seen, _, remedy = str(error).partition(". ")
    return Finding(Grade.PROBLEM, seen, remedy)


def _configured(machine: Machine) -> tuple[BusConnection, Settings] | Finding:
    """The bus and the settings, or why they are not known."""
    if (where := _where(machine)) is None:
        return _UNREADABLE
    settings = inspect(machine.config, machine.given).settings
    return UNCONFIGURED if settings is None else (where, settings)


def _where(machine: Machine) -> BusConnection | None:
    """The bus; None if the configuration does not say it, as `topics` then says."""
    try:
        return connection(machine.config, machine.given)
    except ConfigurationError:
        return None


def _elsewhere(where: BusConnection) -> Iterator[Finding]:
    """What the ledger says of this host's manager."""
    from outfitter_proto.signs_of_life import in_words
    from outfitter_service.query import ledger_view
    from outfitter_service.query.managers import UnservedHost, unserved
    from outfitter_service.runtime.identity import machine_id

    async def read(bus: Bus) -> tuple[ledger_view.LedgerView, list[UnservedHost]]:
        ledger = await ledger_view.read(bus, where.cluster, where.host)
        return ledger, await unserved(bus, where.cluster, ledger, where.host)

    try:
        ledger, found = _asked(where, read)
    except (MissingBusError, UnknownTopicError):  # nobody has served anybody there
        return
    except DamagedTopicError:  # `ledger` says it
        return
    except BusError:
        yield _UNREADABLE
        return
    record, here = ledger.hosts_record(where.host), machine_id()
    if record is None or record.manager.stopped_at is not None:
        return
    if found and found[0].verdict.process is not None:
        seen = f"the manager of host {where.host!r} {in_words(found[0].verdict, output.ago)}"
        yield Finding(Grade.WARNING, seen, "see its log, and let it go on if it is stopped (state T in ps)")
    elif found:
        at = found[0].verdict.at
        heard = "for more than 3 minutes" if at is None else f"since {at:%Y-%m-%dT%H:%M:%SZ}"
        seen = f"the manager of host {where.host!r} was killed, or hangs: it was not heard {heard}"
        yield Finding(Grade.WARNING, seen, "start it again; the end of its log, or the kernel's, says why it ended")
    there = record.manager.machine_id
    if None not in (here, there) and here != there:
        remedy = (
            "stop that manager or choose another host; if its machine is gone for good: `outfitter serve --take-over`"
        )
        since = f"{record.manager.since:%Y-%m-%dT%H:%M:%SZ}"
        yield Finding(Grade.PROBLEM, f"machine {there} serves host {where.host!r} since {since}", remedy)


def _asked(where: BusConnection, ask: Callable[[Bus], Awaitable[T]]) -> T:
    """What the bus answers.

    Raises:
        BusError: it does not.
    """
    from outfitter_service.query import ledger_view

    async def run() -> T:
        async with ledger_view.opened(where) as bus:
            return await ask(bus)

    return anyio.run(run)

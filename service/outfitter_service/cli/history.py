"""`outfitter history`: what happened to workers and devices, and why, from the history topic."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from msgspec import Raw, Struct

from outfitter_proto.printable import printable
from outfitter_service.cli import options, output
from outfitter_service.cli.errors import leaves, warn

if TYPE_CHECKING:
    from outfitter_proto.bus import Message
    from outfitter_proto.records import Note, Refresh, Transition
    from outfitter_service.cli.journal import Stretch
    from outfitter_service.config import Connection

_PATIENCE = 5.0
_WIDTHS = (20, 4, 12, 12, 14, 22, 10)
_HEADINGS = ("time", "age", "host", "worker", "cause", "step", "devices", "explanation")


class Wanted(Struct, frozen=True, kw_only=True):
    """What is asked for; None: whatever it is."""

    host: str | None
    worker: str | None
    incarnation: str | None
    device: str | None
    since: datetime | None
    until: datetime | None

    def takes(self, step: Transition | Refresh | Note) -> bool:
        from outfitter_proto.records import Note

        if (self.since is not None and step.at < self.since) or (self.until is not None and step.at > self.until):
            return False
        if isinstance(step, Note):
            of_host = self.host is None or step.writer == f"host/{self.host}"
            return of_host and self.worker is self.incarnation is self.device is None
        return (
            self.host in {None, step.host}
            and self.worker in {None, step.worker}
            and self.incarnation in {None, step.incarnation}
            and (self.device is None or self.device in _device_names(step))
        )


@click.command()
@click.option("--worker", metavar="NAME", help="Of workers of that name only.")
@click.option("--incarnation", metavar="ID", help="Of that run of a worker only.")
@click.option("--device", metavar="ID", help="What a device was in: its id, UUID or another of its names.")
@click.option(
    "--since", metavar="TIME", callback=options.moment, help="Not before: 2026-01-31T12:00:00Z, or 10m (ago)."
)
@click.option("--until", metavar="TIME", callback=options.moment, help="Not after.")
@click.option("--follow", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@options.looking_on
@options.json_lines
@click.pass_context
def history(
    ctx: click.Context,
    /,
    worker: str | None,
    incarnation: str | None,
    device: str | None,
    since: datetime | None,
    until: datetime | None,
    follow: bool,
    config: str | None,
    as_json: bool,
    **_options: object,
) -> None:
    """Say what happened and why, the oldest first: each step of all hosts' workers, or of --host's.

    A step shows its cause, from which state to which, the devices, and how the decision is explained. Without a step
    (-), a record was brought up to date. With --json a line is {"partition", "offset", "key", "record"}.
    """
    import anyio

    from outfitter_service.config import connection

    wanted = Wanted(
        host=options.given(ctx).get("host"),
        worker=worker,
        incarnation=incarnation,
        device=device,
        since=since,
        until=until,
    )
    show = _Lines(wanted, as_json=as_json)
    try:
        anyio.run(_tell, connection(config, options.given(ctx)), show, follow)
    except BaseExceptionGroup as group:
        if any(isinstance(leaf, BrokenPipeError) for leaf in leaves(group)):
            raise BrokenPipeError from None  # whoever read along has seen enough
        raise


async def _tell(where: Connection, show: _Lines, follow: bool) -> None:
    import anyio

    from outfitter_service.cli import journal, ledger

    wanted = show.wanted
    async with ledger.opened(where) as bus, AsyncExitStack() as stack:
        topic = await journal.topic_of(bus, where)
        stretches: list[Stretch] = []
        for partition in await ledger.partitions(bus, where.cluster, wanted.host):
            start = None
            if wanted.since is not None:
                start = await journal.offset_at(bus, topic, partition, wanted.since)
            stretches.append(await journal.stretch(stack, bus, topic, partition, start=start))
        seen = False
        async for message in journal.merged(stretches):
            seen = True
            show(message)
        if not seen and wanted.since is None:
            warn(journal.nothing(where, topic))
        if follow:
            async with anyio.create_task_group() as group:
                for one in stretches:
                    group.start_soon(_follow, one, show)


async def _follow(one: Stretch, show: _Lines) -> None:
    from outfitter_service.cli import ledger

    for message in one.rest():
        show(message)
    while True:
        for message in await ledger.fetch(one.reader, timeout=_PATIENCE):
            show(message)


class _Lines:
    """Prints what is wanted, line by line: columns grow with what they have had to hold."""

    def __init__(self, wanted: Wanted, *, as_json: bool) -> None:
        self.wanted = wanted
        self._as_json = as_json
        self._widths = list(_WIDTHS)
        self._begun = False

    def __call__(self, message: Message) -> None:
        from outfitter_proto import codec
        from outfitter_proto.records import Note, Refresh, Transition

        try:
            step = codec.decode_history(message.value or b"")
        except codec.UnknownTypeError:
            return
        except codec.WireError as error:
            warn(f"passed over offset {message.offset} of {message.topic}/{message.partition}: {error}")
            return
        if not isinstance(step, Transition | Refresh | Note) or not self.wanted.takes(step):
            return
        if self._as_json:
            key = (message.key or b"").decode("utf-8", "replace")
            told = {
                "partition": message.partition,
                "offset": message.offset,
                "key": key,
                "record": Raw(message.value or b""),
            }
            output.print_json(told)
            return
        if not self._begun:
            self._begun = True
            self._print([heading.upper() for heading in _HEADINGS])
        age = output.age((datetime.now(UTC) - step.at).total_seconds())
        self._print([f"{step.at:%Y-%m-%dT%H:%M:%SZ}", age, *_cells(step)])

    def _print(self, cells: list[str]) -> None:
        cells = [printable(cell) for cell in cells]
        for column, cell in enumerate(cells[:-1]):
            self._widths[column] = max(self._widths[column], len(cell))
        padded = [cell.ljust(width) for cell, width in zip(cells[:-1], self._widths, strict=True)]
        output.say("  ".join([*padded, cells[-1]]).rstrip())


def _cells(step: Transition | Refresh | Note) -> list[str]:
    from outfitter_proto.records import Allocation, Note, Transition
    from outfitter_service.cli import ledger

    if isinstance(step, Note):
        return [step.writer, "-", step.event, "-", "-", step.explanation]
    if not isinstance(step, Transition):
        return [step.host, step.worker, step.event, "-", "-", step.explanation]
    record = step.record
    devices = ledger.devices_in_words(record) if isinstance(record, Allocation) else "?"
    why = step.explanation
    if step.confirmed is False and "unconfirmed" not in why:
        why = f"{why} (unconfirmed: nothing looked whether the devices are in use)"
    return [step.host, step.worker, step.event, f"{step.from_ or ''} -> {step.to}".strip(), devices, why]


def _device_names(step: Transition | Refresh) -> set[str]:
    """All names of the devices in a step's record; of one that was brought up to date, of those that changed."""
    from msgspec import UNSET

    from outfitter_proto.records import Allocation, Transition

    if not isinstance(step, Transition):
        resources = step.changed.get("resources", {})
        return {name for infos in resources.values() for info in infos for name in (info.get("id"), info.get("uuid"))}
    record = step.record
    if not isinstance(record, Allocation):
        return set()
    found: set[str] = set()
    for infos in record.resources.values():
        for info in infos:
            found |= {info[key] for key in ("id", "uuid") if key in info}
            if record.aliases is not UNSET:
                found.update(record.aliases.get(info.get("id", ""), ()))
    return found

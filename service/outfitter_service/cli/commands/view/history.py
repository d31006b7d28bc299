"""`outfitter history`: what happened to workers and devices, and why, from the history topic."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from msgspec import Raw, Struct

from outfitter_proto.support.printable import printable
from outfitter_service.cli._lib import options, output, standard_output
from outfitter_service.cli._lib.errors import warn

if TYPE_CHECKING:
    from outfitter_proto.bus import Bus, Message
    from outfitter_proto.records import Note, Refresh, Transition
    from outfitter_service.config import BusConnection
    from outfitter_service.query import labels
    from outfitter_service.query.history_reader import HistoryRange

SHOWN = 50
"""The default number of steps shown: the last ones."""
_WIDTHS = (20, 9, 20)
_HEADINGS = ("time", "step", "worker", "what, and why")


class StepFilter(Struct, frozen=True, kw_only=True):
    """The filters; None selects everything."""

    host: str | None
    worker: options.WorkerNames | None
    incarnation: str | None
    device: str | None
    since: datetime | None
    until: datetime | None
    labelled: labels.Wanted = ()

    def matches(self, step: Transition | Refresh | Note) -> bool:
        from outfitter_proto.records import Note
        from outfitter_service.query import labels
        from outfitter_service.query.steps import device_names, labels_of

        if (self.since is not None and step.at < self.since) or (self.until is not None and step.at > self.until):
            return False
        if isinstance(step, Note):
            is_chosen = self.host in {None, step.about} and (self.device is None or self.device == step.device)
            return is_chosen and (self.worker, self.incarnation, self.labelled) == (None, None, ())
        return (
            self.host in {None, step.host}
            and (self.worker is None or self.worker.fits(step.host, step.worker, step.incarnation))
            and self.incarnation in {None, step.incarnation}
            and (self.device is None or self.device in device_names(step))
            and (not self.labelled or labels.has_all(labels_of(step), self.labelled))
        )


@click.command()
@options.one_worker
@options.only_labels
@click.option("--incarnation", metavar="ID", help="Only this run of a worker.")
@click.option("--device", metavar="ID", help="Only steps with this device: its id, UUID or another name of it.")
@options.since
@options.until
@click.option(
    "--limit", type=options.COUNT, metavar="N",
    help=f"Only the last N steps. Default: {SHOWN}, or all with --since, --follow or --json.",
)  # fmt: skip
@click.option("--follow", is_flag=True, help="Show new steps as well, until Ctrl-C or the time of --until.")
@options.looking_on
@options.json_lines
def history(
    where: BusConnection,
    /,
    host: str | None,
    worker: options.WorkerNames | None,
    labelled: labels.Wanted,
    incarnation: str | None,
    device: str | None,
    since: datetime | None,
    until: datetime | None,
    limit: int | None,
    follow: bool,
    as_json: bool,
) -> None:
    """List the last steps of all hosts' workers, or of --host's, the oldest first.

    Each line has the time, the worker's new state (- if its record was only refreshed), the worker (with its host where
    several are shown), its devices, and the reason. With --json there is a line for each step in history:
    {"partition", "offset", "key", "record"}.
    """
    import anyio

    host = options.host_of(host, worker)
    chosen = StepFilter(
        host=host, worker=worker, incarnation=incarnation, device=device, since=since, until=until, labelled=labelled
    )
    if limit is None and not (as_json or follow or since):
        limit = SHOWN
    if follow:
        standard_output.check()
    anyio.run(_show_history, where, _Lines(chosen, as_json=as_json), follow, limit)


async def _show_history(where: BusConnection, show: _Lines, follow: bool, limit: int | None) -> None:
    import anyio

    from outfitter_service.query import history_reader, ledger_view

    chosen = show.chosen
    async with ledger_view.opened(where) as bus, AsyncExitStack() as stack:
        topic = await history_reader.topic_of(bus, where)
        partitions = await ledger_view.partitions(bus, where.cluster, chosen.host)
        ranges = await history_reader.open_ranges(stack, bus, topic, partitions, chosen.since)
        has_history = False
        last: deque[Message] = deque(maxlen=limit)
        left_out = 0
        async for message in history_reader.merged(ranges):
            has_history = True
            if limit is None:
                show(message)
            elif show.wants(message):
                left_out += len(last) == limit
                last.append(message)
        if left_out:
            warn(f"the last {limit} of {len(last) + left_out} steps: --limit or --since shows more")
        show.measure(last)
        for message in last:
            show(message)
        if not has_history and chosen.since is None:
            warn(history_reader.no_history_text(where, topic))
        elif not show.has_shown:
            warn(await _nothing(bus, where, chosen))
        if follow:
            async with anyio.create_task_group() as group:
                for partition, history_range in zip(partitions, ranges, strict=True):
                    group.start_soon(_follow, bus, topic, partition, history_range, show)


async def _nothing(bus: Bus, where: BusConnection, chosen: StepFilter) -> str:
    """Why no step is shown."""
    from outfitter_service.query import known, ledger_view

    ledger = await ledger_view.read(bus, where.cluster, chosen.host)
    return await known.unknown_host(bus, where.cluster, ledger, chosen.host) or "no step matches"


async def _follow(bus: Bus, topic: str, partition: int, history_range: HistoryRange, show: _Lines) -> None:
    """Show the new steps of one partition: for ever, or those that are committed by the time of `--until`."""
    from outfitter_proto.bus.reading import read_on, read_to

    for message in history_range.rest():
        show(message)
    until = show.chosen.until

    def seconds_left() -> float:
        return math.inf if until is None else (until - datetime.now(UTC)).total_seconds()

    async for messages in read_on(history_range.reader, seconds_left=seconds_left):
        for message in messages:
            show(message)
    async for messages in read_to(history_range.reader, await bus.stable_end(topic, partition)):
        for message in messages:
            show(message)


class _Lines:
    """Prints the selected steps line by line. Columns grow with their contents. `has_shown`: there was one."""

    def __init__(self, chosen: StepFilter, *, as_json: bool) -> None:
        self.chosen = chosen
        self._as_json = as_json
        self._widths = list(_WIDTHS)
        self._begun = False
        self.has_shown = False

    def wants(self, message: Message) -> bool:
        """Whether the filters select this message."""
        return self._step(message) is not None

    def measure(self, messages: Iterable[Message]) -> None:
        """Make the columns wide enough for these messages."""
        for message in messages:
            if (step := self._step(message)) is None:
                continue
            self._widen([f"{step.at:%Y-%m-%dT%H:%M:%SZ}", *_cells(step, with_host=self.chosen.host is None)])

    def __call__(self, message: Message) -> None:
        step = self._step(message)
        if step is None:
            return
        self.has_shown = True
        if self._as_json:
            key = (message.key or b"").decode("utf-8", "replace")
            record = Raw(message.value or b"")
            output.print_json({"partition": message.partition, "offset": message.offset, "key": key, "record": record})
            return
        if not self._begun:
            self._begun = True
            self._print([heading.upper() for heading in _HEADINGS])
        self._print([f"{step.at:%Y-%m-%dT%H:%M:%SZ}", *_cells(step, with_host=self.chosen.host is None)])

    def _step(self, message: Message) -> Transition | Refresh | Note | None:
        from outfitter_proto import codec
        from outfitter_proto.records import Note, Refresh, Transition
        from outfitter_service.query import history_reader

        step = history_reader.decoded(message, codec.decode_history)
        return step if isinstance(step, Transition | Refresh | Note) and self.chosen.matches(step) else None

    def _print(self, cells: list[str]) -> None:
        cells = [printable(cell) for cell in cells]
        self._widen(cells)
        padded = [cell.ljust(width) for cell, width in zip(cells[:-1], self._widths, strict=True)]
        output.say_wrapped("  ".join([*padded, cells[-1]]))

    def _widen(self, cells: list[str]) -> None:
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells[:-1], strict=True)]


def _cells(step: Transition | Refresh | Note, *, with_host: bool) -> list[str]:
    from outfitter_proto.records import Allocation, Note, Transition
    from outfitter_service.query import labels, ledger_view
    from outfitter_service.query.steps import labels_of

    if isinstance(step, Note):
        return [step.event, step.writer, step.explanation]
    worker = f"{step.host}/{step.worker}" if with_host else step.worker
    if not isinstance(step, Transition):
        ill = ledger_view.ill_in_words(step.changed.get("resources", {}))
        return ["-", worker, f"{step.event}: {step.explanation}{f': {ill}' if ill else ''}"]
    devices = ledger_view.devices_in_words(step.record) if isinstance(step.record, Allocation) else ""
    # say it only where a reader could assume that the driver checked for use
    unconfirmed = " (unconfirmed)" if step.confirmed is False and "unconfirmed" not in step.explanation else ""
    why = step.explanation if step.explanation.startswith(step.event) else f"{step.event}: {step.explanation}"
    if of_worker := labels_of(step):
        why = f"{why} ({labels.in_words(of_worker)})"
    return [step.to, worker, f"{devices}; {why}{unconfirmed}" if devices else f"{why}{unconfirmed}"]

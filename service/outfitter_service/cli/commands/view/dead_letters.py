"""`outfitter dead-letters`: the messages that managers refused, as text, with the reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from outfitter_proto.records import NobodysCode
from outfitter_proto.support.printable import printable
from outfitter_service.cli._lib import options, output, standard_output
from outfitter_service.cli._lib.errors import warn

if TYPE_CHECKING:
    from outfitter_proto.bus import Message
    from outfitter_proto.records import DeadLetter
    from outfitter_service.config import BusConnection
    from outfitter_service.query.history_reader import HistoryRange
    from outfitter_service.query.letters import ShownLetter

SHOWN = 20
KEY_SHOWN = 200
BODY_SHOWN = 800
"""Most characters of a message that are shown to people."""
CODES = [str(code) for code in NobodysCode]


class LetterFilter(Struct, frozen=True, kw_only=True):
    """The filters; None selects everything."""

    host: str | None
    code: str | None
    reason: str | None
    since: datetime | None

    def matches(self, letter: DeadLetter) -> bool:
        return (
            (self.since is None or letter.at >= self.since)
            and self.host in {None, letter.message_key}
            and (self.code is None or letter.code == self.code)
            and (self.reason is None or self.reason.lower() in letter.reason.lower())
        )


@click.command("dead-letters")
@options.looking_on
@click.option(
    "--code", type=click.Choice(CODES), metavar="CODE",
    help=f"Only with this code: {', '.join(CODES[:-1])} or {CODES[-1]}. Other letters have none.",
)  # fmt: skip
@click.option("--reason", metavar="TEXT", help="Only letters whose reason has this text.")
@options.since
@click.option("--limit", type=options.COUNT, metavar="N", default=SHOWN, show_default=True, help="Only the last N.")
@click.option("--follow", is_flag=True, help="Show new ones as well, until Ctrl-C.")
@options.json_lines
def dead_letters(
    where: BusConnection,
    /,
    host: str | None,
    code: str | None,
    reason: str | None,
    since: datetime | None,
    limit: int,
    follow: bool,
    as_json: bool,
) -> None:
    """Show the messages that managers refused, the oldest first: the reason, the place, the text.

    --host shows messages whose key is that host. With --json each line is an object. `text` has the message if it is
    UTF-8; otherwise `base64` has its bytes. A dead letter has at most 4 KiB of its message.
    """
    chosen = LetterFilter(host=host, code=code, reason=reason, since=since)
    import anyio

    if follow:
        standard_output.check()
    anyio.run(_print, where, chosen, limit, follow, as_json)


async def _print(where: BusConnection, chosen: LetterFilter, limit: int, follow: bool, as_json: bool) -> None:
    import anyio

    from outfitter_proto import names
    from outfitter_service.query import history_reader, ledger_view

    topic = names.topics(where.cluster).dead_letters
    async with ledger_view.opened(where) as bus, AsyncExitStack() as stack:
        partitions = await ledger_view.partitions(bus, where.cluster, None)
        ranges = await history_reader.open_ranges(stack, bus, topic, partitions, chosen.since)
        last: deque[ShownLetter] = deque(maxlen=limit)
        left_out = 0
        async for message in history_reader.merged(ranges):
            letter = _decoded(message, chosen)
            if letter is not None:
                left_out += len(last) == limit
                last.append(letter)
        if left_out:
            warn(f"the last {limit} of {limit + left_out}: --limit shows more")
        if not last and not follow:
            warn("no dead letter matches")  # not that a host is unknown: letters name hosts without a manager
        for letter in last:
            _show(letter, as_json=as_json)
        if follow:
            async with anyio.create_task_group() as group:
                for history_range in ranges:
                    group.start_soon(_follow, history_range, chosen, as_json)


async def _follow(history_range: HistoryRange, chosen: LetterFilter, as_json: bool) -> None:
    from outfitter_proto.bus.reading import read_on

    def show(messages: Iterable[Message]) -> None:
        for message in messages:
            letter = _decoded(message, chosen)
            if letter is not None:
                _show(letter, as_json=as_json)

    show(history_range.rest())
    async for messages in read_on(history_range.reader):
        show(messages)


def _decoded(message: Message, chosen: LetterFilter) -> ShownLetter | None:
    from outfitter_proto import codec
    from outfitter_service.query import history_reader
    from outfitter_service.query.letters import shown

    letter = history_reader.decoded(message, codec.decode_dead_letter)
    return shown(letter) if letter is not None and chosen.matches(letter) else None


def _show(letter: ShownLetter, *, as_json: bool) -> None:
    if as_json:
        output.print_json(letter)
        return
    age = output.age((datetime.now(UTC) - letter.at).total_seconds())
    key = "no key" if letter.key is None else f"key {_cut(letter.key, KEY_SHOWN)}"
    code = f"  {letter.code}" if letter.code else ""
    source = letter.source
    output.say(
        f"{letter.at:%Y-%m-%dT%H:%M:%SZ} ({age} ago)  {source.topic}/{source.partition} at {source.offset}  {key}{code}"
    )
    output.say(f"  {letter.reason}" + (f" (at {letter.field})" if letter.field else ""))
    text = f"{letter.length} bytes that are not UTF-8" if letter.text is None else letter.text
    more = f" ({letter.length} bytes in all; --json has more)" if len(printable(text)) > BODY_SHOWN else ""
    output.say(f"  {_cut(text, BODY_SHOWN)}{more}" if text else "  (no body)")


def _cut(text: str, most: int) -> str:
    """At most so many characters, as they are shown: control characters take several."""
    shown = printable(text[:most])
    return shown if len(text) <= most and len(shown) <= most else f"{shown[:most]}…"

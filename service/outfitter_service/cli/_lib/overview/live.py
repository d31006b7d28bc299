"""Keeps a terminal's screen at the newest picture, until `q` or Ctrl-C.

A picture that cannot be replaced stays, and the screen says how old it is and why.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import anyio
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from outfitter_proto.support.printable import printable
from outfitter_service.cli._lib.overview import screen
from outfitter_service.cli._lib.overview.picture import Picture
from outfitter_service.cli._lib.overview.sources import NoPictureError, NotReadyError, PictureSource
from outfitter_service.query.errors import OutfitterCliError

INTERVAL_S = 1.0
"""Seconds between two pictures."""
FIRST_WITHIN_S = 15.0
"""Seconds to wait for a single picture."""
_SOON_S = 0.1


async def once(source: PictureSource, console: Console) -> None:
    """Print one picture, of as many lines as it has.

    Raises:
        OutfitterCliError: the source cannot be read, or is not ready within `FIRST_WITHIN_S`.
    """
    deadline = anyio.current_time() + FIRST_WITHIN_S
    while True:
        try:
            picture = await source.picture()
            break
        except NotReadyError:
            if anyio.current_time() >= deadline:
                raise
            await anyio.sleep(_SOON_S)
    for line in screen.lines_of(picture, datetime.now(UTC), console.width, screen.TALLEST):
        console.print(line, soft_wrap=True)


async def run(source: PictureSource, console: Console) -> None:
    """Show pictures until `q`. SIGTERM ends the process, too, once the terminal is as it was.

    Raises:
        OutfitterCliError: there was no picture, and there will be none. Once there was one, nothing ends the screen.
    """
    terminated = False
    with (
        anyio.open_signal_receiver(signal.SIGTERM) as signals,
        _single_keys(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_wait_for_q, tasks.cancel_scope)
            tasks.start_soon(_show, source, console, live)
            async for _ in signals:
                terminated = True
                tasks.cancel_scope.cancel()
    if terminated:
        signal.raise_signal(signal.SIGTERM)


async def _show(source: PictureSource, console: Console, live: Live) -> None:
    picture: Picture | None = None
    while True:
        stale = None
        try:
            picture = await source.picture()
        except OutfitterCliError as error:
            if picture is None and not isinstance(error, NoPictureError):
                raise
            stale = str(error)
        live.update(_drawn(picture, stale, console), refresh=True)
        await anyio.sleep(INTERVAL_S)


def _drawn(picture: Picture | None, stale: str | None, console: Console) -> Group:
    width, height = console.size
    if picture is None:
        return Group(Text(printable(stale or ""), "yellow"))
    return Group(*screen.lines_of(picture, datetime.now(UTC), width, height, stale))


async def _wait_for_q(scope: anyio.CancelScope) -> None:
    descriptor = sys.stdin.fileno()
    while True:
        await anyio.wait_readable(descriptor)
        typed = os.read(descriptor, 64)
        if not typed or b"q" in typed.lower():
            scope.cancel()
            return


@contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys as they are typed, without showing them. Ctrl-C stays a signal."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

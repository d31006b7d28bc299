"""Standard errors that take nothing: closed, on a full disk, a pipe without a reader, a pipe that nobody reads."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

MUTE = ("closed", "full disk", "reader gone", "not read")
"""The kinds that `mute` knows."""


@contextmanager
def mute(kind: str, command: Sequence[str]) -> Iterator[tuple[list[str], int]]:
    """The command to start instead of `command`, and the descriptor to start it with as its standard error."""
    if kind == "closed":
        command = redirected(command, "2>&-")
    if kind in {"closed", "full disk"}:
        reader, writer = os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
    try:
        if kind == "reader gone":
            os.close(reader)
        if kind == "not read":
            fill(writer)
        yield list(command), writer
    finally:
        os.close(writer)
        if kind != "reader gone":
            os.close(reader)


def redirected(command: Sequence[str], redirections: str) -> list[str]:
    """The command with a shell's redirections. The shell becomes the command, so the process is the same."""
    return ["sh", "-c", f'exec "$@" {redirections}', "sh", *command]


def fill(writer: int) -> None:
    """Fill a pipe, so that the next write to it blocks."""
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ))
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.set_blocking(writer, True)

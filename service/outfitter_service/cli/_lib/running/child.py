"""The command of `outfitter run`: started, watched, signalled, and bound to the life of its parent.

Its process is forked at the very beginning, while this one has no threads and a fork can still run Python; it waits
for its environment and then becomes the command. Starting another interpreter for that would cost as much again as
all the rest of a short `outfitter run`.

It runs in its parent's process group, as below env(1) or nice(1), so that job control in a terminal works as if
`outfitter run` were not there. The kernel kills it when `outfitter run` dies (PR_SET_PDEATHSIG): a device that is
lent again must not be in use any more. Processes that the command starts itself are its own business, and a
set-user-ID program cannot be bound in this way.
"""

from __future__ import annotations

import marshal
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

import anyio

from outfitter_service.cli._lib.running import trampoline


def bound(command: Sequence[str]) -> list[str]:
    """The argument list that becomes `command`, and dies with this process, whatever threads it has."""
    return [sys.executable, "-I", "-S", str(Path(trampoline.__file__)), str(os.getpid()), "", *command]


class Child:
    """The command's process: a context, so that one that is never started is not left behind.

    Until it comes forward, a terminal's signals do not find it: its process group is its own.
    """

    def __init__(self, command: Sequence[str], *, mask: Iterable[int]) -> None:
        """Fork; the command will have the signals of `mask` blocked.

        Call from the main thread, whose end the kernel takes for the parent's, and before there is another one.
        """
        self.command = tuple(command)
        self.started = False
        self._ended: anyio.Event  # there is no event loop yet
        parent, (listening, telling) = os.getpid(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(telling)
            _stand_by(parent, listening, list(command), mask)
        os.close(listening)
        os.setpgid(self._pid, self._pid)
        self._telling = telling
        self._pidfd = os.pidfd_open(self._pid)

    def come_forward(self) -> None:
        """Put it into this process's group: from now on a terminal's signals find it, and wait for its start."""
        os.setpgid(self._pid, os.getpgrp())

    def start(self, environment: Mapping[str, str]) -> None:
        """Let it become the command. File descriptors that this process was given are passed on."""
        self.started, self._ended = True, anyio.Event()
        # One that was killed meanwhile cannot be told any more; `wait` says so.
        with suppress(BrokenPipeError), os.fdopen(self._telling, "wb") as telling:
            marshal.dump(dict(environment), telling)

    async def wait(self) -> int:
        """Wait for its end; its exit code, or 128 plus the signal that ended it. One caller at a time."""
        await anyio.wait_readable(self._pidfd)
        _, status = os.waitpid(self._pid, 0)  # noqa: ASYNC222 - it has ended
        self._ended.set()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.started:
            self.send(signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def send(self, number: int) -> None:
        """Send it a signal; it may have ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def end(self, *, within: float) -> None:
        """Tell it to end, and kill it when it has not done so `within` seconds. Somebody else is in `wait`."""
        self.send(signal.SIGTERM)
        with anyio.move_on_after(within):
            await self._ended.wait()
            return
        self.send(signal.SIGKILL)


def _stand_by(parent: int, listening: int, command: list[str], mask: Iterable[int]) -> NoReturn:
    """The forked process: wait for the environment, and become the command. Nothing else of the program runs on."""
    try:
        trampoline.bind(parent, command[0])
        with os.fdopen(listening, "rb") as told:
            environment = told.read()
        if not environment:
            os._exit(0)  # the parent has ended without a start
        trampoline.become(command, marshal.loads(environment), mask)  # noqa: S302 - from ourselves
    except BaseException as error:  # noqa: BLE001 - it must not go on as a second parent
        trampoline.fail(f"{command[0]} cannot be started: {error!r}", trampoline.CANNOT_EXECUTE)

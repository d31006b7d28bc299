"""The command's process of `outfitter run`, which dies with its parent.

We fork it first, while this process has no threads and a fork can still run Python. It waits for its environment and
then becomes the command. A new interpreter instead would double the time of a short `outfitter run`.

It runs in its parent's process group, as under env(1) or nice(1), so that job control in a terminal works as usual. The
kernel kills it when `outfitter run` dies (PR_SET_PDEATHSIG), because a device that is granted again must not be in use.
This does not cover processes that the command starts, set-user-ID programs, nor a command that changes its user.
"""

from __future__ import annotations

import errno
import marshal
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

import anyio

from outfitter_proto.support import processes
from outfitter_service.cli._lib import process_limit
from outfitter_service.cli._lib.running import trampoline
from outfitter_service.query.errors import OutfitterCliError


def bound(command: Sequence[str]) -> list[str]:
    """An argument list that becomes `command` and dies with this process, which may have threads."""
    return [sys.executable, "-I", "-S", str(Path(trampoline.__file__)), str(os.getpid()), "", *command]


class Child:
    """The command's process; as a context manager, it removes a process that was never started. `pid`: its pid.

    Until `take_foreground` it has a process group of its own, so a terminal's signals do not reach it.
    """

    def __init__(self, command: Sequence[str], *, mask: Iterable[int]) -> None:
        """Fork; the command will have the signals of `mask` blocked.

        Call it from the main thread, because its end kills the child, and before there are other threads.

        Raises:
            OutfitterCliError: a limit allows no further process, or the kernel lets nobody watch one.
        """
        self.command = tuple(command)
        self.started = False
        self._ended: anyio.Event  # there is no event loop yet
        parent, (read_end, write_end) = os.getpid(), os.pipe()
        try:
            self.pid = os.fork()
        except OSError as error:
            raise OutfitterCliError(process_limit.explain(error.errno or errno.EAGAIN)) from error
        if self.pid == 0:
            os.close(write_end)
            _stand_by(parent, read_end, list(command), mask)
        os.close(read_end)
        os.setpgid(self.pid, self.pid)
        self._environment_pipe = write_end
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            os.kill(self.pid, signal.SIGKILL)
            if error.errno in processes.REFUSED:
                raise OutfitterCliError(processes.unwatchable(self.pid, error)) from error
            raise

    @property
    def ended(self) -> bool:
        """Whether `wait` has seen its end."""
        return self.started and self._ended.is_set()

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, and nobody has continued it."""
        stops = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):  # it has ended, and `wait` has not seen that yet
            return self.started and not self.ended and os.waitid(os.P_PID, self.pid, stops) is not None
        return False

    @property
    def apart(self) -> bool:
        """Whether it has left this process's group: then signals that the terminal sends here do not reach it."""
        return self.started and not self.ended and os.getpgid(self.pid) != os.getpgrp()

    def take_foreground(self) -> None:
        """Move it into this process's group. A terminal's signals reach it from now on, but wait for its start."""
        os.setpgid(self.pid, os.getpgrp())

    def start(self, environment: Mapping[str, str]) -> None:
        """Let it become the command. It inherits the file descriptors that this process inherited."""
        self.started, self._ended = True, anyio.Event()
        # It may have been killed meanwhile; then `wait` returns that.
        with suppress(BrokenPipeError), os.fdopen(self._environment_pipe, "wb") as pipe:
            marshal.dump(dict(environment), pipe)

    async def wait(self) -> int:
        """Wait for its end; return its exit code, or minus the signal that ended it. One caller at a time."""
        await anyio.wait_readable(self._pidfd)
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222 - it has ended
        self._ended.set()
        return os.waitstatus_to_exitcode(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.started:
            self.send(signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def send(self, number: int) -> None:
        """Send it a signal. It may have ended already."""
        if not self.ended:  # until then the pid is its own
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _stand_by(parent: int, read_end: int, command: list[str], mask: Iterable[int]) -> NoReturn:
    """In the forked process: wait for the environment, and become the command. Never returns."""
    try:
        trampoline.bind(parent, command[0])
        with os.fdopen(read_end, "rb") as pipe:
            environment = pipe.read()
        if not environment:
            os._exit(0)  # the parent has ended without a start
        trampoline.become(command, marshal.loads(environment), mask)  # noqa: S302 - from ourselves
    except BaseException as error:  # noqa: BLE001 - it must not continue as a second parent
        trampoline.fail(f"{command[0]} cannot be started: {error!r}", trampoline.CANNOT_EXECUTE)

"""The command of `outfitter run`: started, watched, signalled, and bound to the life of its parent.

It stays in its parent's process group, as below env(1) or nice(1), so that job control in a terminal works as if
`outfitter run` were not there. The kernel kills it when `outfitter run` dies (PR_SET_PDEATHSIG): a device that is
lent again must not be in use any more. Processes that the command starts itself are its own business, and a
set-user-ID program cannot be bound in this way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anyio

TRAMPOLINE = Path(__file__).with_name("trampoline.py")


def bound(command: Sequence[str], *, mask: Iterable[int] = ()) -> list[str]:
    """The argument list that becomes `command`, with the signals of `mask` blocked, and dies with this process."""
    blocked = ",".join(str(int(number)) for number in mask)
    return [sys.executable, "-I", "-S", str(TRAMPOLINE), str(os.getpid()), blocked, *command]


class Child:
    """A running command."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, mask: Iterable[int]) -> None:
        """Start it with the signals of `mask` blocked. Call from the main thread: the kernel takes its end for the
        parent's. File descriptors that this process was given are passed on."""
        self._process = subprocess.Popen(bound(command, mask=mask), env=environment, close_fds=False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._ended = anyio.Event()

    async def wait(self) -> int:
        """Wait for its end; its exit code, or 128 plus the signal that ended it. One caller at a time."""
        await anyio.wait_readable(self._pidfd)
        code = self._process.wait()
        self._ended.set()
        return code if code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Send it a signal; it may have ended."""
        self._process.send_signal(number)

    async def end(self, *, within: float) -> None:
        """Tell it to end, and kill it when it has not done so `within` seconds. Somebody else is in `wait`."""
        self.send(signal.SIGTERM)
        with anyio.move_on_after(within):
            await self._ended.wait()
            return
        self.send(signal.SIGKILL)

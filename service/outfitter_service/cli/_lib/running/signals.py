"""Reads signals with their sender, so that `outfitter run` knows whether to pass one on.

A terminal's signals come from the kernel and go to the whole foreground group, also to the command. Passing them on
would deliver Ctrl-C twice. A signal of another process is passed on: it does not tell whether it went to the whole
group, and most go to `outfitter run` alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, NoReturn, Self

import anyio

SI_KERNEL = 128
_PR_SET_DUMPABLE = 4
_INFO_BYTES = 128
_MASK_BYTES = 128
_INFO = struct.Struct("=IiiI")
"""The first fields of `struct signalfd_siginfo` in signalfd(2): number, errno, code, pid."""


class Received(NamedTuple):
    """A signal to this process, from the kernel (a terminal) or from a process. `sender`: its pid, 0 if it has none
    here."""

    number: int
    by_kernel: bool
    sender: int


def die_of(number: int) -> NoReturn:
    """End this process by a signal, so that its parent sees that one.

    A shell ends its script after Ctrl-C only if the command has died of it. We leave no core file: it is the command's
    that counts.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    with suppress(OSError, ValueError):  # SIGKILL has no other action, and some signals are the C library's own
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a PID namespace does not die of it


class SignalFile:
    """Blocks `numbers` in this thread and the threads it starts, and returns them one by one: signalfd(2).

    Create it before any thread. Ignored signals (nohup(1)) stay ignored. `blocked_before` are the signals that were
    blocked before, for starting a program.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self.blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        library = ctypes.CDLL(None, use_errno=True)
        mask = ctypes.create_string_buffer(_MASK_BYTES)
        library.sigemptyset(mask)
        for number in self.numbers:
            library.sigaddset(mask, number)
        self._file = library.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._file < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "signalfd")

    async def each(self, handle: Callable[[Received], object]) -> None:
        """Hand on each signal as it comes, until cancelled."""
        while True:
            while (received := self.read()) is not None:
                handle(received)
            await anyio.wait_readable(self._file)

    def read(self) -> Received | None:
        """The next received signal; None if there is none."""
        try:
            info = os.read(self._file, _INFO_BYTES)
        except BlockingIOError:
            return None
        number, _, code, sender = _INFO.unpack_from(info)
        return Received(number, code == SI_KERNEL, sender)

    def close(self) -> None:
        """Stop reading. The signals stay blocked, because the process is about to end."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

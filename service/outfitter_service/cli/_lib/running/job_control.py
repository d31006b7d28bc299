"""Job control of a command that stops without `outfitter run`, as sudo(8) does it.

A shell with job control sees only its own children. If the command alone stops (`suspend` of an interactive shell), the
shell must see `outfitter run` stop, or nobody takes the terminal back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def foreground() -> int | None:
    """The process group in the foreground of this process's terminal; None if there is no terminal."""
    with suppress(OSError), _terminal() as terminal:
        return os.tcgetpgrp(terminal)
    return None


def stop() -> None:
    """Stop this process, until somebody continues it. Where no shell could do that, the kernel does not stop it."""
    os.kill(os.getpid(), signal.SIGTSTP)


def continue_command(pid: int) -> None:
    """Continue the stopped command. If its process group is another one, it gets the foreground that this group has."""
    group, own = os.getpgid(pid), os.getpgrp()
    if group != own and foreground() == own:
        with suppress(OSError), _terminal() as terminal:
            os.tcsetpgrp(terminal, group)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGCONT)


@contextmanager
def _terminal() -> Iterator[int]:
    terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield terminal
    finally:
        os.close(terminal)

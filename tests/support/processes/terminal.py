"""Programs in a terminal of their own, as a shell runs them."""

from __future__ import annotations

import os
import pty
import select
import signal
import struct
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import ioctl

PATIENCE = 30.0

SHELL = """
import os, signal, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
run = os.fork()
if run == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.argv[1], sys.argv[1:])
while True:
    _, status = os.waitpid(run, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        break
    print("stopped", flush=True)
    sys.stdin.readline()
    os.tcsetpgrp(0, run)
    os.killpg(run, signal.SIGCONT)
print("over", os.waitstatus_to_exitcode(status), flush=True)
"""
"""What a shell does with a job: it runs in a process group of its own in the foreground, stops, and continues."""


class Terminal:
    """A terminal with a process in it."""

    def __init__(self, pid: int, master: int) -> None:
        self.pid = pid
        self.master = master
        self.text = ""

    def until(self, text: str) -> str:
        """Read until the text has been printed. Returns what was printed before it."""
        while text not in self.text:
            assert select.select([self.master], [], [], PATIENCE)[0], f"not {text!r}: {self.text}"
            self.text += os.read(self.master, 1000).decode()
        before, _, self.text = self.text.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def terminal(environment: Mapping[str, str], *command: str) -> Iterator[Terminal]:
    """Run a command in a terminal as a shell does."""
    pid, master = pty.fork()
    if pid == 0:
        with suppress(BaseException):  # the child must not go on as the tests
            for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # ignored in what runs in the background
                signal.signal(number, signal.SIG_DFL)
            os.execve(sys.executable, [sys.executable, "-c", SHELL, *command], environment)  # noqa: S606
        os._exit(127)
    try:
        yield Terminal(pid, master)
    finally:
        os.close(master)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

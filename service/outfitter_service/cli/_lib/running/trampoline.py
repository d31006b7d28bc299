"""Binds a process to the life of its parent and then executes a command: the last steps between fork and exec.

A process without threads forks (`child`). One with threads starts a new interpreter,
`python -I -S trampoline.py PARENT MASK COMMAND…`. PARENT is the pid of `outfitter`, MASK the signals (comma-separated
numbers) that were blocked before it blocked its own. It imports very little.
"""

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import NoReturn

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 126
NOT_FOUND = 127


def bind(parent: int, command: str) -> None:
    """Set the parent-death signal (prctl(2)): the kernel kills this process when the thread that forked it ends."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        why = os.strerror(ctypes.get_errno())
        fail(f"cannot bind {command} to the life of outfitter: PR_SET_PDEATHSIG of prctl(2): {why}", CANNOT_EXECUTE)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # the parent died before prctl


def become(command: list[str], environment: Mapping[str, str], mask: Iterable[int]) -> NoReturn:
    """Restore the signals, and execute `command`."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # this interpreter ignores them, the command must not
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        try:
            os.execvpe(command[0], command, environment)  # noqa: S606 - no shell is wanted
        except OSError as error:
            if error.errno != errno.ENOEXEC or not _is_text(error.filename):
                raise
            # as execvp(3): a script that names no interpreter
            os.execve("/bin/sh", ["/bin/sh", error.filename, *command[1:]], environment)  # noqa: S606
    except (FileNotFoundError, NotADirectoryError) as error:
        fail(f"{command[0]}: {error.strerror}", NOT_FOUND)
    except (OSError, ValueError) as error:
        fail(f"{command[0]}: {getattr(error, 'strerror', None) or error}", CANNOT_EXECUTE)


def _is_text(path: str) -> bool:
    """Whether a file may be a script, and not a program for another machine."""
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib is much to import
        return b"\0" not in file.read(256)


def fail(message: str, code: int) -> NoReturn:
    """Print the message, which may have any bytes, on standard error, and exit. It is dropped if nobody takes it."""
    import select

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    room = select.poll()
    room.register(2, select.POLLOUT)
    try:
        if room.poll(0):  # a full pipe would block
            os.write(2, f"outfitter: {message}\n".encode("utf-8", "backslashreplace"))
    finally:  # the disk may be full, or the reader gone
        os._exit(code)


def main(parent: str, mask: str, *command: str) -> NoReturn:
    bind(int(parent), command[0])
    become(list(command), os.environ, [int(number) for number in mask.split(",") if number])


if __name__ == "__main__":
    main(*sys.argv[1:])

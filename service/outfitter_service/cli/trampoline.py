"""Ties the command of `outfitter run` to the life of its parent, and becomes that command.

Run as a script of its own by the interpreter, `python -I -S trampoline.py PARENT MASK COMMAND…`: between fork and
exec in a process with threads nothing of this could be done safely. PARENT is the pid of `outfitter run`, MASK the
signals (comma-separated numbers) that were blocked before it blocked its own. It imports next to nothing.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 126
NOT_FOUND = 127


def main(parent: int, mask: str, command: list[str]) -> NoReturn:
    """Set the parent-death signal (prctl(2)), give signals back as they were, and execute `command`."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        fail(f"cannot bind {command[0]} to the life of outfitter: {os.strerror(ctypes.get_errno())}", CANNOT_EXECUTE)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # the parent died before the kernel knew that we go with it
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # this interpreter ignores them, the command must not
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [int(number) for number in mask.split(",") if number])
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except (FileNotFoundError, NotADirectoryError) as error:
        fail(f"{command[0]}: {error.strerror}", NOT_FOUND)
    except (OSError, ValueError) as error:
        fail(f"{command[0]}: {getattr(error, 'strerror', None) or error}", CANNOT_EXECUTE)


def fail(message: str, code: int) -> NoReturn:
    """Say it on standard error, whatever the bytes, and end."""
    os.write(2, f"outfitter: {message}\n".encode("utf-8", "backslashreplace"))
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])

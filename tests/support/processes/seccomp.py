"""A program under a filter of system calls: one of them is refused, as in a container with an old profile.

seccomp(2): the filter is four instructions of BPF. It needs no right, because the program can gain none (NO_NEW_PRIVS).
"""

from __future__ import annotations

import sys

PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434
"""Numbers of system calls, the same on all architectures."""

_FILTER = """
import ctypes, os, struct, sys
call, code, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
LOAD, EQUAL, RETURN, ERRNO, ALLOW = 0x20, 0x15, 0x06, 0x00050000, 0x7fff0000
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, call), (RETURN, 0, 0, ERRNO | code), (RETURN, 0, 0, ALLOW)]
packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(steps), ctypes.addressof(packed))
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
none = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
if none or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)):
    sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")
os.execvp(command[0], command)
"""


def refusing(call: int, code: int, *command: str) -> list[str]:
    """The command line of `command`, to whose system calls `call` the kernel answers with the error `code`."""
    return [sys.executable, "-c", _FILTER, str(call), str(code), *command]

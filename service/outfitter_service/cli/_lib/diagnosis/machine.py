"""Checks of the machine itself: descriptors, processes and the clock."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator

from outfitter_service.cli._lib.diagnosis.finding import Finding, Machine, Verdict

_STRUCT_TIMEX = 256
"""Bytes, more than the kernel's struct timex has."""
_TIME_ERROR = 5
"""What adjtimex(2) returns for a clock that nobody synchronizes."""
_ENOUGH_DESCRIPTORS = 4_096
"""From here on a manager watches thousands of owners by descriptors."""


def descriptors(_machine: Machine) -> Iterator[Finding]:
    """Whether a manager may open enough files."""
    from outfitter_service.runtime.liveness.descriptors import NEEDED

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _ENOUGH_DESCRIPTORS:
        verdict = Verdict.PROBLEM if hard < NEEDED else Verdict.WARNING
        remedy = f"raise the hard limit (ulimit -Hn, LimitNOFILE=) to {_ENOUGH_DESCRIPTORS} or more"
        yield Finding(verdict, f"a process may open {hard} files", remedy)


def pidfd(_machine: Machine) -> Iterator[Finding]:
    """Whether the kernel gives descriptors of processes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        remedy = "allow pidfd_open(2) in the sandbox, or use Linux 5.3 or later"
        yield Finding(Verdict.WARNING, f"pidfd_open(2) fails: {error.strerror}", remedy)


def processes(_machine: Machine) -> Iterator[Finding]:
    """Whether /proc shows the processes of other users."""
    from outfitter_service.runtime.liveness.process_table import start_seen

    if start_seen(1) is None:
        remedy = "mount /proc without hidepid, or set ProtectProc=default in the unit"
        yield Finding(Verdict.WARNING, "/proc does not show process 1", remedy)


def clock(_machine: Machine) -> Iterator[Finding]:
    """Whether somebody synchronizes the clock."""
    if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_STRUCT_TIMEX)) == _TIME_ERROR:
        yield Finding(
            Verdict.WARNING, "the kernel says that nobody synchronizes the clock", "run chrony or systemd-timesyncd"
        )

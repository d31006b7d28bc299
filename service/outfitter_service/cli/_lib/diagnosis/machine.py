"""Checks of the machine itself: the address to listen on, descriptors, processes and the clock."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator

import anyio

from outfitter_proto.bus import addresses
from outfitter_service.cli._lib.diagnosis.finding import UNCONFIGURED, Finding, Grade, Machine
from outfitter_service.config import inspect

_STRUCT_TIMEX = 256
"""Bytes, more than the kernel's struct timex has."""
_TIME_ERROR = 5
"""What adjtimex(2) returns for a clock that nobody synchronizes."""
_ENOUGH_DESCRIPTORS = 4_096
"""From here on a manager watches thousands of owners by descriptors."""


def address(machine: Machine) -> Iterator[Finding]:
    """Whether a manager can listen for metrics and probes. While this host's manager runs, the address is its own."""
    from outfitter_service.http.connections import bind
    from outfitter_service.runtime import machine_lock

    settings = inspect(machine.config, machine.given).settings
    if settings is None:
        yield UNCONFIGURED
        return
    if machine_lock.socket_name(settings.host) in machine_lock.holders():
        return
    node = addresses.listener(settings.http)
    try:
        for listener in anyio.run(bind, node.host, node.port):
            listener.close()
    except OSError as error:
        remedy = "end what listens there (`ss -ltnp` names it), or set another http"
        yield Finding(Grade.PROBLEM, f"http: cannot listen on {settings.http}: {error.strerror or error}", remedy)


def descriptors(_machine: Machine) -> Iterator[Finding]:
    """Whether a manager may open enough files."""
    from outfitter_service.runtime.liveness.descriptors import NEEDED

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _ENOUGH_DESCRIPTORS:
        verdict = Grade.PROBLEM if hard < NEEDED else Grade.WARNING
        remedy = f"raise the hard limit (ulimit -Hn, LimitNOFILE=) to {_ENOUGH_DESCRIPTORS} or more"
        yield Finding(verdict, f"a process may open {hard} files", remedy)


def pidfd(_machine: Machine) -> Iterator[Finding]:
    """Whether the kernel gives descriptors of processes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        remedy = "allow pidfd_open(2) in the sandbox, or use Linux 5.3 or later"
        yield Finding(Grade.WARNING, f"pidfd_open(2) fails: {error.strerror}", remedy)


def processes(_machine: Machine) -> Iterator[Finding]:
    """Whether /proc shows the processes of other users."""
    from outfitter_service.runtime.liveness.process_table import start_seen

    if start_seen(1) is None:
        remedy = "mount /proc without hidepid, or set ProtectProc=default in the unit"
        yield Finding(Grade.WARNING, "/proc does not show process 1", remedy)


def clock(_machine: Machine) -> Iterator[Finding]:
    """Whether somebody synchronizes the clock."""
    if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_STRUCT_TIMEX)) == _TIME_ERROR:
        yield Finding(
            Grade.WARNING,
            "the kernel says that nobody synchronizes the clock",
            "run chrony or systemd-timesyncd",
        )

"""The checks of `outfitter doctor`: each a function that yields what it finds wrong, and changes nothing."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

import anyio
from msgspec import Struct

from outfitter_service.config import Problem, Severity, connection, inspect

_STRUCT_TIMEX = 256
"""Bytes, more than the kernel's struct timex has."""
_TIME_ERROR = 5
"""What adjtimex(2) returns for a clock that nobody synchronizes."""
_ENOUGH_DESCRIPTORS = 4_096
"""From here on a manager watches thousands of owners by descriptors."""


class Verdict(StrEnum):
    """What a check says."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_CHECKED = "not checked"


class Finding(Struct, frozen=True):
    """One thing that a check found. `remedy`: what to do, in one sentence."""

    verdict: Verdict
    seen: str
    remedy: str


class Machine(Struct, frozen=True):
    """What is checked. `config`: the configuration file; None: the one that a manager would read. `given`: settings
    of the command line."""

    config: str | None
    given: dict[str, str]


Check = Callable[[Machine], Iterator[Finding]]


def configuration(machine: Machine) -> Iterator[Finding]:
    """Errors and warnings of `outfitter config check`."""
    yield from _of_problems(inspect(machine.config, machine.given).problems)


def drivers(machine: Machine) -> Iterator[Finding]:
    """What the drivers say of their settings and this machine."""
    from outfitter_service.cli._lib.driver_check import driver_problems

    yield from _of_problems(driver_problems(inspect(machine.config, machine.given)))


def _of_problems(problems: Iterable[Problem]) -> Iterator[Finding]:
    for problem in problems:
        if problem.severity is not Severity.INFO:
            verdict = Verdict.PROBLEM if problem.severity is Severity.ERROR else Verdict.WARNING
            place = f"correct {problem.key or 'it'} in {problem.file or 'the configuration'}"
            yield Finding(verdict, f"{problem.key}: {problem.problem}", problem.suggestion or place)


def topics(machine: Machine) -> Iterator[Finding]:
    """Whether the bus can be reached, and its topics are as they must be. On the embedded bus also its files' modes."""
    from outfitter_proto import topics as requirements
    from outfitter_proto.bus import MissingBusError
    from outfitter_service.query import ledger_view

    where = connection(machine.config, machine.given)

    async def differences() -> list[requirements.TopicDifference]:
        async with ledger_view.opened(where) as bus:
            return await requirements.check(bus, where.cluster, history=where.history)

    try:
        found = anyio.run(differences)
    except MissingBusError as error:
        yield Finding(Verdict.NOT_CHECKED, str(error), "start the manager or run `outfitter topics create`")
        return
    for item in found:
        verdict = Verdict.PROBLEM if item.fatal else Verdict.WARNING
        yield Finding(verdict, f"{item.topic}: {item.setting} is {item.found}, not {item.wanted}", item.remedy)


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


CHECKS: tuple[Check, ...] = (configuration, drivers, topics, descriptors, pidfd, processes, clock)

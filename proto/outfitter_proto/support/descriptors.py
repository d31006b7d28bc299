"""File descriptors: whether this process can open another one, and the error message if it cannot.

Without this module the lack of descriptors has misleading errors: SQLite cannot open its file, a client's broker is
away.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator

LACKING = frozenset({errno.EMFILE, errno.ENFILE})
"""The errors if a process, or the machine, may open no more files."""
SCARCE = LACKING | {errno.ENOMEM}
"""Errors of the kernel when it cannot open a descriptor now, but may do so later."""
REMEDY = "raise it with `ulimit -n`, LimitNOFILE= of a systemd unit or `--ulimit nofile=` of a container"


class TooFewDescriptorsError(RuntimeError):
    """The limit of open files is too low to begin. The message has the limit, the needed number and the remedy."""


def limits() -> str:
    """Both limits of this process, as text."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"RLIMIT_NOFILE: soft limit {_number(soft)}, hard limit {_number(hard)}"


def explain(code: int) -> str:
    """The meaning of EMFILE or ENFILE, with the remedy."""
    if code == errno.ENFILE:
        return "too many open files on this machine: raise its limit with `sysctl fs.file-max`, or end what holds them"
    return f"too many open files ({limits()}): end what holds them, or {REMEDY}"


def lacking(count: int = 1) -> int | None:
    """The error of opening `count` more descriptors; None if that is possible."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - an error must leave what is open
    except OSError as error:
        return error.errno if error.errno in LACKING else None
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None


def require(count: int, what: str) -> None:
    """Refuse to begin without `count` free descriptors. `what`: the part that needs them, for the message.

    Raises:
        TooFewDescriptorsError: there are fewer.
    """
    code = lacking(count)
    if code is not None:
        raise TooFewDescriptorsError(f"{what} needs at least {count} more: {explain(code)}")


def lack_behind(error: BaseException) -> int | None:
    """EMFILE or ENFILE if `error`, a member of its group or one of its causes has this code; else None."""
    return next((each.errno for each in _chain(error) if isinstance(each, OSError) and each.errno in LACKING), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__context__, each.__cause__]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions


def _number(limit: int) -> str:
    return "none" if limit == resource.RLIM_INFINITY else str(limit)

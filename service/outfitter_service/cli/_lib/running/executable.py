"""Checks that a command can be executed, before we wait for its devices.

It searches as execvpe(3): a name with a slash directly, any other name in the directories of PATH. The kernel's own
checks (a missing interpreter, an unknown format) still happen when the command starts.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping

from outfitter_service.cli._lib.running.trampoline import CANNOT_EXECUTE, NOT_FOUND
from outfitter_service.query.errors import OutfitterCliError

_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR})


def check(command: str, environment: Mapping[str, str]) -> None:
    """Return if a process with this environment can execute `command`.

    Raises:
        OutfitterCliError: it does not exist (exit code 127), or is not executable (126).
    """
    problems: list[int] = []
    for path in _candidates(command, environment):
        problem = _problem(path)
        if problem == 0:
            return
        if problem not in _NOT_THERE:
            problems.append(problem)
    if problems:
        raise OutfitterCliError(f"{command}: {os.strerror(problems[0])}", exit_code=CANNOT_EXECUTE)
    where = "" if "/" in command or not command else " in any directory of PATH"
    raise OutfitterCliError(f"{command or repr(command)}: not found{where}", exit_code=NOT_FOUND)


def _candidates(command: str, environment: Mapping[str, str]) -> Iterator[str]:
    if "/" in command:
        yield command
    elif command:
        for directory in os.get_exec_path(dict(environment)):
            yield os.path.join(directory, command)  # noqa: PTH118 - an empty entry is the working directory


def _problem(path: str) -> int:
    """Why `path` cannot be executed, as an error number; 0 if it can."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - as the kernel does
    except OSError as error:
        return error.errno or errno.ENOENT
    if stat.S_ISDIR(mode):
        return errno.EISDIR
    return 0 if stat.S_ISREG(mode) and os.access(path, os.X_OK, effective_ids=True) else errno.EACCES

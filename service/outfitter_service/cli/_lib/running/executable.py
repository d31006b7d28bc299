"""Checks that a command can be executed, before we wait for its devices.

It searches as execvpe(3): a name with a slash directly, any other name in the directories of PATH. Of the file it
looks at the first line only, as the kernel does: a missing interpreter, or nothing at all. Other formats are the
kernel's to judge when the command starts, because binfmt_misc may add some.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping

from outfitter_service.cli._lib.running.trampoline import CANNOT_EXECUTE, NOT_FOUND
from outfitter_service.query.errors import OutfitterCliError

_LONGEST_LINE = 255
"""Bytes of a file in which Linux looks for an interpreter: BINPRM_BUF_SIZE - 1."""
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
            _check_start(path, command)
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


def _check_start(path: str, command: str) -> None:
    """Check how an executable file begins.

    Raises:
        OutfitterCliError: it is empty (126), or names an interpreter that does not exist (127).
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as the kernel does
            line = file.read(_LONGEST_LINE).split(b"\n")[0]
    except OSError:
        return  # it may be executable and not readable
    if not line and os.path.getsize(path) == 0:  # noqa: PTH202
        raise OutfitterCliError(f"{command}: {os.strerror(errno.ENOEXEC)}: it is empty", exit_code=CANNOT_EXECUTE)
    interpreter = line[2:].split(maxsplit=1)[:1] if line.startswith(b"#!") else []
    if interpreter and not os.path.exists(interpreter[0]):  # noqa: PTH110
        name = os.fsdecode(interpreter[0])
        raise OutfitterCliError(f"{command}: its interpreter {name!r} does not exist", exit_code=NOT_FOUND)

"""What our programs do in an environment without the extra `service`, as a worker's mostly is.

That environment comes first on the PATH and so hides the programs of another one. So we hand over to the next one of
the same name on the PATH, and say what to install where there is none. Standard library only.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import NoReturn

NEEDED = ("click", "aiohttp", "cramjam", "prometheus_client", "rich", "ruamel", "structlog")
"""A module of each package of the extra. Some of them come with other packages, without the rest."""

PROGRAMS = ("outfitter", "outfitter-lease", "outfitter-lease-spark")

NOT_FOUND = 127
"""The exit code of shells for a command that they do not find."""

PASSED_OVER = "_OUTFITTER_PASSED_OVER"
"""The variable with the commands that have handed over, or have been tried: none of them is tried again."""


def missing() -> list[str]:
    """The modules of the extra that this environment lacks."""
    return [name for name in NEEDED if not _is_there(name)]


def hand_over(lacking: list[str]) -> NoReturn:
    """Replace this process by the next program of its name on the PATH. Else say what to install."""
    program = os.path.basename(sys.argv[0])  # noqa: PTH119 - pathlib costs more than all the rest
    if program in PROGRAMS:
        _replace(program, sys.argv[0])
    text = (
        f"outfitter: the command line is an extra, and {sys.prefix} has no {', '.join(lacking)}: "
        "install the extra `service` (service/install.md says how), or put another environment's outfitter "
        "on the PATH\n"
    )
    with suppress(OSError):  # closed or full: the exit code says it
        os.write(2, text.encode("utf-8", "backslashreplace"))
    raise SystemExit(NOT_FOUND)


def _replace(program: str, this: str) -> None:
    """Try each other one of this name on the PATH in turn. Returns if there is none that can be started."""
    import shutil

    passed_over = [os.path.realpath(this), *filter(None, os.environ.get(PASSED_OVER, "").split(os.pathsep))]
    for folder in os.get_exec_path():
        other = shutil.which(program, path=folder or os.curdir)
        if other is None or os.path.realpath(other) in passed_over:
            continue
        passed_over.append(os.path.realpath(other))
        environment = os.environ | {PASSED_OVER: os.pathsep.join(passed_over)}
        try:
            os.execve(other, [other, *sys.argv[1:]], environment)  # noqa: S606 - no shell, on purpose
        except OSError:  # its interpreter is gone, for example
            continue


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # somebody has put something else in its place
        return False

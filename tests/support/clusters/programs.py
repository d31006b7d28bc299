"""Programs that belong together and end together, and virtual environments for them."""

from __future__ import annotations

import fcntl
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Self

from support.documents import ROOT
from support.polling import until
from support.processes.ending import has_ended
from support.processes.tools import run_tool
from support.processes.worker_program import WorkerProgram

CACHE = ROOT / ".cache" / "clusters"
READY_WITHIN_S = 180.0
"""Seconds that several Java machines may take, on a busy machine."""


class ProgramError(Exception):
    """A program did not do what it was told to; the message ends with the tail of its log."""


def virtual_environment(name: str, requirements: Sequence[str], *options: str, with_outfitter: bool = False) -> Path:
    """The folder of a virtual environment with `requirements`, made once for each text of these.

    `options` go to pip. `with_outfitter`: the checkout itself is in it as well, as workers have it.
    """
    mark = sha256("\n".join([*requirements, *options, str(with_outfitter), sys.version]).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{mark}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / ".ready").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run_tool([sys.executable, "-m", "venv", str(folder)], CACHE)
        run_tool([*pip, *options, *requirements], CACHE)
        if with_outfitter:
            run_tool([*pip, "--editable", str(ROOT)], CACHE)
        (folder / ".ready").touch()
    return folder


def site_packages(environment: Path) -> Path:
    """Where the packages of a virtual environment are."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


class Programs:
    """A group of programs, within a `with`, at whose end all are ended and their output is printed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._started: list[WorkerProgram] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> WorkerProgram:
        """Start a program."""
        program = WorkerProgram(command, folder=self.folder, variables=variables)
        self._started.append(self._stack.enter_context(program))
        return program

    def wait_for_output(self, program: WorkerProgram, pattern: str) -> re.Match[str]:
        """Block until the program has printed something like `pattern`; return its first place."""

        def printed() -> re.Match[str] | None:
            return re.search(pattern, program.output(), re.MULTILINE)

        self.wait_for(lambda: printed() or has_ended(program.pid), pattern)
        if (found := printed()) is None:
            raise ProgramError(f"it ended without {pattern!r}\n{program.output()[-6000:]}")
        return found

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Block until `condition` holds, looking again and again; what it looks at is the programs' doing."""

        def outputs() -> str:
            return "\n---\n".join([what, *(program.output()[-6000:] for program in self._started)])

        until(condition, outputs, within_s=READY_WITHIN_S)

"""Programs that belong together and end together, and virtual environments for them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Self

from support.documents import ROOT

CACHE = ROOT / ".cache" / "clusters"
INSTALLED_WITHIN_S = 900.0
READY_WITHIN_S = 180.0
ENDED_WITHIN_S = 30.0


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
        _install([sys.executable, "-m", "venv", str(folder)])
        _install([*pip, *options, *requirements])
        if with_outfitter:
            _install([*pip, "--editable", str(ROOT)])
        (folder / ".ready").touch()
    return folder


def site_packages(environment: Path) -> Path:
    """Where the packages of a virtual environment are."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _install(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=INSTALLED_WITHIN_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise ProgramError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")


class Program:
    """A process in the foreground, in a session of its own, with its output in `log`."""

    def __init__(self, command: Sequence[str], *, log: Path, variables: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(variables),
                cwd=log.parent, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Its process id, also that of its process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        self._process.send_signal(number)

    def kill9(self) -> None:
        """End the process alone, as a crash would. Its children go on."""
        self._process.kill()
        self._process.wait(ENDED_WITHIN_S)

    def wait(self, timeout: float = ENDED_WITHIN_S) -> int:
        """Block until it has ended by itself; return its exit code."""
        return self._process.wait(timeout)

    def end(self) -> None:
        """End it and all that is still in its session. Repeatable."""
        for pid in [self.pid, *_session(self.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(ENDED_WITHIN_S)

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-6000:]


class Programs:
    """A group of programs, within a `with`: at its end all are ended, and the tails of their logs are printed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._started: list[Program] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for program in reversed(self._started):
            program.end()
        for program in self._started:
            print(f"--- {program.log}\n{program.tail()}")

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> Program:
        """Start a program whose log is called `name`."""
        log = self.folder / f"{name}-{len(self._started)}.log"
        program = Program(command, log=log, variables=variables)
        self._started.append(program)
        return program

    def wait_for(self, condition: Callable[[], object], what: str, *, timeout: float = READY_WITHIN_S) -> None:
        """Block until `condition` holds, looking again and again; what it looks at is the programs' doing."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {program.log}\n{program.tail()}" for program in self._started)
                raise ProgramError(f"{what} did not come within {timeout:g} s\n{tails}")
            time.sleep(0.05)


def _session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found

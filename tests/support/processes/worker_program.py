"""A worker in another language, as a process of its own: what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from support.polling import until

WITHIN_S = 60.0
"""Seconds that a program may take to print a line or to end: it may start a virtual machine on a busy machine."""


class WorkerProgram:
    """Runs `command` in `folder` with the environment `variables`, in a process group of its own, within a `with`."""

    def __init__(self, command: Sequence[str], *, folder: Path, variables: Mapping[str, str]) -> None:
        # SIGINT is ignored in whatever a shell runs in the background; env(1) becomes the command
        self._command = ["env", "--default-signal=INT", *command]
        self._folder = folder
        self._variables = dict(variables)
        self._output = tempfile.NamedTemporaryFile(prefix="worker-", suffix=".log")  # noqa: SIM115  (closed on exit)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, cwd=self._folder, env=self._variables, stdin=subprocess.DEVNULL, stdout=self._output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        print(f"--- {' '.join(self._command)}\n{self.output()}")
        self._output.close()

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self._running.pid

    def output(self) -> str:
        """All that it has printed, on both streams."""
        return Path(self._output.name).read_text(errors="replace")

    def lines(self, word: str) -> list[str]:
        """The lines that begin with `word`."""
        return [line for line in self.output().splitlines() if line.split(" ")[0].rstrip(":") == word]

    def wait_for(self, word: str) -> str:
        """Block until a line begins with `word`; return the line."""
        self._wait_until(lambda: bool(self.lines(word)), word)
        return self.lines(word)[0]

    def wait_for_text(self, text: str) -> None:
        """Block until it has printed `text`, anywhere in a line."""
        self._wait_until(lambda: text in self.output(), text)

    def signal(self, number: int) -> None:
        """Send a signal to the program alone."""
        self._running.send_signal(number)

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._running.poll() is None

    def wait(self, within_s: float = WITHIN_S) -> int:
        """Block until it has ended; return its exit code."""
        return self._running.wait(within_s)

    def kill(self) -> None:
        """End the program and all that it has started as a crash would. Repeatable."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running.pid, signal.SIGKILL)
        self._running.wait(WITHIN_S)

    def _wait_until(self, is_printed: Callable[[], bool], what: str) -> None:
        def told() -> str:
            return f"it did not print {what!r}, but:\n{self.output()}"

        until(lambda: is_printed() or not self.is_running(), told)
        assert is_printed(), told()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the program was not started")
        return self._process

"""Runs a program, and ends all processes that it started, with limits on time and output.

The program runs in a session of its own, so that all its processes can be killed together. The call blocks: `script`
gives it a thread. Standard library only, because `outfitter-gpu-discovery` must start quickly.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

INHERITED = frozenset(
    (
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TMPDIR", "TZ", "TERM", "LANG", "LANGUAGE",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX",
        "JAVA_HOME", "FLINK_HOME", "FLINK_CONF_DIR", "FLINK_LIB_DIR", "FLINK_LOG_DIR", "FLINK_PLUGINS_DIR",
        "SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_HOME", "HADOOP_CONF_DIR",
        "HOSTNAME", "NODE_NAME", "XDG_RUNTIME_DIR",
    )
)  # fmt: skip
"""Variables that programs of drivers inherit: to find programs, libraries and devices. No credentials."""
INHERITED_KINDS = ("LC_", "CUDA_", "NVIDIA_", "ROCM_", "ROCR_", "HIP_", "GPU_", "MIG_", "ZE_", "SLURM_")
"""Programs also inherit variables with these prefixes, except names that match `_SECRET`."""

_SECRET = re.compile("SECRET|PASSW|TOKEN|CREDENTIAL|KEY|JWT", re.IGNORECASE)
MAX_STDOUT_BYTES = 1024 * 1024
"""A line of device indexes is short. A program that prints more than this is broken."""

MAX_STDERR_BYTES = 64 * 1024
"""How many bytes of standard error are kept for messages; the rest is dropped."""

_AFTER_EXIT_SECONDS = 0.2
"""Seconds after the program's exit in which its child processes may still finish a line before they are killed."""

_END_SECONDS = 2.0
"""Seconds until killed processes must be gone. A process that hangs in the kernel is left behind."""

_STAT_BYTES = 4096
_POLL_SECONDS = 0.02


class Why(enum.Enum):
    """Why `run_to_end` stopped watching: the program exited, printed too much, or exceeded the time limit or was
    stopped."""

    EXITED = enum.auto()
    FLOODED = enum.auto()
    LATE = enum.auto()


class Run(NamedTuple):
    """How a program ended."""

    why: Why
    pid: int
    code: int | None
    """Its exit code. Negative: the signal that killed it. None: process `pid` was killed but hangs in the kernel."""
    stdout: bytes
    """Cut to its limit."""
    stderr: bytes
    """Cut to its limit."""
    left: Hung | None = None
    """What hangs of it, also where its first process has ended. None: nothing."""


class Hung:
    """Processes of a program that were killed and have not ended. Nobody can end them."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def pids(self) -> list[int]:
        """Those that have not ended yet."""
        first = [self._process.pid] if self._process.poll() is None else []
        return first or _members(self._process.pid)


def inherited(environ: Mapping[str, str], more: Collection[str] = ()) -> dict[str, str]:
    """The variables that a driver's program inherits: `INHERITED`, `INHERITED_KINDS` and `more`. An item of `more` is a
    name, or a prefix followed by `*`."""
    names = INHERITED.union(more)
    prefixes = tuple(name[:-1] for name in more if name.endswith("*"))
    return {
        name: value
        for name, value in environ.items()
        if name in names or name.startswith(prefixes) or (name.startswith(INHERITED_KINDS) and not _SECRET.search(name))
    }


def run_to_end(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None, stop: socket.socket | None = None
) -> Run:
    """Run a program for at most `timeout` seconds, or until `stop` is readable. Then kill what still runs in its
    session. `env` None: the variables that `inherited` returns.

    Raises:
        OSError, ValueError: it cannot be started.
    """
    process = _popen(command, env)
    stdout, stderr = bytearray(), bytearray()
    try:
        why = _watch(process, stop, timeout, stdout, stderr)
    finally:
        left = _end(process)
    return Run(why, process.pid, process.returncode, bytes(stdout), bytes(stderr), left)


def _popen(command: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=inherited(os.environ) if env is None else env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


def _watch(
    process: subprocess.Popen[bytes], stop: socket.socket | None, timeout: float, stdout: bytearray, stderr: bytearray
) -> Why:
    """Read the program's output into `stdout` and `stderr` until it has ended or must be killed."""
    deadline = time.monotonic() + timeout
    has_exited = False
    with selectors.DefaultSelector() as selector:
        for file, output, limit in (
            (process.stdout, stdout, MAX_STDOUT_BYTES + 1),
            (process.stderr, stderr, MAX_STDERR_BYTES),
        ):
            if file is not None:
                selector.register(file, selectors.EVENT_READ, (output, limit))
        if stop is not None:
            selector.register(stop, selectors.EVENT_READ)
        others = 0 if stop is None else 1
        while True:
            outputs_open = len(selector.get_map()) > others
            for key, _ in selector.select(_POLL_SECONDS if outputs_open else _POLL_SECONDS / 10):
                if key.fileobj is stop:
                    return Why.LATE
                output, limit = key.data
                chunk = os.read(key.fd, 65_536)
                output += chunk[: limit - len(output)]
                if not chunk:
                    selector.unregister(key.fileobj)
            if len(stdout) > MAX_STDOUT_BYTES:
                return Why.FLOODED
            if not has_exited and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                has_exited = True
                deadline = time.monotonic() + _AFTER_EXIT_SECONDS
                continue  # read the last output first
            is_late = time.monotonic() > deadline
            if has_exited and (is_late or len(selector.get_map()) == others):
                return Why.EXITED
            if is_late:
                return Why.LATE


def _end(process: subprocess.Popen[bytes]) -> Hung | None:
    """Kill the program's process group. Its leader was not reaped yet, so the kernel has not reused the number. Returns
    what does not end."""
    for output in (process.stdout, process.stderr):
        if output is not None:
            output.close()
    kill_group(process.pid)
    deadline = time.monotonic() + _END_SECONDS
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    hung = Hung(process)
    while hung.pids():
        if time.monotonic() > deadline:
            return hung
        time.sleep(_POLL_SECONDS)
    return None


def kill_group(group: int) -> None:
    """Kill all processes of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[int]:
    """The processes of a process group that have not ended."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass
    found: list[int] = []
    for name in os.listdir("/proc"):  # noqa: PTH208  pathlib costs start-up time here
        if name.isdigit():
            with contextlib.suppress(OSError):
                state, _, its_group = _stat(name).rpartition(b")")[2].split()[:3]
                if int(its_group) == group and state not in (b"Z", b"X"):
                    found.append(int(name))
    return found


def _stat(process: str) -> bytes:
    """The beginning of proc(5) `/proc/<pid>/stat`, which has all that we look for."""
    descriptor = os.open(f"/proc/{process}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STAT_BYTES)
    finally:
        os.close(descriptor)

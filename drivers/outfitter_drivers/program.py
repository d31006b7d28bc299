"""Running a program to its end, together with all that it started: bounded in time and in what it may print.

The program runs in a session of its own, so that it and whatever it started can be ended together. Blocking, and of
the standard library only: `script` gives it a thread, `outfitter-gpu-discovery` must be quick to start.
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
"""What programs that drivers start get of this process's environment: what finding programs, libraries and devices
takes, and nothing that lets them log in anywhere."""
INHERITED_KINDS = ("LC_", "CUDA_", "NVIDIA_", "ROCM_", "ROCR_", "HIP_", "GPU_", "MIG_", "ZE_", "SLURM_")
"""And what begins with one of these, but for what `_SECRET` finds in its name."""

_SECRET = re.compile("SECRET|PASSW|TOKEN|CREDENTIAL|KEY|JWT", re.IGNORECASE)
MAX_STDOUT_BYTES = 1024 * 1024
"""A line of device indexes is short; a program that prints more than this has gone wrong."""

MAX_STDERR_BYTES = 64 * 1024
"""How much of standard error is kept for messages; the rest is read and dropped."""

_AFTER_EXIT_SECONDS = 0.2
"""How long, after the program's exit, what it started may still finish a line before it is ended."""

_END_SECONDS = 2.0
"""How long ended processes may take to disappear; one that hangs in the kernel is left behind."""

_POLL_SECONDS = 0.02


class Why(enum.Enum):
    """Why a program is no longer watched: it ended, it printed too much, or it had to end."""

    EXITED = enum.auto()
    FLOODED = enum.auto()
    LATE = enum.auto()


class Run(NamedTuple):
    """How a program ended. `code` is its exit code (negative: the signal that killed it), None when it hangs in the
    kernel although it was killed, as process `pid`."""

    why: Why
    pid: int
    code: int | None
    stdout: bytes
    stderr: bytes


def inherited(environ: Mapping[str, str], more: Collection[str] = ()) -> dict[str, str]:
    """Of an environment what a driver's program gets: `INHERITED`, `INHERITED_KINDS` and `more`, which are names, or
    beginnings of names with a `*` behind them."""
    names = INHERITED.union(more)
    beginnings = tuple(name[:-1] for name in more if name.endswith("*"))
    return {
        name: value
        for name, value in environ.items()
        if name in names
        or name.startswith(beginnings)
        or (name.startswith(INHERITED_KINDS) and not _SECRET.search(name))
    }


def run_to_end(
    command: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    stop: socket.socket | None = None,
) -> Run:
    """Run a program at most `timeout` seconds, or until `stop` can be read; then whatever it started in its session and
    still runs is killed. `env` None: what `inherited` lets through.

    Raises:
        OSError, ValueError: it cannot be started.
    """
    process = _popen(command, env)
    stdout, stderr = bytearray(), bytearray()
    try:
        why = _watch(process, stop, timeout, stdout, stderr)
    finally:
        _end(process)
    return Run(why, process.pid, process.returncode, bytes(stdout), bytes(stderr))


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
    """Read what the program prints until it has ended, or must be."""
    deadline = time.monotonic() + timeout
    has_exited = False
    with selectors.DefaultSelector() as selector:
        for file, kept, limit in (
            (process.stdout, stdout, MAX_STDOUT_BYTES + 1),
            (process.stderr, stderr, MAX_STDERR_BYTES),
        ):
            if file is not None:
                selector.register(file, selectors.EVENT_READ, (kept, limit))
        if stop is not None:
            selector.register(stop, selectors.EVENT_READ)
        others = 0 if stop is None else 1
        while True:
            outputs_open = len(selector.get_map()) > others
            for key, _ in selector.select(_POLL_SECONDS if outputs_open else _POLL_SECONDS / 10):
                if key.fileobj is stop:
                    return Why.LATE
                kept, limit = key.data
                chunk = os.read(key.fd, 65_536)
                kept += chunk[: limit - len(kept)]
                if not chunk:
                    selector.unregister(key.fileobj)
            if len(stdout) > MAX_STDOUT_BYTES:
                return Why.FLOODED
            if not has_exited and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                has_exited = True
                deadline = time.monotonic() + _AFTER_EXIT_SECONDS
                continue  # what it said last is read before that can be too late
            is_late = time.monotonic() > deadline
            if has_exited and (is_late or len(selector.get_map()) == others):
                return Why.EXITED
            if is_late:
                return Why.LATE


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all of the program's process group. Its leader has not been waited for, so the number is still its own."""
    for output in (process.stdout, process.stderr):
        if output is not None:
            output.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)

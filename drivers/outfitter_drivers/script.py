"""Runs a discovery script to its end and parses its output. The drivers interpret exit code and output.

Each run waits in a thread of its own (`program`). The thread sees the script's exit before the kernel can reuse the
number of its process group.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint_if_cancelled

from outfitter_drivers.api import PermanentDriverError, TemporaryDriverError
from outfitter_drivers.program import MAX_STDOUT_BYTES, Hung, Run, Why, run_to_end
from outfitter_drivers.support.device_name import hides_something, is_blank, is_message

logger = logging.getLogger("outfitter.drivers")

_FIRST_LINE_BYTES = 255  # in which Linux looks for an interpreter: BINPRM_BUF_SIZE - 1
_LOG_CHARACTERS = 300
_JAVA_BLANKS = "".join(map(chr, range(0x21)))  # what Java's String.trim cuts
_LINE_END = re.compile(r"\r\n|\r|\n")
_NO_TEXT = re.compile("[\0\ufeff\ufffd\udc80-\udcff]")
"""What text does not have: a NUL, a byte order mark, a replacement character, and bytes that are not UTF-8, as Python
decodes them."""
_SPARK_OBJECT = re.compile(r'^\s*\{.*"addresses"', re.MULTILINE)


class ScriptOutcome(NamedTuple):
    """How a script ended: its exit code (negative: the signal that killed it) and its output."""

    code: int
    stdout: bytes
    stderr: bytes

    def __str__(self) -> str:
        if self.code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-self.code).name}{self._output()}"
            return f"was killed by signal {-self.code}{self._output()}"
        return f"ended with exit code {self.code}{self._output()}"

    def _output(self) -> str:
        return f"; stdout: {shortened(self.stdout)}; stderr: {shortened(self.stderr)}"


class HangingError(TemporaryDriverError):
    """An earlier call of this program was killed, but still hangs in the kernel. No other one is started meanwhile."""


_hung: dict[str, tuple[Hung, str]] = {}
"""By program, or by what its caller calls it: its last call that hangs, and since when."""


def _hanging(name: str) -> str | None:
    """Which process of the call hangs; None: none."""
    if name not in _hung:
        return None
    hung, since = _hung[name]
    if pids := hung.pids():
        return f"process {pids[0]} of {name} has hung since {since}: it was killed, but the kernel does not end it"
    _hung.pop(name, None)
    return None


async def run_script(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None, hangs_as: str | None = None
) -> ScriptOutcome:
    """Run a program for at most `timeout` seconds, then kill its whole session. Cancellation kills it as well.

    `env` None: the part of this process's environment that `program.inherited` returns. `hangs_as`: while a call hangs
    in the kernel, no other one of this name is started; None: of this program.

    Raises:
        PermanentDriverError: the program cannot be executed, or printed more than 1 MiB.
        HangingError: an earlier call, or this one, hangs in the kernel.
        TemporaryDriverError: the program did not end in time, or the machine cannot start more processes.
    """
    ours, theirs = socket.socketpair()

    async def stop_at_cancellation(*, task_status: TaskStatus[None]) -> None:
        try:
            task_status.started()
            await anyio.sleep_forever()
        finally:
            ours.close()

    with ours, theirs:
        async with anyio.create_task_group() as tasks:
            await tasks.start(stop_at_cancellation)
            outcome = await anyio.to_thread.run_sync(_run, tuple(command), timeout, env, theirs, hangs_as)
            tasks.cancel_scope.cancel()
    await checkpoint_if_cancelled()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def parse_indexes(stdout: bytes) -> list[str]:
    """The device indexes in a discovery script's standard output, in its order, each once, without invisible names.

    The first line that is not blank has the indexes, separated by commas, as for Flink. Or the output starts with an
    object `{"name": …, "addresses": […]}` as in Spark's scripts, perhaps over several lines. What follows either form
    may be anything but a NUL.

    Raises:
        PermanentDriverError: the output is no text or a malformed object, or a name has an invisible sign.
        TemporaryDriverError: it is a message. A script may print one, such as that of a failing nvidia-smi, and exit
            with code 0.
    """
    text = stdout.decode("utf-8", "surrogateescape")
    lines = [line for line in _LINE_END.split(text) if _NO_TEXT.search(line) or not is_blank(line)]
    if not lines:
        return []
    if wrong := _NO_TEXT.search(lines[0]) or re.search("\0", text):
        raise _printed(wrong)
    if lines[0].lstrip(_JAVA_BLANKS).startswith("{"):
        words, rest = _spark_addresses(lines)
    else:
        words, rest = lines[0].split(","), "\n".join(lines[1:])
    indexes = list(dict.fromkeys(index for word in words if not is_blank(index := word.strip())))
    if hiding := next(filter(hides_something, indexes), None):
        raise PermanentDriverError(
            f"the discovery script named a device {hiding[:80]!a}, with an invisible sign in it; valid are "
            "letters, digits and signs"
        )
    _refuse_messages(indexes, rest, text)
    if rest:
        logger.warning("the discovery script printed more than one line; ignored: %s", shortened(rest))
    return indexes


def _refuse_messages(indexes: Sequence[str], rest: str, text: str) -> None:
    """Refuse all names if one is a message, or if a greeting stands before Spark's object."""
    wrong = next(filter(is_message, indexes), None)
    if wrong is None and not text.lstrip().startswith("{") and _SPARK_OBJECT.search(rest):
        wrong = ",".join(indexes)
    if wrong is not None:
        raise TemporaryDriverError(
            f"the discovery script named no device but {shortened(wrong)!r}; valid are indexes, UUIDs, paths and names "
            f"without blanks, separated by commas; it printed: {shortened(text)}"
        )


def _printed(wrong: re.Match[str]) -> PermanentDriverError:
    """The error that shows the bytes where the output is no text."""
    name = {"\0": "a NUL", "\ufeff": "a byte order mark"}.get(wrong[0], "bytes that are not UTF-8")
    around = wrong.string[max(0, wrong.start() - 40) : wrong.start() + 40].encode("utf-8", "surrogateescape")
    return PermanentDriverError(f"the discovery script printed {name}: {around!r}")


def shortened(output: bytes | str) -> str:
    """The output as one short line for a log."""
    text = output.decode("utf-8", "replace") if isinstance(output, bytes) else output
    line = " | ".join(part for part in text[: _LOG_CHARACTERS * 4].split("\n") if part.strip())
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)
    if len(shown) > _LOG_CHARACTERS or len(text) > _LOG_CHARACTERS * 4:
        return f"{shown[:_LOG_CHARACTERS]}… ({len(output)} in all)"
    return shown or "nothing"


def _spark_addresses(lines: Sequence[str]) -> tuple[list[str], str]:
    """The addresses of Spark's object, and what follows it. As in Spark, a whole number is an address, too."""
    text = "\n".join(lines).lstrip(_JAVA_BLANKS)
    with contextlib.suppress(ValueError, RecursionError):
        printed, end = json.JSONDecoder().raw_decode(text)
        addresses = printed.get("addresses")
        if isinstance(addresses, list) and all(_is_address(address) for address in addresses):
            return [str(address) for address in addresses], text[end:].strip()
    raise PermanentDriverError(
        f'the discovery script printed {shortened(lines[0])}; valid is {{"name": "gpu", "addresses": ["0", "1"]}}'
    )


def _is_address(address: object) -> bool:
    if isinstance(address, str):
        return not any(sign in address for sign in ("\0", "\ufffd", "\ufeff"))
    return isinstance(address, int) and not isinstance(address, bool)


# --- the thread's side ------------------------------------------------------------------------------------


def _run(
    command: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None,
    stop: socket.socket,
    hangs_as: str | None,
) -> ScriptOutcome | PermanentDriverError | TemporaryDriverError:
    name = command[0]
    call = name if hangs_as is None else hangs_as
    if hangs := _hanging(call):
        return HangingError(hangs)
    try:
        run = _start(command, timeout, env, stop)
    except BlockingIOError as error:
        return TemporaryDriverError(f"cannot start {name}: {error.strerror}")
    except (OSError, ValueError) as error:
        return PermanentDriverError(f"cannot run {name}: {_why(name, error)}")
    if run.left is not None:
        _hung[call] = run.left, time.strftime("%Y-%m-%d %H:%M:%S")
        pids = run.left.pids() or [run.pid]
        logger.error("process %d of a discovery script does not end although it was killed", pids[0])
    if run.code is None:
        return HangingError(_hanging(call) or f"process {run.pid} of {name} has ended only now")
    if run.why is Why.EXITED:
        return ScriptOutcome(run.code, run.stdout, run.stderr)
    outputs = f"stdout: {shortened(run.stdout)}; stderr: {shortened(run.stderr)}"
    if run.why is Why.FLOODED:
        return PermanentDriverError(f"{name} printed more than {MAX_STDOUT_BYTES} bytes and was killed; {outputs}")
    return TemporaryDriverError(f"{name} did not end within {timeout:g} s and was killed; {outputs}")


def _why(name: str, error: OSError | ValueError) -> str:
    """The error's words. If a script's interpreter is missing, the line that names it."""
    if isinstance(error, FileNotFoundError):
        with contextlib.suppress(OSError), open(name, "rb") as program:  # noqa: PTH123 - the name may be any text
            line = program.readline(_FIRST_LINE_BYTES).rstrip(b"\n")
            if line.startswith(b"#!"):
                return f"its interpreter, or what that needs, does not exist; its first line is {line!r}"
            return "the loader that it needs does not exist"
    return getattr(error, "strerror", None) or str(error)


def _start(command: Sequence[str], timeout: float, env: Mapping[str, str] | None, stop: socket.socket) -> Run:
    """Run the program. A script without `#!` runs in /bin/sh, as with execvp(3) and Java's process builder (Flink)."""
    try:
        return run_to_end(command, timeout=timeout, env=env, stop=stop)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        return run_to_end(("/bin/sh", *command), timeout=timeout, env=env, stop=stop)

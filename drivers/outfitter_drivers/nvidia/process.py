"""The manager's side of the NVML process: starts it, asks it within a deadline, and replaces it.

| what happens | then |
|---|---|
| it does not answer in time | it is killed, and the next request starts another one |
| it was killed and hangs in the kernel | no other one is started before it has ended |
| NVML says 9, 12, 18, or 999 after a good start | the next request starts another one, which loads anew |
| it let go of the GPUs for somebody | no other one is started before that process has ended |
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from outfitter_drivers.api import PermanentDriverError, TemporaryDriverError
from outfitter_drivers.nvidia import codes
from outfitter_drivers.nvidia.protocol import (
    LONGEST_WAIT_S,
    MAX_ANSWER_BYTES,
    Answer,
    Failure,
    Request,
    decode_answer,
    encoded,
)
from outfitter_drivers.nvidia.snapshot import Event, Snapshot
from outfitter_drivers.program import inherited
from outfitter_drivers.script import HangingError, shortened

COMMAND = (sys.executable, "-P", "-m", "outfitter_drivers.nvidia.child")

FIRST_ANSWER = 3
"""How many times longer than others the first answer may take: NVML initialises each GPU that nobody has open."""

RELEASED_POLL_S = 0.2
"""Seconds after which it is looked again whether somebody still needs the GPUs."""
_END_S = 2.0
"""Seconds until a killed process must be gone."""
_AT_ONCE = frozenset((codes.DRIVER_NOT_LOADED, codes.LIBRARY_NOT_FOUND, codes.VERSION_MISMATCH))
_AFTER_A_GOOD_START = frozenset((codes.UNKNOWN, codes.GPU_IS_LOST))


class UnusableError(PermanentDriverError):
    """NVML cannot be used on this machine: its library, or the Python package for it, is not there or the wrong one."""


class ReleasedError(TemporaryDriverError):
    """Nobody has NVML open, because somebody needs the GPUs: `outfitter nvidia release`."""


class NvmlProcess:
    """At most one process with NVML, and at most one that hangs. `timeout`: seconds for an answer."""

    def __init__(self, command: Sequence[str] = COMMAND, *, timeout: float = 10.0) -> None:
        self._command = tuple(command)
        self.timeout = timeout
        self._turn = anyio.Lock()
        self._child: _Child | None = None
        self._hung: tuple[_Child, str] | None = None
        self._released: tuple[int, int] | None = None
        self._has_let_go = False
        self.starts = 0
        """How often a process was started."""
        self.releases = 0
        """How often the GPUs were let go of. What was known of their faults may be mended since."""

    @property
    def pid(self) -> int | None:
        """The process that has NVML open. None: there is none."""
        return None if self._child is None else self._child.process.pid

    async def look(self) -> Snapshot:
        """All GPUs.

        Raises:
            UnusableError, ReleasedError, HangingError: see there.
            TemporaryDriverError: NVML fails, or does not answer in time.
        """
        answer = await self._ask("look")
        return answer.snapshot or Snapshot()

    async def wait(self, seconds: float) -> Sequence[Event]:
        """What happens within `seconds` (at most `LONGEST_WAIT_S`), as soon as it does. Raises as `look`."""
        answer = await self._ask("wait", min(seconds, LONGEST_WAIT_S))
        return answer.events or ()

    async def renew(self) -> None:
        """Have the next request start another process."""
        async with self._turn:
            await self._end()

    async def aclose(self) -> None:
        await self.renew()
        self._forget_release()

    async def _ask(self, what: str, seconds: float = 0.0) -> Answer:
        async with self._turn:
            child = await self._running()
            limit = (self.timeout if child.has_answered else FIRST_ANSWER * self.timeout) + seconds
            answer: Answer | None = None
            with anyio.move_on_after(limit):
                try:
                    answer = await child.ask(what, seconds)
                except (anyio.IncompleteRead, anyio.ClosedResourceError, OSError) as error:
                    raise TemporaryDriverError(f"the NVML process {await self._ended()}") from error
                except (ValueError, anyio.DelimiterNotFound) as error:
                    await self._end()
                    raise TemporaryDriverError(f"the NVML process wrote no answer: {shortened(str(error))}") from error
            if answer is None:
                await self._end()
                raise TemporaryDriverError(f"NVML did not answer within {limit:g} s; its process was killed")
            if answer.released_for is not None:
                await self._let_go(answer.released_for)
            if answer.failure is not None:
                raise await self._refused(answer.failure, child)
            child.has_answered = True
            return answer

    async def _running(self) -> _Child:
        if self._hung is not None:
            child, since = self._hung
            if child.process.returncode is None:
                raise HangingError(
                    f"the NVML process {child.process.pid} has hung since {since}: it was killed, but the kernel does "
                    "not end it"
                )
            self._hung = None
        self._raise_if_released()
        if self._child is None:
            self._child = await self._start()
        return self._child

    async def _start(self) -> _Child:
        self.starts += 1
        try:
            process = await anyio.open_process(
                self._command, stderr=subprocess.DEVNULL, env=inherited(os.environ), start_new_session=True
            )
        except OSError as error:
            raise TemporaryDriverError(f"cannot start the NVML process: {error.strerror}") from error
        return _Child(process)

    async def _refused(self, failure: Failure, child: _Child) -> Exception:
        """The error of a request that NVML could not answer, after the process was ended if only another one can."""
        words = failure.words if failure.code is None else codes.in_words(failure.code)
        if (
            failure.code in _AT_ONCE
            or failure.is_unusable
            or (failure.code in _AFTER_A_GOOD_START and child.has_answered)
        ):
            await self._end()
        if failure.is_unusable:
            return UnusableError(f"NVML cannot be used: {words}")
        return TemporaryDriverError(f"NVML: {words}")

    async def _let_go(self, sender: int) -> None:
        self.releases += 1
        self._has_let_go = True
        await self._end()
        with suppress(OSError):
            self._released = sender, os.pidfd_open(sender)
        self._raise_if_released()
        raise ReleasedError(f"the GPUs were let go of for process {sender}, which has ended")

    async def until_release_ends(self) -> bool:
        """Wait while somebody lives for whom the GPUs were let go of. Returns whether they were since this was asked
        last: whoever it was may have ended meanwhile."""
        has_let_go, self._has_let_go = self._has_let_go, False
        while self._is_released():  # noqa: ASYNC110  until a process has ended
            await anyio.sleep(RELEASED_POLL_S)
        return has_let_go

    def _is_released(self) -> bool:
        return self._released is not None and not _has_ended(self._released[1])

    def _raise_if_released(self) -> None:
        if self._released is None:
            return
        sender, _ = self._released
        if self._is_released():
            raise ReleasedError(f"the GPUs were let go of for process {sender} (outfitter nvidia release)")
        self._forget_release()

    def _forget_release(self) -> None:
        if self._released is not None:
            os.close(self._released[1])
            self._released = None

    async def _ended(self) -> str:
        """How the process ended, which it did by itself."""
        child = self._child
        if child is not None:
            with anyio.move_on_after(_END_S):
                await child.process.wait()
        await self._end()
        code = None if child is None else child.process.returncode
        return "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    async def _end(self) -> None:
        """End the process, if there is one. One that does not end is remembered."""
        child, self._child = self._child, None
        if child is None:
            return
        with anyio.CancelScope(shield=True):
            if not await child.ended():
                self._hung = child, time.strftime("%Y-%m-%d %H:%M:%S")


class _Child:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.has_answered = False
        self._last = 0
        if process.stdout is None:
            raise TemporaryDriverError("the NVML process has no output")
        self._output = BufferedByteReceiveStream(process.stdout)

    async def ask(self, what: str, seconds: float) -> Answer:
        self._last += 1
        number = self._last
        if self.process.stdin is not None:
            request = Request(id=number, do="wait" if what == "wait" else "look", seconds=seconds)
            with suppress(anyio.BrokenResourceError, OSError):  # it has ended: read its last words
                await self.process.stdin.send(encoded(request))
        while True:
            answer = decode_answer(await self._output.receive_until(b"\n", MAX_ANSWER_BYTES))
            if answer.id == number or answer.released_for is not None:
                return answer

    async def ended(self) -> bool:
        """Close its input, kill it, and say whether it has ended."""
        if self.process.stdin is not None:
            with suppress(anyio.BrokenResourceError, OSError):
                await self.process.stdin.aclose()
        kill(self.process)
        with anyio.move_on_after(_END_S):
            await self.process.wait()
        if self.process.returncode is None:
            return False
        await self.process.aclose()
        return True


def _has_ended(pidfd: int) -> bool:
    """Whether a process has ended. A manager with many files open has numbers that select(2) does not take."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()

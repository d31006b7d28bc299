"""Processes that the command of `outfitter run` leaves behind: we adopt them, and wait until they have ended.

Their devices must not be lent again while they live. As a child subreaper (prctl(2)) this process becomes the parent of
every descendant whose own parent ends, however it was started. So no descendant is left once it has no child.

Descendants from before are not the command's: a shell script that executes `outfitter run` may have children.

/proc may be another PID namespace's, as with `unshare --pid` alone. So pids that come from /proc name a process there
only, never in a system call.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio

from outfitter_proto.support.printable import printable
from outfitter_proto.support.processes import read_at_most, read_stat, start_ticks
from outfitter_service.cli._lib.errors import warn
from outfitter_service.query.errors import OutfitterCliError

PR_SET_CHILD_SUBREAPER = 36
SAID_AFTER_S = 2.0
"""Seconds until we say for whom we wait."""
SAID_AGAIN_AFTER_S = 600.0
"""Seconds until we say it again."""
KILLED_EVERY_S = 0.2
"""Seconds between two rounds of SIGKILL: a process may have started another one meanwhile."""
MOST_NAMED = 5
LONGEST_COMMAND = 60
"""Most processes that a message names, and most characters of each command."""
MOST_OF_COMMAND_LINE = 4096
"""Most bytes of a command line that are read."""


class LeftBehind:
    """The descendants of this process: the command while it runs, and those that it leaves behind."""

    def __init__(self, command: int, earlier: Mapping[int, int], *, kill: bool, kill_after: float) -> None:
        """`command`: the command's pid. `earlier`: the descendants from before, which do not count, as `become_reaper`
        returns them. `kill`: end the descendants when the command has ended, in place of waiting. `kill_after`: most
        seconds between SIGTERM and SIGKILL.
        """
        self._command = command
        self._earlier = earlier
        self._kill = kill
        self._kill_after = kill_after
        self._must_end = anyio.Event()
        self._must_be_killed = anyio.Event()
        self._none_left = anyio.Event()

    def includes(self, pid: int) -> bool:
        """Whether a process, named by its pid in /proc, is one of them."""
        return pid in _descendants(self._earlier)

    def end(self) -> None:
        """Send SIGTERM to all of them, the command as well, and SIGKILL after `kill_after` seconds."""
        self._must_end.set()

    def kill(self) -> None:
        """Send SIGKILL to all of them that `end` has not ended yet, now."""
        self._must_be_killed.set()

    async def send_signals(self) -> None:
        """Send what `end` and `kill` ask for. It never returns: cancel it when none is left."""
        await self._must_end.wait()
        self._send(signal.SIGTERM)
        with anyio.move_on_after(self._kill_after):
            await self._must_be_killed.wait()
        while True:
            self._send(signal.SIGKILL)
            await anyio.sleep(KILLED_EVERY_S)

    def reap(self) -> None:
        """Reap those that have ended. `SIGCHLD` tells when."""
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == self._command:
                    return  # `Child.wait` reaps the command, and then the next call of `reap` the others
                os.waitpid(ended.si_pid, 0)
            if self._command or not self._earlier or _descendants(self._earlier):
                return  # a child of ours that ends meanwhile is among them, and `SIGCHLD` comes again
        self._none_left.set()

    async def wait(self, command: str) -> None:
        """Wait until none is left, and say after a while who is. The command, whose name this is, has been reaped."""
        self._command = 0
        if self._kill:
            self.end()
        self.reap()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._say, command)
            await self._none_left.wait()
            tasks.cancel_scope.cancel()

    async def _say(self, command: str) -> None:
        await anyio.sleep(SAID_AFTER_S)
        while True:
            if descendants := _descendants(self._earlier):
                named = ", ".join(f"{pid} ({_command_line(pid)})" for pid in descendants[:MOST_NAMED])
                more = f" and {len(descendants) - MOST_NAMED} more" if len(descendants) > MOST_NAMED else ""
                warn(
                    f"{command} has ended; keeps the devices until what it left behind has ended, too: {named}{more} "
                    "(Ctrl-C or SIGTERM ends it)"
                )
            await anyio.sleep(SAID_AGAIN_AFTER_S)

    def _send(self, number: signal.Signals) -> None:
        descendants = _descendants(self._earlier)
        ours = {_pid_in_proc(), *descendants}
        for pid in descendants:
            with suppress(OSError, ValueError):
                folder = os.open(f"/proc/{pid}", os.O_DIRECTORY)  # names the process as a pidfd does
                try:
                    # else another process has its pid; its parent may have died of this signal, which gave it another
                    if read_stat(pid, 4) in ours:
                        signal.pidfd_send_signal(folder, number)
                finally:
                    os.close(folder)


def become_reaper() -> dict[int, int]:
    """Become the parent of descendants whose parent ends. Call it before the command's process exists.

    Returns the descendants from before: their start ticks (proc(5)), by pid.

    Raises:
        OSError: the kernel refuses.
        OutfitterCliError: /proc does not show this process, and so none of its descendants; or the kernel sends them
            no signal.
    """
    try:
        own = os.open(f"/proc/{_pid_in_proc()}", os.O_DIRECTORY)
    except OSError as error:
        raise OutfitterCliError(
            "/proc does not show this process, so nothing could end what the command starts: mount it "
            "(`mount -t proc proc /proc`), or pass it to the container"
        ) from error
    _check_signals(own)
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "PR_SET_CHILD_SUBREAPER")
    with suppress(ChildProcessError):  # the usual case; a search of /proc takes longer
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return {pid: ticks for pid in _descendants({}) if (ticks := start_ticks(pid)) is not None}
    return {}


def _check_signals(process: int) -> None:
    """Close a folder in /proc, after a look whether a signal can be sent to its process."""
    try:
        signal.pidfd_send_signal(process, 0)
    except OSError as error:
        raise OutfitterCliError(
            f"nothing could end what the command starts: pidfd_send_signal(2): {error.strerror} (it needs Linux 5.1, "
            "and the seccomp profile of a container may refuse it)"
        ) from error
    finally:
        os.close(process)


def _descendants(earlier: Mapping[int, int]) -> list[int]:
    """The pids of all descendants, those who are nearer first; without those of `earlier` and theirs."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):  # noqa: PTH208 - a path is slower
        if name.isdecimal():
            with suppress(OSError, ValueError):
                children[read_stat(int(name), 4)].append(int(name))
    found: set[int] = set()
    queue = [_pid_in_proc()]
    for parent in queue:
        new = [pid for pid in children[parent] if pid not in found and not _is_among(earlier, pid)]
        found |= set(new)
        queue += new
    return queue[1:]


def _pid_in_proc() -> int:
    return int(Path("/proc/self").readlink().name)


def _is_among(earlier: Mapping[int, int], pid: int) -> bool:
    return pid in earlier and start_ticks(pid) == earlier[pid]  # else it is another process, which has the pid now


def _command_line(pid: int) -> str:
    with suppress(OSError):
        words = read_at_most(f"/proc/{pid}/cmdline", MOST_OF_COMMAND_LINE).replace(b"\0", b" ").strip()
        words = words or read_at_most(f"/proc/{pid}/comm", MOST_OF_COMMAND_LINE).strip()
        text = printable(words.decode("utf-8", "backslashreplace"))
        return text if len(text) <= LONGEST_COMMAND else f"{text[: LONGEST_COMMAND - 1]}…"
    return "?"

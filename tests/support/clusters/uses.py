"""Who uses which device, told by the processes that use it: the ledger is not asked.

A program begins a use, goes on with beats, and ends it. All of them append lines to one file. Appends have one order,
so nobody compares clocks. A use of a process lasts until it says so, or until the process is dead. Whoever begins looks
whether an earlier user of the same device is still alive, and writes that down as well.

It needs Python alone, because it runs inside other systems' workers. Programs in other languages start it:
`python uses.py FILE DEVICE PID` begins a use of the process PID.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

BEAT_S = 0.02
"""Seconds between two beats of a use."""


class Process(NamedTuple):
    """One process for all time: `ticks` is when it began, proc(5) `starttime`."""

    pid: int
    ticks: int

    @staticmethod
    def of(pid: int) -> Process:
        """The process that has this pid now. Raises OSError if there is none."""
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return Process(pid, int(stat.rpartition(")")[2].split()[19]))

    def is_alive(self) -> bool:
        """Whether it can still touch a device: a zombie cannot."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            return Process.of(self.pid) == self and not select.select([descriptor], [], [], 0)[0]
        except OSError:
            return False
        finally:
            os.close(descriptor)


class Use:
    """The use of one device by one process, or by one object in it: `name` tells the objects of a process apart."""

    def __init__(self, file: str | Path, device: str, *, pid: int | None = None, name: str = "") -> None:
        self._file = Path(file)
        process = Process.of(pid or os.getpid())
        self._said = {"pid": process.pid, "ticks": process.ticks, "name": name, "device": device}
        # its own line first: of two that begin at once, at least the second one sees the other
        self._say("begin")
        for other in _users_before(self._file, self._said):
            self._say("overlap", other=other)

    def beat(self) -> None:
        """Say that the use goes on."""
        self._say("beat")

    def end(self) -> None:
        """Say that the use is over, while the process lives."""
        self._say("end")

    def _say(self, what: str, **more: object) -> None:
        line = {"what": what, "at": time.monotonic(), "thread": threading.get_ident(), **self._said, **more}
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)


def lines(file: Path) -> list[dict[str, Any]]:
    """All that was said so far. A line that is being written does not count yet."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]


def overlaps(file: Path) -> list[str]:
    """Each time at which two users had one device: seen by a beginner, or a beat after somebody else's beginning."""
    found, now = [], dict[str, tuple[object, ...]]()
    for said in lines(file):
        user, device = _user(said), str(said["device"])
        if said["what"] == "overlap":
            found.append(f"{user} began with {device} while {_user(said['other'])} had it")
        elif said["what"] == "begin":
            now[device] = user
        elif said["what"] == "beat" and now.get(device) != user:
            found.append(f"{user} went on with {device} after {now.get(device)} had begun")
    return found


class Span(NamedTuple):
    """Who used a device from when until its last word. Times are those of `time.monotonic`."""

    device: str
    pid: int
    name: str
    begun: float
    last: float


def spans(file: Path) -> list[Span]:
    """All uses so far, by their beginning."""
    found: dict[tuple[object, ...], Span] = {}
    for said in lines(file):
        key = (said["device"], *_user(said))
        if said["what"] == "begin":
            found[key] = Span(said["device"], said["pid"], said["name"], said["at"], said["at"])
        else:
            found[key] = found[key]._replace(last=said["at"])
    return list(found.values())


def longest_away(file: Path) -> float:
    """The longest time between a user's last word and the next user's beginning, in seconds. A user that was killed
    has lived up to one beat longer than its last word."""
    longest, last = 0.0, dict[str, float]()
    for span in spans(file):
        longest = max(longest, span.begun - last.get(span.device, span.begun))
        last[span.device] = max(span.last, last.get(span.device, span.last))
    return longest


def _user(said: dict[str, Any]) -> tuple[object, ...]:
    return (said["pid"], said["ticks"], said["name"])


def _users_before(file: Path, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Those who have begun with the device of `mine` before, have not ended, and live."""
    users: dict[tuple[object, ...], dict[str, Any]] = {}
    for said in lines(file):
        if said["device"] != mine["device"]:
            continue
        if _user(said) == _user(mine):
            break
        if said["what"] == "begin":
            users[_user(said)] = {key: said[key] for key in ("pid", "ticks", "name", "device")}
        elif said["what"] == "end":
            users.pop(_user(said), None)
    return [said for said in users.values() if Process(said["pid"], said["ticks"]).is_alive()]


if __name__ == "__main__":
    Use(sys.argv[1], sys.argv[2], pid=int(sys.argv[3]))

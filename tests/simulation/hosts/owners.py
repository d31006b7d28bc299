"""The processes of simulated workers as the kernel of their host knows them, and the watch of a manager over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outfitter_proto.records import Owner
from outfitter_service.runtime.liveness.process_watch import ProcessWatch
from simulation.loop import Loop, Process

BOOT = "boot"

Died = Callable[[str, str], None]


class Owners:
    """One host's processes: the living ones, and who watches them."""

    def __init__(self, loop: Loop, host: str) -> None:
        self._loop = loop
        self._host = host
        self._next = 0
        self._living: dict[int, list[tuple[Process, Callable[[], None]]]] = {}

    def begin(self) -> int:
        """A process starts; its pid."""
        self._next += 1
        self._living[self._next] = []
        return self._next

    def describe(self, pid: int) -> dict[str, Any]:
        """The process as a registration names it."""
        return {"pid": pid, "start_ticks": pid, "pid_ns": 1, "boot_id": BOOT}

    def end(self, pid: int) -> None:
        """It ends; each of its watchers is told as soon as it runs."""
        for process, tell in self._living.pop(pid, ()):
            self._loop.call_soon(tell, context=self._loop.within(process))

    def watch(self, process: Process, died: Died) -> Watch:
        """A watch of a manager that runs in `process`."""
        return Watch(self, process, died)

    def join(self, pid: int, process: Process, tell: Callable[[], None]) -> bool:
        """Be told of its end; False if it has ended."""
        if pid not in self._living:
            return False
        self._living[pid].append((process, tell))
        return True


class Watch(ProcessWatch):
    """What a manager sees of its host's processes."""

    def __init__(self, owners: Owners, process: Process, died: Died) -> None:
        super().__init__(boot_id=BOOT, pid_ns=1, time_ns=None, earlier_boot_id=None, died=died)
        self._owners = owners
        self._process = process
        self._tell = died
        self._watched: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._watched

    def __len__(self) -> int:
        return len(self._watched)

    def keys(self) -> set[str]:
        return set(self._watched)

    def watch(self, key: str, owner: Owner) -> bool:
        if key in self._watched:
            return True

        def tell() -> None:
            if self._watched.pop(key, None) is not None:
                self._tell(key, f"process {owner.pid} ended")

        self._watched[key] = owner.pid
        if not self._owners.join(owner.pid, self._process, tell):
            tell()
        return True

    def forget(self, key: str) -> None:
        self._watched.pop(key, None)

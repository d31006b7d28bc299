"""The processes of simulated workers as the kernel of their host knows them, and the watch of a manager over them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio

from outfitter_proto.records import Owner
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.liveness.process_watch import ProcessWatch
from outfitter_service.runtime.survivors.processes import Mark, Search, Survivor
from outfitter_service.runtime.survivors.survivor_watch import SurvivorWatch
from simulation.loop import Loop, Process

BOOT = "boot"
PID_NS = 1
"""Where all workers are."""
SEARCH_S = 0.05
"""What a search for processes takes, and how soon the end of one is seen."""

Died = Callable[[str, str], None]


class Owners:
    """One host's processes: the living ones, and who watches them."""

    def __init__(self, loop: Loop, host: str, *, survivors: random.Random | None = None) -> None:
        """`survivors`: the dice of workers that leave processes behind; None: no worker of the host does."""
        self.survivors = survivors
        self._left: dict[int, str] = {}
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
        return {"pid": pid, "start_ticks": pid, "pid_ns": PID_NS, "boot_id": BOOT}

    def end(self, pid: int) -> None:
        """It ends; each of its watchers is told as soon as it runs."""
        for process, tell in self._living.pop(pid, ()):
            self._loop.call_soon(tell, context=self._loop.within(process))

    def leave_behind(self, key: str) -> int:
        """A process of an allocation that is no owner starts; its pid."""
        self._next += 1
        self._left[self._next] = key
        return self._next

    def end_left(self, pid: int) -> None:
        """It ends."""
        del self._left[pid]

    def left_of(self, key: str) -> list[int]:
        """The living processes that an allocation's worker has left behind."""
        return [pid for pid, whose in self._left.items() if whose == key]

    def watch(self, process: Process, died: Died, *, pid_ns: int) -> Watch:
        """A watch of a manager that runs in `process`, in this PID namespace."""
        return Watch(self, process, died, pid_ns=pid_ns)

    def join(self, pid: int, process: Process, tell: Callable[[], None]) -> bool:
        """Be told of its end; False if it has ended."""
        if pid not in self._living:
            return False
        self._living[pid].append((process, tell))
        return True


class Watch(ProcessWatch):
    """What a manager sees of its host's processes."""

    def __init__(self, owners: Owners, process: Process, died: Died, *, pid_ns: int) -> None:
        super().__init__(boot_id=BOOT, pid_ns=pid_ns, time_ns=None, earlier_boot_id=None, died=died)
        self._owners = owners
        self._process = process
        self._tell = died
        self._watched: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._watched

    def __len__(self) -> int:
        return len(self._watched)

    def keys(self) -> set[str]:
        return self._watched.keys() | self._unwatched.keys()

    def watch(self, key: str, owner: Owner) -> bool:
        if key in self._watched:
            return True
        reason = self._out_of_reach(owner)
        if reason is not None:
            self._unwatched[key] = reason
            return False

        def tell() -> None:
            if self._watched.pop(key, None) is not None:
                self._tell(key, f"process {owner.pid} ended")

        self._watched[key] = owner.pid
        if not self._owners.join(owner.pid, self._process, tell):
            tell()
        return True

    def forget(self, key: str) -> None:
        self._watched.pop(key, None)
        self._unwatched.pop(key, None)


class Survivors(SurvivorWatch):
    """A manager's search for what workers have left behind on its host."""

    def __init__(self, owners: Owners, identity: Identity, clock: Clock) -> None:
        super().__init__(identity, clock=clock)
        self._owners = owners

    async def find(self, mark: Mark) -> Search:
        await anyio.sleep(SEARCH_S)
        pids = self._owners.left_of(_key(mark))
        return Search({mark: [Survivor(pid, "left", mark) for pid in pids]} if pids else {}, frozenset())

    async def wait_for(self, survivor: Survivor, *, at_most: float) -> None:
        with anyio.move_on_after(at_most):
            while survivor.pid in self._owners.left_of(_key(survivor.mark)):  # noqa: ASYNC110 - the kernel tells nobody
                await anyio.sleep(SEARCH_S)


def _key(mark: Mark) -> str:
    return f"{mark.host}/{mark.worker}/{mark.incarnation}"

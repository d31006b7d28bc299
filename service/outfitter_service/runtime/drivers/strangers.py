"""Strangers: processes that use a device which was not lent to them. They keep the device from being lent.

A driver's look names the processes on each device. This module says whose they are. No stranger is

- a process of who holds the device, its whole or a part of it: the owner, a descendant of it, or one whose environment
  names the allocation;
- a process of a worker that waits: it may ask for the very device that it uses;
- an owner that held the device and lives on, since CUDA keeps its context until the process ends;
- whoever runs on a device that is being released: its driver waits for that;
- a descendant of the manager, such as a script that tries a device.

Where the manager cannot tell which process it is, or whose, nobody is a stranger, and history says `unconfirmed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import anyio
import anyio.to_thread
import structlog
from msgspec import structs

from outfitter_drivers import api
from outfitter_proto.keys import AllocationKey
from outfitter_proto.support.backoff import Backoff
from outfitter_proto.support.one_thread import OneThread
from outfitter_proto.support.printable import printable
from outfitter_service.core import model as m
from outfitter_service.runtime.drivers import running_processes
from outfitter_service.runtime.drivers.borrowers import Borrowers
from outfitter_service.runtime.drivers.running_processes import (
    LONGEST_NAME,
    Found,
    ProcessIdentity,
    RunningProcess,
    Unseen,
)
from outfitter_service.runtime.drivers.translation import written

log = structlog.get_logger("outfitter.drivers")

AGAIN_EVERY_S = 1.0
"""Seconds after which a stranger's process, and who borrows devices, are looked at again. Drivers look less often."""
FIRST_DAMPED_S, LONGEST_DAMPED_S = 10.0, 320.0
"""Seconds for which what was said of a device stays, at first and at most. Processes that take turns would else have a
record written with each look. That a device is used is said at once."""
CALM_S = 600.0
"""After so many seconds without a change the next one is said as if it were the first."""
MOST_USERS = 256
"""Most users of one device that count."""
PROC_WITHIN_S = 5.0
"""How long /proc has to show the processes of a look. A process that hangs in the kernel may hold it up for ever."""
MOST_PROCESSES = 4096
"""Most processes of one look. To read one in /proc takes some 0.1 ms."""
NAMED_WITHIN_S = 1.0
"""How long the machine's name service has to name a user."""
LONGEST_WHY = 300
"""Most characters of why nobody can tell."""

_UNNAMED = "somebody uses it whom its driver cannot name"
_NAMESPACE = "the manager is in a PID namespace of its own, so the pids that its driver reads may be of other processes"
_TOO_MANY = f"its driver names more than {MOST_PROCESSES} processes"


class Judgement(NamedTuple):
    """Who uses one device. `strangers`: processes to which it was not lent, with what its driver says of each.
    `untold`: why there may be others; None: there are none."""

    strangers: tuple[tuple[RunningProcess, api.DeviceUser], ...] = ()
    untold: str | None = None


def judge(
    users: api.Users,
    names: Collection[str],
    processes: Mapping[int, Found],
    borrowers: Borrowers,
    known: Mapping[ProcessIdentity, AllocationKey],
    own: int,
    whole: str | None = None,
) -> tuple[Judgement, dict[ProcessIdentity, AllocationKey]]:
    """The judgement on the device with these names, and whose processes are on it. `processes`: those that its users'
    pids mean; None: it has ended. `known`: whose they were, for a process may lose its parents. `own`: the manager's
    pid. `whole`: what the device is a part of."""
    if isinstance(users, api.CannotTell):
        return Judgement(untold=users.reason), {}
    holders = borrowers.holders(names, whole)
    strangers: list[tuple[RunningProcess, api.DeviceUser]] = []
    belongs: dict[ProcessIdentity, AllocationKey] = {}
    untold: str | None = None
    for user in users:
        process = Unseen(_UNNAMED) if user.pid is None else processes.get(user.pid)
        if process is None:
            continue
        if isinstance(process, Unseen):
            untold = untold or process.why
            continue
        key = next((key for key, each in holders.items() if _is_of(process, key, each.owner, known)), None)
        if key is not None:
            belongs[process.identity] = key
        elif _is_excused(process, names, whole, borrowers, own) or any(each.is_ending for each in holders.values()):
            continue
        elif key := next((key for key, each in holders.items() if each.owner is None), None):
            untold = untold or f"process {user.pid} may be of {key}, whose owner is not known here"
        else:
            strangers.append((process, user))
    return Judgement(tuple(strangers), untold), belongs


def _is_of(
    process: RunningProcess,
    key: AllocationKey,
    owner: ProcessIdentity | None,
    known: Mapping[ProcessIdentity, AllocationKey],
) -> bool:
    return owner in process.lineage or key in process.allocations or known.get(process.identity) == key


def _is_excused(
    process: RunningProcess, names: Collection[str], whole: str | None, borrowers: Borrowers, own: int
) -> bool:
    return (
        borrowers.has_held(process.identity, names, whole)
        or borrowers.waits(process.lineage, process.allocations)
        or any(pid == own for pid, _ in process.lineage)
    )


def named_users(devices: Sequence[api.Device]) -> list[api.Users | None]:
    """What a driver says of its devices' users, checked: a foreign value means that nobody can tell."""
    return [_checked(device.users) for device in devices]


def _checked(users: object) -> api.Users | None:
    if users is None:
        return None
    if isinstance(users, api.CannotTell):
        return api.CannotTell(written(str(users.reason))[:LONGEST_WHY])
    if not isinstance(users, list | tuple) or not all(isinstance(user, api.DeviceUser) for user in users):
        return api.CannotTell("its driver names users that are none")
    return tuple([_user(user) for user in users[:MOST_USERS]])


def _user(user: api.DeviceUser) -> api.DeviceUser:
    pid = user.pid if type(user.pid) is int and 0 < user.pid < 2**31 else None
    program, name = (printable(str(text))[:LONGEST_NAME] if text else None for text in (user.program, user.user))
    return api.DeviceUser(pid=pid, program=program, user=name)


class Damper:
    """What is said of the strangers on one device. That there is one is said at once, anything else not too often."""

    def __init__(self) -> None:
        self._said: tuple[ProcessIdentity, str] | None = None
        self._due_at = self._calm_at = 0.0
        self._backoff = Backoff(FIRST_DAMPED_S, LONGEST_DAMPED_S)

    def say(self, now: float, strangers: Mapping[ProcessIdentity, str]) -> str | None:
        """The stranger that is named now, out of those that are there, with their words; None: there is none."""
        said = self._said
        if said is not None and said[0] in strangers:
            return said[1]
        if said is None and not strangers:
            return None
        if said is not None and now < self._due_at:
            return said[1]
        if now >= self._calm_at:
            self._backoff.reset()
        if said is not None:
            self._due_at = now + self._backoff.next_delay()
        self._calm_at = max(now, self._due_at) + CALM_S
        self._said = next(iter(strangers.items()), None)
        return None if self._said is None else self._said[1]


class UseWatch:
    """Marks one resource's reports with the strangers on its devices, and reports anew when these change."""

    def __init__(self, resource: str, borrowers: Borrowers, *, emit: Callable[[m.Event], None], own: int) -> None:
        """`emit`: called with each report that is news. `own`: the manager's pid."""
        self._borrowers = borrowers
        self._emit = emit
        self._own = own
        self._log = log.bind(resource=resource)
        self._report: m.DriverReport | None = None
        self._sent: m.DriverReport | None = None
        self._users: dict[str, api.Users] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._wholes: dict[str, str | None] = {}
        self._judgements: dict[str, Judgement] = {}
        self._dampers: dict[str, Damper] = {}
        self._seen: dict[int, RunningProcess] = {}
        self._known: dict[ProcessIdentity, AllocationKey] = {}
        self._user_names: dict[int, str] = {}
        self._judged_version = -1
        self._proc = OneThread()
        self._turn = anyio.Lock()

    async def looked(self, devices: Sequence[m.KnownDevice], users: Sequence[api.Users | None]) -> None:
        """The driver has looked: these use its devices, in their order. The report follows."""
        await self._borrowers.restored.wait()
        async with self._turn:
            said = [(device, each) for device, each in zip(devices, users, strict=True) if each is not None]
            self._users = {device.id: each for device, each in said}
            self._names = {device.id: (device.id, *device.aliases) for device, _ in said}
            self._wholes = {device.id: device.part_of for device, _ in said}
            self._dampers = {name: self._dampers.get(name) or Damper() for name in self._users}
            await self._judge(is_new=True)

    def report(self, report: m.DriverReport) -> None:
        """Send a report, with the strangers on its devices."""
        self._report = report
        self._send()

    async def keep_judging(self) -> None:
        """Judge again when who borrows devices changes, and while a stranger lives, until cancelled."""
        while True:
            await anyio.sleep(AGAIN_EVERY_S)
            if self._report is None or not self._users:
                continue
            async with self._turn:
                has_strangers = any(each.strangers for each in self._judgements.values())
                if has_strangers or self._judged_version != self._borrowers.version:
                    await self._judge(is_new=False)
                self._send()

    async def _judge(self, *, is_new: bool) -> None:
        """Judge all devices. `is_new`: the driver has just named these pids. Else they mean the processes that they
        meant then, and one that is another's now has ended."""
        self._judged_version = self._borrowers.version
        pids = {
            user.pid
            for users in self._users.values()
            for user in (() if isinstance(users, api.CannotTell) else users)
            if user.pid is not None
        }
        processes = await self._processes(pids, is_new=is_new)
        judgements: dict[str, Judgement] = {}
        known: dict[ProcessIdentity, AllocationKey] = {}
        for name, users in self._users.items():
            judgements[name], belongs = judge(
                users, self._names[name], processes, self._borrowers, self._known, self._own, self._wholes[name]
            )
            known.update(belongs)
        self._judgements, self._known = judgements, known
        await self._look_up({process.uid for each in judgements.values() for process, _ in each.strangers})

    async def _processes(self, pids: Collection[int], *, is_new: bool) -> Mapping[int, Found]:
        if not self._borrowers.sees_all:
            return dict.fromkeys(pids, Unseen(_NAMESPACE))
        if len(pids) > MOST_PROCESSES:
            return dict.fromkeys(pids, Unseen(_TOO_MANY))
        if not pids:
            return {}
        before = self._seen
        try:
            found = await self._proc.run(lambda: running_processes.find(pids), within_s=PROC_WITHIN_S)
        except TimeoutError as error:
            self._seen = {} if is_new else before
            return dict.fromkeys(pids, Unseen(f"/proc {error}"))
        if is_new:
            self._seen = {pid: each for pid, each in found.items() if isinstance(each, RunningProcess)}
            return {pid: each or _ended(pid, before) for pid, each in found.items()}
        return {pid: _same(pid, each, before) for pid, each in found.items()}

    async def _look_up(self, uids: Collection[int]) -> None:
        """Learn the names of users. What the machine's name service does not say in time stays a number."""
        for uid in uids - self._user_names.keys():
            name = f"uid {uid}"
            with anyio.move_on_after(NAMED_WITHIN_S):
                name = await anyio.to_thread.run_sync(running_processes.user_name, uid, abandon_on_cancel=True)
            self._user_names[uid] = name

    def _send(self) -> None:
        if self._report is None:
            return
        marked = self._report
        if self._users:
            now = anyio.current_time()
            devices = tuple([self._marked(device, now) for device in marked.devices])
            marked = structs.replace(marked, devices=devices)
        if marked != self._sent:
            self._log_new(marked)
            self._sent = marked
            self._emit(marked)

    def _log_new(self, report: m.DriverReport) -> None:
        """Log the strangers that were not there before."""
        before = {device.id: device.used_by for device in self._sent.devices} if self._sent is not None else {}
        for device in report.devices:
            if device.used_by is not None and device.used_by != before.get(device.id):
                self._log.warning(
                    "a process uses a device that was not lent to it", device=device.id, process=device.used_by
                )

    def _marked(self, device: m.KnownDevice, now: float) -> m.KnownDevice:
        judgement = self._judgements.get(device.id)
        if judgement is None:
            return device
        strangers = {process.identity: self._words(process, user) for process, user in judgement.strangers}
        said = self._dampers[device.id].say(now, strangers)
        untold = judgement.untold if said is None else None
        if said is None and untold is None:
            return device
        return structs.replace(device, used_by=said, untold=untold)

    def _words(self, process: RunningProcess, user: api.DeviceUser) -> str:
        """The process in words: `process 4711 (python) of ada`."""
        name = user.user or self._user_names.get(process.uid) or f"uid {process.uid}"
        return f"process {user.pid} ({user.program or process.program}) of {name}"


def _ended(pid: int, before: Mapping[int, RunningProcess]) -> Found:
    """What a pid means that a look named, and that no process has any more. If it was seen before, it has ended since.
    Else the look may have meant another process than the manager sees."""
    return None if pid in before else Unseen(f"no process {pid} runs here")


def _same(pid: int, found: Found, seen: Mapping[int, RunningProcess]) -> Found:
    """What a pid of an earlier look means now."""
    before = seen.get(pid)
    if before is None:
        return found if isinstance(found, Unseen) else Unseen(f"no process {pid} ran here")
    if isinstance(found, RunningProcess) and found.identity != before.identity:
        return None
    return found

"""The `gpu` driver where NVIDIA's library is there: NVML in a process of its own, else nvidia-smi.

The driver looks every `poll_interval`, and at once when NVML tells of an event. While nobody can ask NVML, the GPUs are
unknown. GPUs have the same ids, aliases and properties by either way, so that a change of the way frees nothing.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import anyio
import msgspec

from outfitter_drivers.api import CannotTell, Device, DeviceUser, DriverError, Grant, TemporaryDriverError, Users
from outfitter_drivers.gpu.compute_processes import CheckingNvidiaDriver, unseen
from outfitter_drivers.gpu.fields import MIG_MODE
from outfitter_drivers.gpu.nvidia import (
    DEFAULT_POLL_INTERVAL,
    NvidiaDriver,
    mig_remarks,
    selected_by_index,
    unknown,
)
from outfitter_drivers.gpu.users import device_users
from outfitter_drivers.nvidia import inventory
from outfitter_drivers.nvidia.faults import Faults
from outfitter_drivers.nvidia.inventory import Seen
from outfitter_drivers.nvidia.process import NvmlProcess, ReleasedError, UnusableError
from outfitter_drivers.nvidia.protocol import LONGEST_WAIT_S
from outfitter_drivers.nvidia.snapshot import Processes, Snapshot
from outfitter_drivers.nvidia.xid import XidClasses
from outfitter_drivers.script import HangingError
from outfitter_drivers.support.tree import Tree
from outfitter_proto.support.one_thread import OneThread, StillHangsError

logger = logging.getLogger("outfitter.drivers")

ROOT = Path("/")
NODES = ("dev/nvidiactl", "dev/dxg")
"""What NVML needs: the driver's node, or that of Windows' subsystem for Linux."""
ASK_ANEW_S = 600.0
"""Seconds after which NVML is tried again where it could not be used."""

SHORTEST_PAUSE_S = 1.0
"""Seconds between two looks at least, however many events tell of one broken program."""
PROC_WITHIN_S = 5.0
"""Seconds in which /proc must name the processes of all GPUs."""

NO_PACKAGE = "NVML cannot be used: the package nvidia-ml-py is not there; install outfitter[nvidia]"
NOT_LISTED = Processes(unsaid="NVML does not name the device")
_MOST_NAMED = 4


class Interface(StrEnum):
    """How the driver asks for GPUs."""

    AUTO = "auto"
    """By NVML where it can be used, else by nvidia-smi. Once NVML has answered, by NVML."""
    NVML = "nvml"
    NVIDIA_SMI = "nvidia-smi"


class NvmlDriver(NvidiaDriver):
    """Lists all GPUs of its machine. Parameters as `NvidiaDriver`; `timeout` is that of one answer of NVML, too."""

    def __init__(
        self,
        *,
        interface: Interface = Interface.AUTO,
        classes: XidClasses | None = None,
        nvml: NvmlProcess | None = None,
        root: Path | None = None,
        poll_interval: float = DEFAULT_POLL_INTERVAL,
        timeout: float = 10.0,
        by_index: bool = False,
    ) -> None:
        self._tree = Tree(ROOT if root is None else root)
        super().__init__(
            poll_interval=poll_interval,
            timeout=timeout,
            by_index=by_index,
            sysfs=self._tree.root / "sys/bus/pci/devices",
        )
        self._interface = interface
        self.nvml = NvmlProcess(timeout=timeout) if nvml is None else nvml
        self._faults = Faults(classes or XidClasses())
        self._files = OneThread()
        self._proc = OneThread()
        self._snapshot: Snapshot | None = None
        self._seen: list[Device] = []
        self._is_answered = False
        self._has_waited = False
        self._releases = 0
        self._lost: frozenset[int] = frozenset()
        self._versions: tuple[str | None, str | None] = (None, None)
        self._unusable: str | None = None
        self._anew_at = 0.0

    @property
    def snapshot(self) -> Snapshot | None:
        """NVML's last answer. None: NVML is not asked, or has not answered the last look."""
        return self._snapshot if self._is_answered else None

    async def look(self) -> list[Device]:
        try:
            if self._asks_nvml():
                return await self._look_by_nvml()
        except UnusableError as error:
            self._is_answered = False
            if self._snapshot is not None:  # as in the middle of a driver's upgrade
                raise TemporaryDriverError(str(error)) from error
            if self._interface is Interface.NVML:
                raise
            self._fall_back(str(error))
        except DriverError:
            self._is_answered = False
            raise
        return await super().look()

    async def until_next_look(self) -> None:
        begin = anyio.current_time()
        end = begin + self._poll_interval
        while self._is_answered and (left := end - anyio.current_time()) > 0:
            turn = anyio.current_time() + min(left, LONGEST_WAIT_S)
            try:
                events = await self.nvml.wait(left)
            except DriverError:
                if not self._has_waited:
                    break  # NVML fails at each wait, and may be started anew for each look
                self._has_waited = False
                return  # the look says why
            self._has_waited = True
            if events:
                self._faults.note(events)
                await anyio.sleep_until(min(end, begin + SHORTEST_PAUSE_S))
                return
            await anyio.sleep_until(turn)  # where NVML tells no events, it does not wait
        if await self.nvml.until_release_ends():
            return  # who needed the GPUs may have reset some, or made others of them
        await anyio.sleep(max(0.0, end - anyio.current_time()))

    async def remarks(self) -> list[str]:
        devices = self._last or await self.look()
        remarks = [] if self._is_answered else mig_remarks(devices)
        if self._unusable is not None:
            remarks.append(f"{self._unusable}; nvidia-smi is asked instead, which says less")
        if self._snapshot is not None and self._snapshot.unwatched is not None:
            remarks.append(f"{self._snapshot.unwatched}: an Xid is not seen, and the driver looks in its interval only")
        return remarks

    async def aclose(self) -> None:
        await self.nvml.aclose()

    def _asks_nvml(self) -> bool:
        if self._interface is not Interface.AUTO:
            return self._interface is Interface.NVML
        if self._snapshot is not None:
            return True
        if time.monotonic() < self._anew_at or not any(map(self._tree.exists, NODES)):
            return False
        if importlib.util.find_spec("pynvml") is None:
            self._fall_back(NO_PACKAGE)
            return False
        return True

    def _fall_back(self, words: str) -> None:
        if words != self._unusable:
            logger.warning("%s; nvidia-smi is asked instead", words)
        self._unusable = words
        self._anew_at = time.monotonic() + ASK_ANEW_S

    async def _look_by_nvml(self) -> list[Device]:
        try:
            snapshot, machine = await self._told()
        except (HangingError, ReleasedError) as error:
            if not self._last:
                raise
            self._is_answered = False
            devices = unknown(self._last, str(error))
            return selected_by_index(devices) if self._by_index else devices
        found = inventory.seen(snapshot, machine, self._faults, self._seen or self._last)
        await self._renew_if_lost(snapshot)
        self._seen = [each.device for each in found]
        self._last = [each.device for each in found if each.is_reported]
        self._snapshot, self._is_answered, self._unusable = snapshot, True, None
        return selected_by_index(self._last, why_uncountable(found)) if self._by_index else self._last

    async def _told(self) -> tuple[Snapshot, inventory.Machine]:
        """NVML's answer, by a process that has the library of the driver that the kernel runs."""
        machine = await self._machine()
        snapshot = await self.nvml.look()
        versions = machine.driver_version, snapshot.driver_version
        if None not in versions and versions[0] != versions[1] and versions != self._versions:
            await self.nvml.renew()
            snapshot = await self.nvml.look()
        self._versions = versions
        self._faults.at_driver(snapshot.driver_version)
        if self.nvml.releases != self._releases:
            self._releases = self.nvml.releases
            self._faults.forget()
        return snapshot, machine

    async def _machine(self) -> inventory.Machine:
        """What files say. The driver's own hang where the driver hangs."""
        try:
            return await self._files.run(lambda: inventory.read_machine(self._tree), within_s=self.timeout)
        except StillHangsError as error:
            raise HangingError(f"the kernel {error} about the files of NVIDIA's driver") from error
        except TimeoutError as error:
            raise TemporaryDriverError(f"the kernel {error} about the files of NVIDIA's driver") from error

    async def _renew_if_lost(self, snapshot: Snapshot) -> None:
        """After the loss of a GPU only a new process sees what is left of the machine."""
        lost = frozenset(gpu.index for gpu in snapshot.gpus if gpu.failure is not None)
        if lost - self._lost:
            await self.nvml.renew()
        self._lost = lost


class CheckingNvmlDriver(NvmlDriver, CheckingNvidiaDriver):
    """Does not let a GPU be lent while a process computes on it to which it was not lent."""

    async def look(self) -> list[Device]:
        devices = await super().look()
        if self.snapshot is None:
            return devices  # nvidia-smi has said it, or nobody has
        try:
            users = await self._users_of(processes(self.snapshot), [device.id or "" for device in devices])
        except TemporaryDriverError as error:
            users = dict.fromkeys([device.id or "" for device in devices], CannotTell(str(error)))
        return [msgspec.structs.replace(device, users=users[device.id or ""]) for device in devices]

    async def in_use(self, grant: Grant) -> str | CannotTell | None:
        """As `CheckingNvidiaDriver.in_use`, by NVML where it is asked.

        Raises:
            TemporaryDriverError: NVML does not answer.
        """
        lists = await self._processes_by_nvml()
        if lists is None:
            return await super().in_use(grant)
        owner = grant.worker.owner_pid if grant.is_given_back else None
        found: list[str] = []
        untold: CannotTell | None = None
        users_of = await self._users_of(lists, [device.get("uuid", "") for device in grant.devices])
        for uuid, users in users_of.items():
            if isinstance(users, CannotTell):
                untold = users
                continue
            found += [f"{_in_words(user)} on {uuid}" for user in users if owner is None or user.pid != owner]
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        return f"{', '.join(found[:_MOST_NAMED])}{more}" or untold

    async def _processes_by_nvml(self) -> dict[str, Processes] | None:
        """Who uses each device; None: nvidia-smi is to be asked."""
        if not self._asks_nvml():
            return None
        try:
            return processes(await self.nvml.look())
        except UnusableError:
            if self._interface is Interface.NVML:
                raise
            return None

    async def _users_of(self, lists: Mapping[str, Processes], uuids: Sequence[str]) -> dict[str, Users]:
        """Who computes on each device. A file in /proc may block as long as its process hangs in the kernel.

        Raises:
            TemporaryDriverError: /proc does not answer.
        """

        def read() -> dict[str, Users]:
            return {uuid: self._users(lists.get(uuid, NOT_LISTED)) for uuid in uuids}

        try:
            return await self._proc.run(read, within_s=PROC_WITHIN_S)
        except TimeoutError as error:
            raise TemporaryDriverError(f"/proc {error} about the processes on the GPUs") from error

    def _users(self, listed: Processes) -> Users:
        """Who computes on a device. Processes that are listed count, also if NVML cannot tell all."""
        users = device_users([(pid, self._path(pid)) for pid in listed.pids])
        if users:
            return users
        return CannotTell(listed.unsaid) if listed.unsaid is not None else unseen() or ()

    def _path(self, pid: int) -> str:
        return (self._tree.line(f"proc/{pid}/cmdline") or "").partition("\0")[0]


def _in_words(user: DeviceUser) -> str:
    name = f" ({user.program})" if user.program else ""
    return f"a process that NVML does not number{name}" if user.pid is None else f"process {user.pid}{name}"


def processes(snapshot: Snapshot) -> dict[str, Processes]:
    """Who uses each device, by the UUID of the GPU or the MIG instance."""
    lists: dict[str, Processes] = {}
    for gpu in snapshot.gpus:
        if gpu.uuid is not None and gpu.failure is None:
            lists[gpu.uuid] = gpu.processes
            lists |= {instance.uuid: instance.processes for instance in gpu.instances}
    return lists


def why_uncountable(seen: Sequence[Seen]) -> str | None:
    """Why nobody knows how CUDA counts the GPUs; None: it counts as NVML does."""
    for device, is_counted, _ in seen:
        name = device.properties.get("index") or device.id
        if not is_counted:
            return f"CUDA may count the GPUs without GPU {name}, which is lost"
        if MIG_MODE in device.properties:
            return f"CUDA counts MIG instances otherwise, and GPU {name} is in MIG mode"
    return None

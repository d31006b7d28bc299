"""Asks nvidia-smi which processes compute on a GPU, before the manager lends it again.

A worker's child may outlive it, as PyFlink's Python workers outlive their task manager by more than a second. Only
compute processes count. nvidia-smi lists no process of a display, and the server of CUDA's Multi-Process Service stays
without a client (NVIDIA's MPS documentation, "nvidia-cuda-mps-server").
"""

from __future__ import annotations

from collections.abc import Mapping

from outfitter_drivers.api import Grant, InUseCheck, TemporaryDriverError
from outfitter_drivers.gpu.nvidia import NvidiaDriver, lost_gpus, nvidia_smi
from outfitter_proto.support.printable import printable

FIELDS = ("gpu_uuid", "pid", "process_name")
"""The queried fields. The name comes last because only it may contain a comma."""

_SERVER = "nvidia-cuda-mps-server"
_CANNOT_SAY = (b"not a valid field", b"Not Supported", b"No devices were found")
"""What nvidia-smi prints where it knows no processes: an old one, a virtual GPU, the last GPU lost."""
_MOST_NAMED = 4
_LONGEST_NAME = 40


class CheckingNvidiaDriver(NvidiaDriver, InUseCheck):
    """Does not let a GPU be lent again while a process computes on it."""

    async def in_use(self, grant: Grant) -> str | None:
        """See `InUseCheck.in_use`. A GPU without a UUID is not checked, and neither is a lost one. The owner that has
        given the devices back does not count: CUDA keeps its context until the process ends.

        Raises:
            TemporaryDriverError: nvidia-smi fails, or does not end in time.
        """
        devices = {uuid: device.get("pci.bus_id") for device in grant.devices if (uuid := device.get("uuid"))}
        stdout = await self._compute_processes(devices)
        users = _users(stdout, set(devices), str(grant.worker.owner_pid) if grant.is_given_back else None)
        if not users:
            return None
        more = f" and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else ""
        return f"{', '.join(users[:_MOST_NAMED])}{more}"

    async def _compute_processes(self, devices: Mapping[str, str | None]) -> bytes:
        """What nvidia-smi says of the devices (UUID and bus id) that it does not report as lost: one lost GPU must not
        hide who uses the others."""
        left = dict(devices)
        while left:
            outcome = await nvidia_smi(
                f"--id={','.join(left)}",
                f"--query-compute-apps={','.join(FIELDS)}",
                "--format=csv,noheader",
                timeout=self.timeout,
            )
            printed = outcome.stdout + outcome.stderr
            if outcome.code == 0:
                return outcome.stdout
            if any(words in printed for words in _CANNOT_SAY):
                break
            lost = lost_gpus(printed)
            rest = {uuid: bus_id for uuid, bus_id in left.items() if bus_id not in lost}
            if len(rest) == len(left):
                raise TemporaryDriverError(f"nvidia-smi {outcome}")
            left = rest
        return b""


def _users(stdout: bytes, uuids: set[str], owner_pid: str | None) -> list[str]:
    """The processes on these GPUs, for people, but for the owner that has given them back. A line without a pid says
    nothing."""
    users: dict[str, None] = {}
    for line in stdout.decode("utf-8", "replace").splitlines():
        uuid, *process = (value.strip() for value in line.split(",", len(FIELDS) - 1))
        if uuid not in uuids or len(process) < 2:
            continue
        pid, path = process
        name = printable(path.rpartition("/")[2])[:_LONGEST_NAME]
        if pid.isdecimal() and pid != owner_pid and name != _SERVER:
            users[f"process {pid[:_LONGEST_NAME]} ({name}) on {uuid}"] = None
    return list(users)

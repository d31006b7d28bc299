"""Asks nvidia-smi which processes compute on a GPU, before the manager lends it again.

A worker's child may outlive it, as PyFlink's Python workers outlive their task manager by more than a second. Only
compute processes count. nvidia-smi lists no process of a display, and the server of CUDA's Multi-Process Service stays
without a client (NVIDIA's MPS documentation, "nvidia-cuda-mps-server").
"""

from __future__ import annotations

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
        """See `InUseCheck.in_use`. A GPU without a UUID is not checked, and neither is a lost one.

        Raises:
            TemporaryDriverError: nvidia-smi fails, or does not end in time.
        """
        uuids = [uuid for device in grant.devices if (uuid := device.get("uuid"))]
        if not uuids:
            return None
        outcome = await nvidia_smi(
            f"--id={','.join(uuids)}",
            f"--query-compute-apps={','.join(FIELDS)}",
            "--format=csv,noheader",
            timeout=self.timeout,
        )
        printed = outcome.stdout + outcome.stderr
        if outcome.code != 0 and not lost_gpus(printed):
            if any(words in printed for words in _CANNOT_SAY):
                return None
            raise TemporaryDriverError(f"nvidia-smi {outcome}")
        users = _users(outcome.stdout, set(uuids))
        if not users:
            return None
        more = f" and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else ""
        return f"{', '.join(users[:_MOST_NAMED])}{more}"


def _users(stdout: bytes, uuids: set[str]) -> list[str]:
    """The processes on these GPUs, for people."""
    users: dict[str, None] = {}
    for line in stdout.decode("utf-8", "replace").splitlines():
        uuid, *process = (value.strip() for value in line.split(",", len(FIELDS) - 1))
        if uuid not in uuids or len(process) < 2:
            continue
        pid, path = process
        name = printable(path.rpartition("/")[2])[:_LONGEST_NAME]
        if name != _SERVER:
            users[f"process {printable(pid)[:_LONGEST_NAME]} ({name}) on {uuid}"] = None
    return list(users)

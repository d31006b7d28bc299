"""Asks nvidia-smi which processes compute on a GPU, before the manager lends it again.

A worker's child may outlive it, as PyFlink's Python workers outlive their task manager by more than a second. Only
compute processes count. nvidia-smi lists no process of a display, and the server of CUDA's Multi-Process Service stays
without a client (NVIDIA's MPS documentation, "nvidia-cuda-mps-server").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from outfitter_drivers.api import Grant, InUseCheck, TemporaryDriverError
from outfitter_drivers.gpu.complaints import Complaints
from outfitter_drivers.gpu.nvidia import NvidiaDriver, nvidia_smi
from outfitter_drivers.script import Outcome
from outfitter_proto.support.printable import printable

FIELDS = ("gpu_uuid", "pid", "process_name")
"""The queried fields. The name comes last because only it may contain a comma."""

_SERVER = "nvidia-cuda-mps-server"
_CANNOT_SAY = ("not a valid field", "Not Supported", "No devices were found")
"""What nvidia-smi prints where it knows no processes: an old one, a virtual GPU, the last GPU lost."""
_INFOROM_IS_CORRUPTED = 14
"""The exit code of a warning: the answer is whole."""
_LOST = re.compile(r"\[?GPU (?:is lost|requires reset)", re.IGNORECASE)
_ROW = re.compile(r"\s*(?:GPU|MIG)-[^\s,:]+\s*(?:,|$)")
_NOTHING = frozenset(("n/a", "[n/a]", "[not supported]", "[requested functionality has been deprecated]"))
_MOST_NAMED = 4
_LONGEST_NAME = 40


class CheckingNvidiaDriver(NvidiaDriver, InUseCheck):
    """Does not let a GPU be lent again while a process computes on it."""

    async def in_use(self, grant: Grant) -> str | None:
        """See `InUseCheck.in_use`. A GPU without a UUID is not checked. On a lost one nobody computes, unless a row
        names a process. The owner that has given the devices back does not count: CUDA keeps its context until the
        process ends.

        Raises:
            TemporaryDriverError: nvidia-smi fails, or does not end in time, so nobody knows.
        """
        owner_pid = str(grant.worker.owner_pid) if grant.is_given_back else None
        left = {uuid: device for device in grant.devices if (uuid := device.get("uuid"))}
        while left:
            answer = Processes(
                await nvidia_smi(
                    f"--id={','.join(left)}",
                    f"--query-compute-apps={','.join(FIELDS)}",
                    "--format=csv,noheader",
                    timeout=self.timeout,
                )
            )
            if users := list(dict.fromkeys(answer.users(left, owner_pid))):
                more = f" and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else ""
                return f"{', '.join(users[:_MOST_NAMED])}{more}"
            if answer.is_whole:
                return None
            # One lost GPU must not hide who uses the others.
            rest = {uuid: device for uuid, device in left.items() if not answer.lost(device)}
            if len(rest) == len(left):
                raise TemporaryDriverError(f"nvidia-smi {answer.outcome}")
            left = rest
        return None


class _Process(NamedTuple):
    """A row: a process on a GPU."""

    uuid: str
    pid: str
    path: str

    @property
    def name(self) -> str:
        return printable(self.path.rpartition("/")[2])[:_LONGEST_NAME]


class Processes:
    """What nvidia-smi says of the processes on some GPUs: rows, and complaints beside them."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        lines = outcome.stdout.decode("utf-8", "replace").splitlines()
        values = ([value.strip() for value in line.split(",", len(FIELDS) - 1)] for line in lines if _ROW.match(line))
        self._rows = [_Process(*row) for row in values if len(row) == len(FIELDS)]
        others = [line for line in lines if not _ROW.match(line)]
        self._complaints = Complaints((*others, *outcome.stderr.decode("utf-8", "replace").splitlines()))

    @property
    def is_whole(self) -> bool:
        """Whether a process that has no row does not exist, as far as nvidia-smi can know."""
        said = self._complaints.all
        if any(words in complaint.text for complaint in said for words in _CANNOT_SAY):
            return True
        if any(complaint.is_loss and not complaint.names for complaint in said):
            return False
        if self.outcome.code == _INFOROM_IS_CORRUPTED:
            return not self._complaints.losses
        return self.outcome.code == 0 or (bool(said) and all(complaint.is_warning for complaint in said))

    def users(self, uuids: Collection[str], owner_pid: str | None) -> Iterator[str]:
        """The processes on these GPUs, for people, but for the owner that has given them back. A process counts
        although nvidia-smi may not tell its pid."""
        for row in self._rows:
            if row.uuid not in uuids or row.name == _SERVER or row.pid == owner_pid:
                continue
            if row.pid.isdecimal():
                yield f"process {row.pid[:_LONGEST_NAME]} ({row.name}) on {row.uuid}"
            elif not _says_nothing(row.pid) or not _says_nothing(row.path):
                told = printable(f"{row.pid}, {row.path}")[: 2 * _LONGEST_NAME]
                yield f"a process that nvidia-smi does not name ({told}) on {row.uuid}"

    def lost(self, device: Mapping[str, str]) -> bool:
        """Whether it reports the GPU as lost."""
        names = {device["uuid"].lower(), device.get("pci.bus_id", "")}
        complaint = self._complaints.about(names, device.get("index"))
        reports_loss = any(row.uuid == device["uuid"] and _LOST.match(row.pid) for row in self._rows)
        return reports_loss or (complaint is not None and complaint.is_loss)


def _says_nothing(value: str) -> bool:
    """Whether a row says of a GPU that there is nothing to say, or that it is lost."""
    return not value or value.lower() in _NOTHING or _LOST.match(value) is not None

"""Asks nvidia-smi which processes compute on a GPU: beside each look, and before the manager lends it again.

A worker's child may outlive it, as PyFlink's Python workers outlive their task manager by more than a second. And
somebody may compute to whom the manager lent nothing. Only compute processes count: nvidia-smi lists no process of a
display among them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from outfitter_drivers.api import CannotTell, Device, DriverError, Grant, InUseCheck, TemporaryDriverError, Users
from outfitter_drivers.gpu.complaints import Complaint, Complaints
from outfitter_drivers.gpu.nvidia import NvidiaDriver, nvidia_smi
from outfitter_drivers.gpu.users import LONGEST_NAME, MPS_SERVER, device_users, program_name
from outfitter_drivers.script import ScriptOutcome, shortened
from outfitter_proto.support.printable import printable
from outfitter_proto.support.processes import sees_all_processes

FIELDS = ("gpu_uuid", "pid", "process_name")
"""The queried fields. The name comes last because only it may contain a comma."""

_CODES = frozenset((0, 14))
"""The exit codes of a whole answer: success, and the warning that an infoROM is corrupted."""
_CODES_OF_CANNOT_SAY = _CODES | {2, 3, 6, 13}
"""And those of an nvidia-smi that knows no processes: wrong argument, not available, not found, not implemented."""
_CANNOT_SAY = re.compile(r"is not a valid field|not supported|no devices were found", re.IGNORECASE)
"""What nvidia-smi prints where it knows no processes: an old one, a virtual GPU, the last GPU lost."""
_NOBODY = re.compile(r"no running (?:compute )?process(?:es)?(?: found)?\W*", re.IGNORECASE)
_GONE = re.compile(r"device handle|\blost\b|fallen off|off the bus|requires? (?:a )?reset", re.IGNORECASE)
_BROKEN = re.compile(r"permission|denied|fault|dumped|killed|abort|segv", re.IGNORECASE)
"""Words of a program, or of a question, that failed: they say nothing of a GPU."""
_LOST = re.compile(r"\[?GPU (?:is lost|requires reset)", re.IGNORECASE)
_UUID = r"""["']?(?P<uuid>(?:GPU|MIG)-[^\s,:;|"']+)["']?"""
_BETWEEN = r"\s*[,;|\t]\s*"
_ROW = re.compile(rf"\s*{_UUID}\s*(?:$|[,;|\t]|\s(?=\d))", re.IGNORECASE)
_ROW_WITHIN = re.compile(rf"""{_UUID}(?:{_BETWEEN}(?=["']?(?:\d|\[))|\s+(?=\d))""", re.IGNORECASE)
"""A row behind a line that has no end."""
_PID = re.compile(rf"""["']?(\d+)["']?(?:{_BETWEEN}|\s+|$)(.*)""")
_NUMBER = re.compile(r"[0-9]{1,10}")
_NOTHING = frozenset(("n/a", "[n/a]", "[not supported]", "[requested functionality has been deprecated]"))
_MOST_NAMED = 4
_UNSEEN = CannotTell("the manager is in a PID namespace of its own, where the driver may name no processes")
_WITHOUT_UUID = CannotTell("a GPU has no UUID by which nvidia-smi could be asked who computes on it")


class CheckingNvidiaDriver(NvidiaDriver, InUseCheck):
    """Does not let a GPU be lent while a process computes on it to which it was not lent."""

    def __init__(self, *, timeout: float = 10.0, **settings: Any) -> None:
        """As `NvidiaDriver`."""
        super().__init__(timeout=timeout, **settings)
        self.call_timeout += timeout  # for the one call more

    async def look(self) -> list[Device]:
        """See `PollingDriver.look`. One more call of nvidia-smi says who computes. If it fails, nobody can tell who
        does, and the devices are what they are. While nvidia-smi hangs, there is no further call."""
        devices = await super().look()
        answer: Processes | CannotTell
        try:
            answer = Processes(await self._processes())
        except DriverError as error:
            answer = CannotTell(str(error))
        return [msgspec.structs.replace(device, users=users_of(device, answer)) for device in devices]

    async def _processes(self, *uuids: str) -> ScriptOutcome:
        """Ask for the compute processes on these GPUs; without any, on all."""
        of_these = [f"--id={','.join(uuids)}"] if uuids else []
        query = f"--query-compute-apps={','.join(FIELDS)}"
        return await nvidia_smi(*of_these, query, "--format=csv,noheader", timeout=self.timeout)

    async def in_use(self, grant: Grant) -> str | CannotTell | None:
        """See `InUseCheck.in_use`. On a lost GPU nobody computes, unless a row names a process. The owner that has
        given the devices back does not count: CUDA keeps its context until the process ends.

        Raises:
            TemporaryDriverError: nvidia-smi fails, does not end in time, or prints what is not known here, so nobody
                knows.
        """
        owner_pid = str(grant.worker.owner_pid) if grant.is_given_back else None
        left = {uuid: device for device in grant.devices if (uuid := device.get("uuid"))}
        untold = None if len(left) == len(grant.devices) else _WITHOUT_UUID
        while left:
            answer = Processes(await self._processes(*left))
            if users := list(dict.fromkeys(answer.users(left, owner_pid))):
                more = f" and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else ""
                return f"{', '.join(users[:_MOST_NAMED])}{more}"
            if answer.is_whole:
                return answer.unable or untold or unseen()
            # One lost GPU must not hide who uses the others.
            rest = {uuid: device for uuid, device in left.items() if not answer.accounts_for(device)}
            if len(rest) == len(left):
                raise TemporaryDriverError(f"nvidia-smi {answer.outcome}")
            untold = next(filter(None, [answer.untold(left[uuid]) for uuid in left.keys() - rest.keys()]), untold)
            left = rest
        return untold or unseen()


class _Process(NamedTuple):
    """A row: a process on a GPU, whose UUID is in small letters."""

    uuid: str
    pid: str
    path: str

    @property
    def name(self) -> str:
        return program_name(self.path)

    @property
    def says_nothing(self) -> bool:
        """Whether there is nothing to say of the GPU, or it is lost."""
        return _says_nothing(self.pid) and _says_nothing(self.path)


class Processes:
    """What nvidia-smi says of the processes on some GPUs: rows, and complaints beside them."""

    def __init__(self, outcome: ScriptOutcome) -> None:
        self.outcome = outcome
        self._rows: list[_Process] = []
        others: list[str] = []
        for output in (outcome.stdout, outcome.stderr):
            for line in output.decode("utf-8", "replace").splitlines():
                before, rows = _rows(line)
                others.append(before)
                self._rows += rows
        self._complaints = Complaints(others).all

    @property
    def unable(self) -> CannotTell | None:
        """What it says if it knows no processes on any GPU."""
        said = next((complaint for complaint in self._complaints if _knows_no_processes(complaint)), None)
        return None if said is None else CannotTell(f"nvidia-smi knows no processes here: {shortened(said.text)}")

    @property
    def is_whole(self) -> bool:
        """Whether a process that has no row does not exist, as far as nvidia-smi can know. It must have ended by itself
        with a known exit code, and all that it printed must be known."""
        unable = [complaint for complaint in self._complaints if _knows_no_processes(complaint)]
        if any(not _is_harmless(complaint) for complaint in self._complaints if complaint not in unable):
            return False
        if unable:
            return not self._rows and self.outcome.code in _CODES_OF_CANNOT_SAY
        instances = any(row.uuid.startswith("mig-") and not row.says_nothing for row in self._rows)
        return self.outcome.code in _CODES and not instances

    def users(self, uuids: Collection[str], owner_pid: str | None) -> Iterator[str]:
        """The processes on these GPUs, for people, but for the owner that has given them back. A process counts
        although nvidia-smi may not tell its pid."""
        names = {uuid.lower(): uuid for uuid in uuids}
        for row in self._rows:
            if row.uuid not in names or row.name == MPS_SERVER or row.pid == owner_pid:
                continue
            if row.pid.isdecimal():
                name = f" ({row.name})" if row.name else ""
                yield f"process {row.pid[:LONGEST_NAME]}{name} on {names[row.uuid]}"
            elif not row.says_nothing:
                told = printable(f"{row.pid}, {row.path}")[: 2 * LONGEST_NAME]
                yield f"a process that nvidia-smi does not name ({told}) on {names[row.uuid]}"

    def named(self, uuid: str) -> Iterator[tuple[int | None, str]]:
        """The pid and the path of each process on this GPU; None: it has no pid that can be told."""
        for row in self._rows:
            if row.uuid == uuid.lower() and not row.says_nothing:
                yield (int(row.pid) if _NUMBER.fullmatch(row.pid) else None), row.path

    def accounts_for(self, device: Mapping[str, str]) -> bool:
        """Whether it reports this GPU as lost, or as one of which it knows no processes."""
        uuid = device["uuid"].lower()
        return any(row.uuid == uuid and _LOST.match(row.pid) for row in self._rows) or any(
            (_GONE.search(complaint.text) and not _BROKEN.search(complaint.text)) or _CANNOT_SAY.search(complaint.text)
            for complaint in self._about(device)
        )

    def untold(self, device: Mapping[str, str]) -> CannotTell | None:
        """What it says if it knows no processes on this GPU, which is not lost."""
        told = [complaint for complaint in self._about(device) if _CANNOT_SAY.search(complaint.text)]
        return CannotTell(f"nvidia-smi knows no processes on it: {shortened(told[0].text)}") if told else None

    def _about(self, device: Mapping[str, str]) -> list[Complaint]:
        names = {device["uuid"].lower(), device.get("pci.bus_id", ""), device.get("index", "")}
        return [complaint for complaint in self._complaints if not names.isdisjoint(complaint.names)]


def users_of(device: Device, answer: Processes | CannotTell) -> Users:
    """Who computes on a GPU, by an answer about all of them. A process that has a row counts, whatever else is printed.
    That there is none counts only if the answer is whole."""
    if isinstance(answer, CannotTell):
        return answer
    uuid = device.properties.get("uuid")
    if uuid is None:
        return _WITHOUT_UUID
    users = device_users(answer.named(uuid))
    if users:
        return users
    if answer.is_whole and answer.unable is None:
        return unseen() or ()
    return answer.unable or CannotTell(f"nvidia-smi {answer.outcome}")


def unseen() -> CannotTell | None:
    """Why an answer without processes does not say that there are none."""
    return None if sees_all_processes() else _UNSEEN


def _rows(line: str) -> tuple[str, list[_Process]]:
    """What stands before the first row of a line, and its rows: more than one if the end of a line is missing."""
    first = _ROW.match(line)
    starts = [first] if first else []
    starts += _ROW_WITHIN.finditer(line, first.end() if first else 0)
    ends = [*(start.start() for start in starts[1:]), len(line)]
    rows = [_row(start["uuid"], line[start.end() : end].strip()) for start, end in zip(starts, ends, strict=False)]
    return line[: starts[0].start()] if starts else line, rows


def _row(uuid: str, rest: str) -> _Process:
    match = _PID.match(rest)
    pid, path = match.groups() if match else (*re.split(_BETWEEN, rest, maxsplit=1), "")[:2]
    return _Process(uuid.lower(), pid.strip(" \"'"), path.strip(" \"'"))


def _knows_no_processes(complaint: Complaint) -> bool:
    """Whether nvidia-smi says that it knows no processes, on any GPU."""
    is_error = complaint.is_loss or complaint.is_warning or _BROKEN.search(complaint.text)
    return not is_error and not complaint.names and _CANNOT_SAY.search(complaint.text) is not None


def _is_harmless(complaint: Complaint) -> bool:
    """Whether the answer is whole beside this line."""
    if _NOBODY.fullmatch(complaint.text):
        return True
    return complaint.is_warning and not _BROKEN.search(complaint.text)


def _says_nothing(value: str) -> bool:
    return not value or value.lower() in _NOTHING or _LOST.match(value) is not None

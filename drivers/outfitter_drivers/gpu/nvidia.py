"""NVIDIA GPUs from nvidia-smi: the inventory of the `gpu` driver without a script.

The driver polls nvidia-smi, because GPUs fall off the bus. It reads each answer line by line: a row is a GPU, and any
other line complains of the GPUs that it names, and of no others. So one ill GPU costs itself only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from outfitter_drivers.api import Device, PermanentDriverError, Remarks, TemporaryDriverError
from outfitter_drivers.gpu.complaints import BUS_ID, Complaint, Complaints, linux_bus_id
from outfitter_drivers.gpu.fields import (
    ERROR,
    FIELDS,
    INDEX,
    MIG_MODE,
    RECOVERY_ACTION,
    UNSAID,
    KnownFields,
    refuses,
    row_values,
    without_refused,
)
from outfitter_drivers.polling import PollingDriver
from outfitter_drivers.script import HangingError, ScriptOutcome, run_script, shortened
from outfitter_proto.records import Health

logger = logging.getLogger("outfitter.drivers")

DEFAULT_POLL_INTERVAL = 10.0
"""Seconds between two calls of nvidia-smi, which takes up to a second."""

IN_MIG_MODE = "it is in MIG mode, of which nvidia-smi does not tell enough; install the extra nvidia (nvidia-ml-py)"
"""The reason of a GPU whose instances may be lent as others' devices."""

SYSFS_PCI = Path("/sys/bus/pci/devices")

_NONE_FOUND = b"No devices were found"
_LONGEST_ACTION = 80
_MOST_REMARKS = 10


class NvidiaDriver(PollingDriver, Remarks):
    """Lists all GPUs of its machine. `poll_interval` and `timeout`, of one call of nvidia-smi, are in seconds.
    `by_index`: a worker's variable names GPUs by their indexes, not by UUIDs."""

    def __init__(
        self,
        *,
        poll_interval: float = DEFAULT_POLL_INTERVAL,
        timeout: float = 10.0,
        by_index: bool = False,
        sysfs: Path = SYSFS_PCI,
    ) -> None:
        super().__init__(poll_interval=poll_interval)
        self._by_index = by_index
        self.timeout = timeout
        self._sysfs = sysfs
        self._last: list[Device] = []
        self._remarks: set[str] = set()
        self._remarks_of_mig: list[str] = []
        self._fields = KnownFields()
        # At most four calls of nvidia-smi: for all fields, without each of the newer ones, for the index alone.
        self.call_timeout = 4 * timeout + 5

    def shortage(self, amount: int, *, healthy: int, known: int) -> str:
        return f"{amount} GPUs wanted, but nvidia-smi names {known}, of which {healthy} are healthy"

    async def look(self) -> list[Device]:
        """See `PollingDriver.look`."""
        devices = await self._look_unless_it_hangs()
        return selected_by_index(devices, _why_uncountable(devices)) if self._by_index else devices

    async def _look_unless_it_hangs(self) -> list[Device]:
        """While nvidia-smi hangs, nobody knows of the GPUs whether they are healthy."""
        try:
            devices = await self._look()
            self._log_mig()
            return devices
        except HangingError as error:
            if not self._last:
                raise
            return unknown(self._last, str(error))

    async def _look(self) -> list[Device]:
        fields, outcome = await self._ask()
        devices = self.read(outcome, fields)
        if not devices and not _says_none(outcome) and (outcome.code != 0 or other_lines(outcome)):
            printed = f"printed no GPUs but {shortened(outcome.stdout + outcome.stderr)}"
            raise TemporaryDriverError(f"nvidia-smi {printed if outcome.code == 0 else outcome}")
        self._last = devices
        return devices

    async def remarks(self) -> list[str]:
        return mig_remarks(self._last or await self._look())

    def _log_mig(self) -> None:
        """Log, once, which GPUs have MIG."""
        remarks = mig_remarks(self._last)
        for remark in [remark for remark in remarks if remark not in self._remarks_of_mig][:_MOST_REMARKS]:
            logger.warning("%s", remark)
        self._remarks_of_mig = remarks

    async def _ask(self) -> tuple[tuple[str, ...], ScriptOutcome]:
        """Ask for all fields, or for fewer if nvidia-smi does not know them. Returns the fields that it has answered.
        What it does not know is remembered. A broken one fails with fewer, too."""
        fields = await self._fields.current()
        is_refusal = False
        while True:
            outcome = await self._query(fields)
            printed = (outcome.stdout + outcome.stderr).decode("utf-8", "replace")
            if _is_answer(outcome) or fields == INDEX or (outcome.code == 0 and not refuses(printed)):
                break
            is_refusal = is_refusal or refuses(printed)
            fields = without_refused(fields, printed)
        if is_refusal and _is_answer(outcome):
            self._fields.keep(fields)
        return fields, outcome

    async def _query(self, fields: Sequence[str]) -> ScriptOutcome:
        form = "csv,noheader" if fields == INDEX else "csv,noheader,nounits"  # for the index: Flink's own arguments
        return await nvidia_smi(f"--query-gpu={','.join(fields)}", f"--format={form}", timeout=self.timeout)

    def read(self, outcome: ScriptOutcome, fields: tuple[str, ...] = FIELDS) -> list[Device]:
        """The GPUs in an answer: those with a row, and those of which it complains. Empty if it has neither."""
        complaints = Complaints(other_lines(outcome))
        rows = parse_gpus(outcome.stdout, fields, sysfs=self._sysfs)
        same_indexes = _indexes(rows) == _indexes(self._last)
        devices = [_judged(self._keep_id(row, same_indexes=same_indexes), complaints) for row in rows]
        if outcome.code != 0 or complaints.losses:
            devices += self._without_row(devices, complaints, outcome)
        if devices:
            self._log_remarks(complaints)
        return devices

    def _without_row(self, rows: Sequence[Device], complaints: Complaints, outcome: ScriptOutcome) -> list[Device]:
        """The GPUs that an answer with a complaint has no row for: those that it names, and those seen earlier. As
        nvidia-smi may stop at a lost GPU, one that it does not name stays as last seen."""
        shown = {name for row in rows for name in _names(row)}
        earlier = [device for device in self._last if shown.isdisjoint(_names(device))]
        new = _lost_gpus(complaints, (*rows, *earlier))
        if not new and not any(_about(device, complaints) for device in (*rows, *earlier)):
            if not rows:
                return []
            words = f"nvidia-smi does not name it any more; it {outcome}"
            return unknown(earlier, words)
        return [_judged(device, complaints, has_row=False) for device in earlier] + new

    def _log_remarks(self, complaints: Complaints) -> None:
        """Log, once, what nvidia-smi says besides. What it says of a lost GPU is that device's reason."""
        remarks = {shortened(complaint.text) for complaint in complaints.all if not complaint.is_loss}
        for remark in sorted(remarks - self._remarks)[:_MOST_REMARKS]:
            logger.warning("nvidia-smi says besides: %s", remark)
        self._remarks = remarks

    def _keep_id(self, device: Device, *, same_indexes: bool) -> Device:
        """Keep the id of a GPU that no longer reports its UUID: by its bus id, or without one by its index. An index
        may belong to another GPU if there are others than before."""
        identifier = "pci.bus_id" if "pci.bus_id" in device.properties else "index"
        if device.id is not None or (identifier == "index" and not same_indexes):
            return device
        for earlier in self._last:
            if earlier.properties.get(identifier) == device.properties[identifier] and earlier.id is not None:
                return msgspec.structs.replace(device, id=earlier.id, aliases=earlier.aliases)
        return device


def mig_remarks(devices: Sequence[Device]) -> list[str]:
    """A warning about each GPU that has MIG, of which nvidia-smi does not tell enough."""
    return [
        f"GPU {device.properties.get('index', '?')} ({device.id}) has MIG enabled, and is lent to nobody: nvidia-smi "
        "does not tell enough of its instances; install the extra nvidia (nvidia-ml-py), or switch MIG off (nvidia-smi "
        "-mig 0)"
        for device in devices
        if MIG_MODE in device.properties
    ]


async def nvidia_smi(*arguments: str, timeout: float) -> ScriptOutcome:
    """Call nvidia-smi for at most `timeout` seconds.

    Raises:
        PermanentDriverError: it is not there, or cannot be executed.
        TemporaryDriverError: it does not end in time.
    """
    try:
        return await run_script(["nvidia-smi", *arguments], timeout=timeout)
    except PermanentDriverError as error:
        raise PermanentDriverError(f"{error}; the gpu driver needs nvidia-smi on PATH, or a discovery script") from (
            error
        )


def other_lines(outcome: ScriptOutcome) -> list[str]:
    """The lines of an answer that are no rows of GPUs."""
    lines = outcome.stdout.decode("utf-8", "replace").splitlines()
    others = [line for line in lines if not _index(line)]
    return [line for line in (*others, *outcome.stderr.decode("utf-8", "replace").splitlines()) if line.strip()]


def parse_gpus(stdout: bytes, fields: tuple[str, ...] = FIELDS, *, sysfs: Path = SYSFS_PCI) -> list[Device]:
    """The devices in nvidia-smi's answer: a line each, which begins with an index and has all of `fields` or only the
    first ones. Other lines are passed over."""
    devices: dict[str, Device] = {}
    for line in stdout.decode("utf-8", "replace").splitlines():
        if index := _index(line):
            devices.setdefault(index, _gpu(row_values(line, fields), sysfs))
    return list(devices.values())


def _index(line: str) -> str:
    """The index with which a row begins; empty if the line is no row."""
    index = line.partition(",")[0].strip()
    return index if index.isascii() and index.isdigit() else ""


def _indexes(devices: Sequence[Device]) -> list[str | None]:
    return [device.properties.get("index") for device in devices]


def _names(device: Device) -> set[str]:
    """What tells one GPU from another, as `Complaint.names` has it: the index only without UUID and bus id."""
    bus_ids = {alias.removeprefix("pci:") for alias in device.aliases}
    uuids = {device.id.lower()} if device.id is not None and not device.id.startswith("pci:") else set[str]()
    return bus_ids | uuids or {device.properties.get("index", "")}


def _about(device: Device, complaints: Complaints) -> Complaint | None:
    return complaints.about(_names(device), device.properties.get("index"))


def _judged(device: Device, complaints: Complaints, *, has_row: bool = True) -> Device:
    """The device, unhealthy if nvidia-smi reports it as lost. With a row, a warning about it is no loss."""
    complaint = _about(device, complaints)
    if complaint is None or (has_row and not complaint.is_loss):
        return device
    return msgspec.structs.replace(device, health=Health.UNHEALTHY, reason=_words(complaint))


def _lost_gpus(complaints: Complaints, known: Sequence[Device]) -> list[Device]:
    """The GPUs of which only a complaint is known."""
    names = {name for device in known for name in (*_names(device), device.properties.get("index", ""))}
    found: list[Device] = []
    for complaint in complaints.losses:
        if names.isdisjoint(complaint.names):
            found.append(_lost(complaint))
            names.update(complaint.names)
    return found


def _lost(complaint: Complaint) -> Device:
    properties: dict[str, str] = {}
    for key, values in (("index", complaint.indexes), ("uuid", complaint.uuids), ("pci.bus_id", complaint.bus_ids)):
        if values:
            properties[key] = values[0]
    aliases = (f"pci:{bus_id}",) if (bus_id := properties.get("pci.bus_id")) else ()
    return Device(
        properties=properties,
        id=properties.get("uuid") or (aliases[0] if aliases else None),
        aliases=aliases,
        health=Health.UNHEALTHY,
        reason=_words(complaint),
    )


def _words(complaint: Complaint) -> str:
    return f"nvidia-smi: {shortened(complaint.text)}"


def _is_answer(outcome: ScriptOutcome) -> bool:
    """Whether it tells of any GPU, or that there are none."""
    rows = any(map(_index, outcome.stdout.decode("utf-8", "replace").splitlines()))
    return rows or _says_none(outcome) or bool(Complaints(other_lines(outcome)).losses)


def _says_none(outcome: ScriptOutcome) -> bool:
    return _NONE_FOUND in outcome.stdout + outcome.stderr


NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
"""CUDA ends its list at the first index that no GPU has."""


def cuda_environment(name: str) -> dict[str, str]:
    """The variables that select one GPU for CUDA; `name` is its UUID or its index in PCI bus order."""
    return {"CUDA_VISIBLE_DEVICES": name, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def unknown(devices: Iterable[Device], reason: str) -> list[Device]:
    """The devices, of which nobody knows whether they are healthy."""
    return [msgspec.structs.replace(device, health=Health.UNKNOWN, reason=reason) for device in devices]


def selected_by_index(devices: Iterable[Device], uncountable: str | None = None) -> list[Device]:
    """The devices with variables that select them by index. `uncountable`: why nobody knows which GPU an index means;
    then no healthy one is lent. None: CUDA counts them as the driver does."""
    selected = [
        msgspec.structs.replace(device, env=cuda_environment(device.properties["index"])) if device.env else device
        for device in devices
    ]
    if uncountable is None:
        return selected
    reason = f"{uncountable}; with param.visible-devices = uuid nothing depends on that"
    return [unknown((each,), reason)[0] if each.health is Health.HEALTHY else each for each in selected]


def _why_uncountable(devices: Sequence[Device]) -> str | None:
    lost = next((device for device in devices if _is_lost(device)), None)
    if lost is None:
        return None
    return f"CUDA may count the GPUs without GPU {lost.properties.get('index') or lost.id}, which is lost or ill"


def _is_lost(device: Device) -> bool:
    """Whether CUDA may not count a GPU. One that only awaits its recovery action, or is in MIG mode, has its place."""
    only_waits = (device.reason or "").startswith(f"nvidia-smi reports {RECOVERY_ACTION}: ")
    return device.health is not Health.HEALTHY and not only_waits and device.reason != IN_MIG_MODE


def _gpu(row: Mapping[str, str], sysfs: Path) -> Device:
    errors = [f"{field}: {value}" for field, value in row.items() if ERROR.search(value)]
    reported = {field: value for field, value in row.items() if value and not ERROR.search(value)}
    reported = {field: value for field, value in reported.items() if not UNSAID.fullmatch(value)}
    if (action := reported.get(RECOVERY_ACTION, "None")).lower() != "none":
        errors.append(f"{RECOVERY_ACTION}: {action[:_LONGEST_ACTION]}")
    properties = {"index": row["index"]}
    uuid = reported.get("uuid")
    if uuid:
        properties["uuid"] = uuid
    if "name" in reported:
        properties["model"] = reported["name"]
    memory = reported.get("memory.total", "")
    if memory.isascii() and memory.isdigit():
        properties["memory.total_bytes"] = str(int(memory[:12]) * 1024 * 1024)
    health, reason = (Health.UNHEALTHY, f"nvidia-smi reports {', '.join(errors)}") if errors else (Health.HEALTHY, None)
    if reported.get(MIG_MODE, "").lower() == "enabled":
        properties[MIG_MODE] = "Enabled"
        if not errors:
            health, reason = Health.UNKNOWN, IN_MIG_MODE
    aliases: tuple[str, ...] = ()
    if match := BUS_ID.fullmatch(reported.get("pci.bus_id", "")):
        properties["pci.bus_id"] = linux_bus_id(match)
        aliases = (f"pci:{properties['pci.bus_id']}",)
        if numa_node := _numa_node(sysfs / properties["pci.bus_id"]):
            properties["numa_node"] = numa_node
    return Device(
        properties=properties,
        id=uuid,
        aliases=aliases,
        health=health,
        reason=reason,
        env=cuda_environment(uuid or row["index"]),
        cdi=(f"nvidia.com/gpu={uuid or row['index']}",),
    )


def _numa_node(device: Path) -> str | None:
    try:
        node = (device / "numa_node").read_text().strip()
    except OSError:
        return None
    return node if node.isdigit() else None  # -1: the machine has only one

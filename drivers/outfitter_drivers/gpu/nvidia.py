"""NVIDIA GPUs from nvidia-smi: the inventory of the `gpu` driver without a script.

The driver polls nvidia-smi, because GPUs fall off the bus. A GPU with an error is unhealthy. If nvidia-smi then reports
only the error, the other GPUs stay as last seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from outfitter_drivers.api import Device, PermanentDriverError, TemporaryDriverError
from outfitter_drivers.polling import PollingDriver
from outfitter_drivers.script import Outcome, run_script, shortened
from outfitter_proto.records import Health

DEFAULT_POLL_INTERVAL = 10.0
"""Seconds between two calls of nvidia-smi, which takes up to a second."""

FIELDS = ("index", "uuid", "memory.total", "pci.bus_id", "name")
"""The queried fields. The name comes last because only it may contain a comma."""

SYSFS_PCI = Path("/sys/bus/pci/devices")

_NONE_FOUND = b"No devices were found"
_BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])")
_ERROR = re.compile(
    r"\[(?:Unknown Error|GPU [^\[\]]*)\]|ERR!", re.IGNORECASE
)  # linear cost, because its input is foreign
_UNSAID = re.compile(r"\[.*\]|N/A", re.IGNORECASE)


class NvidiaDriver(PollingDriver):
    """Lists all GPUs of its machine. `poll_interval` and `timeout`, of one call of nvidia-smi, are in seconds."""

    def __init__(
        self, *, poll_interval: float = DEFAULT_POLL_INTERVAL, timeout: float = 10.0, sysfs: Path = SYSFS_PCI
    ) -> None:
        super().__init__(poll_interval=poll_interval)
        self.timeout = timeout
        self._sysfs = sysfs
        self._last: list[Device] = []
        # At most two calls of nvidia-smi: for all fields, then for the index alone.
        self.call_timeout = 2 * timeout + 5

    def shortage(self, amount: int, *, healthy: int, known: int) -> str:
        return f"{amount} GPUs wanted, but nvidia-smi names {known}, of which {healthy} are healthy"

    async def look(self) -> list[Device]:
        outcome = await self._query(FIELDS)
        if outcome.code != 0 and _NONE_FOUND not in outcome.stdout + outcome.stderr:
            if lost := self._after_loss(outcome):
                return lost
            # Flink's own arguments: an old nvidia-smi does not know every field. A broken one fails again.
            outcome = await self._query(FIELDS[:1], "csv,noheader")
            if outcome.code != 0:
                raise TemporaryDriverError(f"nvidia-smi {outcome}")
        devices = parse_gpus(outcome.stdout, sysfs=self._sysfs)
        same_indexes = _indexes(devices) == _indexes(self._last)
        self._last = [self._keep_id(device, same_indexes=same_indexes) for device in devices]
        return self._last

    async def _query(self, fields: Sequence[str], form: str = "csv,noheader,nounits") -> Outcome:
        return await nvidia_smi(f"--query-gpu={','.join(fields)}", f"--format={form}", timeout=self.timeout)

    def _after_loss(self, outcome: Outcome) -> list[Device]:
        """The devices last seen, with those reported as lost marked unhealthy; empty if nvidia-smi names none."""
        complaint = shortened(outcome.stdout + outcome.stderr)
        lost = lost_gpus(outcome.stdout + outcome.stderr)
        if lost.isdisjoint(device.properties.get("pci.bus_id", "") for device in self._last):
            return []
        return [
            msgspec.structs.replace(device, health=Health.UNHEALTHY, reason=f"nvidia-smi: {complaint}")
            if device.properties.get("pci.bus_id") in lost
            else device
            for device in self._last
        ]

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


async def nvidia_smi(*arguments: str, timeout: float) -> Outcome:
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


def lost_gpus(printed: bytes) -> set[str]:
    """The bus ids, as Linux writes them, that nvidia-smi complains of."""
    return {_sysfs_bus_id(match) for match in _BUS_ID.finditer(shortened(printed))}


def _indexes(devices: Sequence[Device]) -> list[str]:
    return [device.properties["index"] for device in devices]


def parse_gpus(stdout: bytes, *, sysfs: Path = SYSFS_PCI) -> list[Device]:
    """The devices in nvidia-smi's answer: a line each, with all of `FIELDS` or only the first ones.

    Raises:
        TemporaryDriverError: a line does not begin with an index.
    """
    devices: dict[str, Device] = {}
    if _NONE_FOUND in stdout:
        return []
    for line in stdout.decode("utf-8", "replace").splitlines():
        if not line.strip():
            continue
        values = [value.strip() for value in line.split(",", len(FIELDS) - 1)]
        if not (values[0].isascii() and values[0].isdigit()):
            raise TemporaryDriverError(f"nvidia-smi printed no GPUs but {shortened(stdout)}")
        devices.setdefault(values[0], _gpu(dict(zip(FIELDS, values, strict=False)), sysfs))
    return list(devices.values())


def cuda_environment(name: str) -> dict[str, str]:
    """The variables that select one GPU for CUDA; `name` is its UUID or its index in PCI bus order."""
    return {"CUDA_VISIBLE_DEVICES": name, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _gpu(row: Mapping[str, str], sysfs: Path) -> Device:
    errors = [f"{field}: {value}" for field, value in row.items() if _ERROR.search(value)]
    reported = {field: value for field, value in row.items() if value and not _ERROR.search(value)}
    reported = {field: value for field, value in reported.items() if not _UNSAID.fullmatch(value)}
    properties = {"index": row["index"]}
    uuid = reported.get("uuid")
    if uuid:
        properties["uuid"] = uuid
    if "name" in reported:
        properties["model"] = reported["name"]
    memory = reported.get("memory.total", "")
    if memory.isascii() and memory.isdigit():
        properties["memory.total_bytes"] = str(int(memory[:12]) * 1024 * 1024)
    aliases: tuple[str, ...] = ()
    if match := _BUS_ID.fullmatch(reported.get("pci.bus_id", "")):
        properties["pci.bus_id"] = _sysfs_bus_id(match)
        aliases = (f"pci:{properties['pci.bus_id']}",)
        if numa_node := _numa_node(sysfs / properties["pci.bus_id"]):
            properties["numa_node"] = numa_node
    return Device(
        properties=properties,
        id=uuid,
        aliases=aliases,
        health=Health.UNHEALTHY if errors else Health.HEALTHY,
        reason=f"nvidia-smi reports {', '.join(errors)}" if errors else None,
        env=cuda_environment(uuid or row["index"]),
        cdi=(f"nvidia.com/gpu={uuid or row['index']}",),
    )


def _sysfs_bus_id(match: re.Match[str]) -> str:
    """nvidia-smi writes the PCI domain with eight digits in capitals, Linux with four in small letters."""
    return f"{int(match[1], 16):04x}:{match[2].lower()}"


def _numa_node(device: Path) -> str | None:
    try:
        node = (device / "numa_node").read_text().strip()
    except OSError:
        return None
    return node if node.isdigit() else None  # -1: the machine has only one

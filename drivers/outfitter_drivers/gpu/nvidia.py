"""NVIDIA GPUs as nvidia-smi tells of them: the inventory behind the `gpu` driver when no script is configured.

nvidia-smi is asked again and again, since GPUs fall off the bus. One that it reports an error for is unhealthy;
when it reports nothing else any more because of that one, the others stay as they were last seen.
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
"""Seconds between two questions to nvidia-smi, which takes up to a second to answer."""

FIELDS = ("index", "uuid", "memory.total", "pci.bus_id", "name")
"""What is asked of each GPU; the name comes last because it is the only one that may have a comma in it."""

SYSFS_PCI = Path("/sys/bus/pci/devices")

_NONE_FOUND = b"No devices were found"
_BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])")
_ERROR = re.compile(
    r"\[(?:Unknown Error|GPU [^\[\]]*)\]|ERR!", re.IGNORECASE
)  # of linear cost: what it reads is foreign
_UNSAID = re.compile(r"\[.*\]|N/A", re.IGNORECASE)


class NvidiaDriver(PollingDriver):
    """Lists all GPUs of the machine it runs on."""

    def __init__(
        self, *, poll_interval: float = DEFAULT_POLL_INTERVAL, timeout: float = 10.0, sysfs: Path = SYSFS_PCI
    ) -> None:
        super().__init__(poll_interval=poll_interval)
        self._timeout = timeout
        self._sysfs = sysfs
        self._last: list[Device] = []
        # nvidia-smi is asked twice at most: for all fields, then for the index alone.
        self.call_timeout = 2 * timeout + 5

    def shortage(self, amount: int, *, healthy: int, known: int) -> str:
        return f"{amount} GPUs wanted, but nvidia-smi names {known}, of which {healthy} are healthy"

    async def look(self) -> list[Device]:
        outcome = await self._ask(FIELDS)
        if outcome.code != 0 and _NONE_FOUND not in outcome.stdout + outcome.stderr:
            if lost := self._after_loss(outcome):
                return lost
            # An old nvidia-smi does not know every field; a broken one fails again. These are Flink's own arguments.
            outcome = await self._ask(FIELDS[:1], "csv,noheader")
            if outcome.code != 0:
                raise TemporaryDriverError(f"nvidia-smi {outcome}")
        self._last = [self._keep_id(device) for device in parse_gpus(outcome.stdout, sysfs=self._sysfs)]
        return self._last

    async def _ask(self, fields: Sequence[str], form: str = "csv,noheader,nounits") -> Outcome:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", f"--format={form}"]
        try:
            return await run_script(command, timeout=self._timeout)
        except PermanentDriverError as error:
            raise PermanentDriverError(
                f"{error}; the gpu driver needs nvidia-smi on PATH, or a discovery script"
            ) from (error)

    def _after_loss(self, outcome: Outcome) -> list[Device]:
        """What was seen last, with the GPUs that nvidia-smi complains of as unhealthy; nothing if it names none."""
        complaint = shortened(outcome.stdout + outcome.stderr)
        lost = {_sysfs_bus_id(match) for match in _BUS_ID.finditer(complaint)}
        if lost.isdisjoint(device.properties.get("pci.bus_id", "") for device in self._last):
            return []
        return [
            msgspec.structs.replace(device, health=Health.UNHEALTHY, reason=f"nvidia-smi: {complaint}")
            if device.properties.get("pci.bus_id") in lost
            else device
            for device in self._last
        ]

    def _keep_id(self, device: Device) -> Device:
        """A GPU that no longer tells its UUID is still the one that was seen at its place."""
        if device.id is not None:
            return device
        for known in self._last:
            if known.properties["index"] == device.properties["index"] and known.id is not None:
                return msgspec.structs.replace(device, id=known.id, aliases=known.aliases)
        return device


def parse_gpus(stdout: bytes, *, sysfs: Path = SYSFS_PCI) -> list[Device]:
    """The devices that nvidia-smi's answer describes: a line each, with all of `FIELDS` or the first ones alone.

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
    """The variables that make CUDA show one GPU; `name` is its UUID or its index in the order of the PCI bus."""
    return {"CUDA_VISIBLE_DEVICES": name, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _gpu(row: Mapping[str, str], sysfs: Path) -> Device:
    errors = [f"{field}: {value}" for field, value in row.items() if _ERROR.search(value)]
    said = {field: value for field, value in row.items() if value and not _ERROR.search(value)}
    said = {field: value for field, value in said.items() if not _UNSAID.fullmatch(value)}
    properties = {"index": row["index"]}
    uuid = said.get("uuid")
    if uuid:
        properties["uuid"] = uuid
    if "name" in said:
        properties["model"] = said["name"]
    memory = said.get("memory.total", "")
    if memory.isascii() and memory.isdigit():
        properties["memory.total_bytes"] = str(int(memory[:12]) * 1024 * 1024)
    aliases: tuple[str, ...] = ()
    if match := _BUS_ID.fullmatch(said.get("pci.bus_id", "")):
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
    """nvidia-smi writes the PCI domain with eight digits, in capitals; Linux writes four, in small letters."""
    return f"{int(match[1], 16):04x}:{match[2].lower()}"


def _numa_node(device: Path) -> str | None:
    try:
        node = (device / "numa_node").read_text().strip()
    except OSError:
        return None
    return node if node.isdigit() else None  # -1: the machine has but one

"""The stages of `make gpu-check`: the driver, the in-use check and whole workers on a machine with NVIDIA's GPUs.

Each stage says what it saw, or raises an AssertionError with what was wrong. Each has a time limit; together they end
within five minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio

from gpu.machine import Machine
from outfitter_drivers.api import Device, Grant, Worker
from outfitter_drivers.nvidia.driver import CheckingNvmlDriver, Interface, processes
from outfitter_proto.records import Health

T = TypeVar("T")
STAGE_S = 60.0
"""Seconds that any one thing may take."""
WORKER = Worker(host="gpu-check", resource="gpu", worker="w", incarnation="1")


class Row(NamedTuple):
    stage: str
    passed: bool
    seconds: float
    saw: str


def rows(machine: Machine) -> Iterator[Row]:
    """All stages, one after the other. One that fails does not end the check."""
    stages: tuple[tuple[str, Callable[[Machine], str]], ...] = (
        ("nvidia-smi", by_smi),
        ("the driver by NVML", by_nvml),
        ("the driver by nvidia-smi", by_both),
        ("what CUDA sees", by_cuda),
        ("who uses a GPU", in_use),
        ("two workers, and one that waits", workers),
        ("letting go", release),
    )
    for name, stage in stages:
        began = time.monotonic()
        try:
            passed, saw = True, stage(machine)
        except Exception as error:  # noqa: BLE001 - it is a row of the table
            passed, saw = False, f"{type(error).__name__}: {error}"
        yield Row(name, passed, time.monotonic() - began, " ".join(saw.split()))


def by_smi(machine: Machine) -> str:
    told = machine.smi()
    assert told, "nvidia-smi names no GPU"
    return f"{len(told)} × {told[0].get('name')}, driver {told[0].get('driver_version')}"


def by_nvml(machine: Machine) -> str:
    """The driver names what nvidia-smi names."""
    looks: list[float] = []

    async def look(driver: CheckingNvmlDriver) -> list[Device]:
        for _ in range(2):
            began = time.monotonic()
            devices = await driver.look()
            looks.append(time.monotonic() - began)
        memory = _memory_kib(driver.nvml.pid)
        with anyio.fail_after(STAGE_S):
            await driver.nvml.wait(0.1)
        remarks = "; ".join(await driver.remarks())
        said.append(f"child {memory // 1024} MiB" + (f"; remarks: {remarks}" if remarks else ""))
        return devices

    said: list[str] = []
    devices = _asked(machine, Interface.NVML, look)
    wholes = [device for device in devices if device.part_of is None]
    for device, row in zip(wholes, machine.smi(), strict=True):
        mib = int(device.properties["memory.total_bytes"]) // 2**20
        assert (device.id, device.properties["model"]) == (row["uuid"], row["name"]), f"{device} is not {row}"
        assert abs(mib - int(row["memory.total"])) <= 1, f"{mib} MiB, nvidia-smi: {row['memory.total']}"
        assert row["pci.bus_id"].lower().endswith(device.properties["pci.bus_id"]), f"{device} is not at {row}"
    first = devices[0].properties
    shown = ", ".join(f"{name} {first[name]}" for name in ("compute_capability", "cuda_version") if name in first)
    ill = [f"{device.id} is {device.health} ({device.reason})" for device in devices if device.reason]
    return f"{len(devices)} devices; looks {looks[0]:.2f} s, {looks[1]:.3f} s; {shown}; {'; '.join([*said, *ill])}"


def by_both(machine: Machine) -> str:
    """A GPU has the same identity by either way, and no property that contradicts the other way."""
    by_nvml = {each.id: each for each in _asked(machine, Interface.NVML, CheckingNvmlDriver.look)}
    by_smi = _asked(machine, Interface.NVIDIA_SMI, CheckingNvmlDriver.look)
    for device in by_smi:
        other = by_nvml[device.id]
        assert (device.aliases, device.env) == (other.aliases, other.env), f"{device} is not {other}"
        differs = {
            name: (value, other.properties.get(name))
            for name, value in device.properties.items()
            if other.properties.get(name) != value and name != "memory.total_bytes"
        }
        assert not differs, f"{device.id} differs: {differs}"
    return f"{len(by_smi)} GPUs with the same ids, aliases, variables and properties"


def by_cuda(machine: Machine) -> str:
    """A process with a device's variables sees that GPU, and no other one."""
    seen = 0
    for device in _healthy(machine):
        with _cuda(machine, device) as told:
            assert told["uuids"] == [(device.id or "").partition("-")[2]], (
                f"CUDA sees {told['uuids']} where {device.id} was meant"
            )
            seen += 1
    return f"{seen} GPUs, each alone"


def in_use(machine: Machine) -> str:
    """A process on a GPU keeps it from being lent again, until it ends."""
    device = _healthy(machine)[0]
    grant = Grant(allocation="a", token=1, worker=WORKER, device_ids=(device.id or "",), devices=(device.properties,))

    async def ask(driver: CheckingNvmlDriver) -> tuple[str | None, str | None]:
        snapshot = await driver.nvml.look()
        return await driver.in_use(grant), processes(snapshot)[device.id or ""].unsaid

    before, unsaid = _asked(machine, Interface.NVML, ask)
    if unsaid is not None:
        return f"NVML cannot tell here: {unsaid}"
    assert before is None, f"before: {before}"
    with _cuda(machine, device) as told:
        machine.uses(device.id, [told["pid"]])
        during, _ = _asked(machine, Interface.NVML, ask)
        machine.uses(device.id, [])
    assert during is not None, "nobody was named"
    assert str(told["pid"]) in during, f"named {during} where process {told['pid']} was meant"
    after, _ = _asked(machine, Interface.NVML, ask)
    assert after is None, f"after its end: {after}"
    return f"{during}; nobody before and after"


def workers(machine: Machine) -> str:
    """Two workers share the GPUs, a third waits until one has ended; on one GPU, two wait."""
    with _serving(machine) as bus:
        count = len(_healthy(machine))
        amounts = [count // 2, count - count // 2] if count > 1 else [count]
        holders = [_run(machine, bus, f"w{number}", amount) for number, amount in enumerate(amounts)]
        held = [_told(holder)["uuids"] for holder in holders]
        assert sorted(map(len, held)) == sorted(amounts), f"CUDA shows {held} where {amounts} were granted"
        assert len({uuid for each in held for uuid in each}) == count, f"a GPU was lent twice: {held}"
        waiting = _run(machine, bus, "waits", 1)
        reason = _until_pending(machine, bus, "waits")
        _end(holders[0])
        got = _told(waiting)["uuids"]
        assert set(got) <= set(held[0]), f"{got} was lent, which nobody gave back"
        for each in (*holders[1:], waiting):
            _end(each)
        return f"{amounts} GPUs held, each seen by CUDA; the next worker waited ({reason}) and then had {got[0]}"


def release(machine: Machine) -> str:
    """While a command runs, no manager has a GPU open."""
    with _serving(machine) as bus:
        before = _run(machine, bus, "before", 1)
        _told(before)
        _end(before)
        command = ["nvidia", "release", "--within", "30s", "--", "nvidia-smi"]
        done = subprocess.run(machine.outfitter(*command), capture_output=True, text=True, timeout=STAGE_S, check=False)
        assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
        assert "let go of their GPUs: 1" in done.stderr, done.stderr
        again = _run(machine, bus, "after", 1)
        got = _told(again)["uuids"]
        _end(again)
        return f"{' '.join(done.stderr.split())}; a worker had {got[0]} afterwards"


# --- helpers ---


def _asked(machine: Machine, interface: Interface, question: Callable[[CheckingNvmlDriver], Awaitable[T]]) -> T:
    """What a driver of its own answers."""

    async def main() -> T:
        driver = machine.driver(interface)
        try:
            with anyio.fail_after(STAGE_S):
                return await question(driver)
        finally:
            await driver.aclose()

    return anyio.run(main)


def _healthy(machine: Machine) -> list[Device]:
    devices = _asked(machine, Interface.NVML, CheckingNvmlDriver.look)
    healthy = [device for device in devices if device.health is Health.HEALTHY]
    assert healthy, f"no healthy GPU: {[device.reason for device in devices]}"
    return healthy


@contextmanager
def _cuda(machine: Machine, device: Device) -> Iterator[dict[str, Any]]:
    """A process that uses a device."""
    process = subprocess.Popen(
        machine.cuda, env={**os.environ, **device.env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield _told(process)
    finally:
        _end(process)


@contextmanager
def _serving(machine: Machine) -> Iterator[str]:
    """A manager on a bus of its own. Yields the bus."""
    folder = Path(tempfile.mkdtemp(dir=machine.folder))
    bus = f"sqlite:///{folder}/bus.db"
    config = folder / "outfitter.toml"
    config.write_text(
        'external-resources = ["gpu"]\n\n[external-resource.gpu]\namount = 1\nmin-healthy-time = "0s"\n'
        + machine.config
    )
    command = ("serve", "--bus", bus, "--config", str(config), "--host", "gpu-check", "--http", "127.0.0.1:0")
    with (folder / "log").open("wb") as log:
        manager = subprocess.Popen(machine.outfitter(*command), stdout=log, stderr=log)
    try:
        yield bus
    finally:
        manager.terminate()
        manager.wait(timeout=STAGE_S)


def _run(machine: Machine, bus: str, name: str, amount: int) -> subprocess.Popen[str]:
    command = ("run", "--bus", bus, "--host", "gpu-check", "--worker", name, "--resource", f"gpu={amount}")
    return subprocess.Popen(
        machine.outfitter(*command, "--wait-for-manager", "--wait", f"{STAGE_S:g}s", "--", *machine.cuda),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The first line of a process, or an AssertionError after its end."""
    line = process.stdout.readline() if process.stdout else ""
    assert line, f"it ended with {process.wait()} instead"
    told: dict[str, Any] = json.loads(line)
    return told


def _until_pending(machine: Machine, bus: str, name: str) -> str:
    """Why a worker waits, once it does."""
    command = machine.outfitter("status", "--bus", bus, "--json", "--state", "pending")
    end = time.monotonic() + STAGE_S
    while time.monotonic() < end:
        said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=STAGE_S).stdout)
        for worker in said if isinstance(said, list) else said.get("workers", []):
            if worker.get("worker") == name:
                return str(worker.get("reason"))
        time.sleep(0.2)
    raise AssertionError(f"worker {name} does not wait")


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin:
        process.stdin.close()
    process.wait(timeout=STAGE_S)
    if process.stdout:
        process.stdout.close()


def _memory_kib(pid: int | None) -> int:
    """The resident memory of a process: proc(5), `VmRSS` of `/proc/<pid>/status`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0

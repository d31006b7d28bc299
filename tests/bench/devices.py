"""What many devices on one host cost: a driver's report, a choice among them, and a look by NVML.

The core is asked for itself. NVML is the driver's fake in a real NVML process, so that its look is our side of it: the
process, nvidia-ml-py, what the driver makes of the answer. Python answers there in place of NVIDIA's library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import anyio

from bench import machine
from bench.report import Row
from outfitter_drivers.nvidia.testing import FakeGpu, FakeMachine
from outfitter_proto.keys import host_writer
from outfitter_proto.records import Condition, Host, ManagerIdentity, Register, ResourceRequest, Source
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules, decide
from outfitter_service.core.state.ledger import Ledger, PutRecord
from support.core.decided import apply

HOST = "bench"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
OFTEN = 7
REPORTED = 10_000, 3_800
"""Devices with one name each, and with two: as many as a host's record has room for, if a device's take 100 bytes."""
CHOSEN_AMONG = 1_024
LOOKED_AT = (8, 1_024)
TURN_MS = 50.0
RULES = Rules(writer=host_writer(HOST), specs={"gpu": m.ResourceSpec(name="gpu")})


def measure(folder: Path) -> list[Row]:
    """All of it. `folder`: of its own, for the fake."""
    return [*_reports(), *_choices(), *anyio.run(_looks, folder)]


def _gpu(number: int, *, names: int = 2) -> m.KnownDevice:
    return m.KnownDevice(
        id=f"GPU-{number:08x}-{'0' * 36}",
        aliases=(f"pci:{number:08x}:{'0' * 36}",)[: names - 1],
        properties={
            "index": str(number),
            "model": ("NVIDIA A100", "NVIDIA H100 80GB HBM3")[number % 2],
            "memory.total_bytes": str(85_520_809_984 - number % 3),
            "nvlink.group": f"{number // 8},{number // 16}s",
        },
    )


def _ledger(count: int, *, names: int = 2) -> Ledger:
    """A host with so many devices, half of which are held."""
    ledger = Ledger()
    manager = ManagerIdentity(instance="one", version="0", since=NOW)
    ledger.change(PutRecord(Host(host=HOST, manager=manager, since=NOW)))
    apply(decide(ledger, RULES, _report(count, names=names), NOW), ledger)
    for number in range(count // 2):
        asked = {"gpu": ResourceRequest(amount=1)}
        register = Register(host=HOST, worker=f"w{number}", incarnation="1", resources=asked)
        apply(decide(ledger, RULES, m.Incoming(register, Source(partition=0, offset=number)), NOW), ledger)
    return ledger


def _report(count: int, *, names: int) -> m.DriverReport:
    return m.DriverReport(
        host=HOST, resource="gpu", devices=tuple([_gpu(number, names=names) for number in range(count)])
    )


def _took_ms(ledger: Ledger, event: m.DriverReport | m.Incoming, *, is_applied: bool = False) -> float:
    begun = time.perf_counter()
    decision = decide(ledger, RULES, event, NOW)
    if is_applied:
        apply(decision, ledger)
    return (time.perf_counter() - begun) * 1e3


def _reports() -> Iterator[Row]:
    """A driver's report, with all that its turn of the event loop computes."""
    for names, count in enumerate(REPORTED, 1):
        ledger = _ledger(count, names=names)
        told = f"a report of {count:,} devices with {names} names each"
        for what, more in ((f"{told}, the same again", 0), (f"{told}, and a new one", 1)):
            took = []
            for number in range(OFTEN):
                report = _report(count + more * (number + 1), names=names)
                took.append(_took_ms(ledger, report, is_applied=True))
            yield Row(what, "ms", statistics.median(took), aim=f"< {TURN_MS:g}")


def _choices() -> Iterator[Row]:
    """A choice by clauses that the manager has seen since the devices were reported, and by new ones."""
    asked = ResourceRequest(
        amount=2, where={"memory.total_bytes": Condition(min="40Gi"), "model": "*H100*"}, same=("nvlink.group",)
    )
    message = Register(host=HOST, worker="w", incarnation="1", resources={"gpu": asked})
    took: dict[str, list[float]] = {"new": [], "seen before": []}
    for _ in range(OFTEN):
        ledger = _ledger(CHOSEN_AMONG)
        for times in took.values():
            incoming = m.Incoming(message, Source(partition=0, offset=CHOSEN_AMONG))
            times.append(_took_ms(ledger, incoming))
    for (what, times), aim in zip(took.items(), ("<= 10", "<= 1"), strict=True):
        yield Row(
            f"a choice among {CHOSEN_AMONG:,} devices with where and same, {what}", "ms", statistics.median(times),
            aim=aim,
        )  # fmt: skip


async def _looks(folder: Path) -> list[Row]:
    """Looks at GPUs, and the memory of the process that asks NVML."""
    rows: list[Row] = []
    for count in LOOKED_AT:
        gpus = [FakeGpu(number, bus_id=f"{number:04x}:19:00.0") for number in range(count)]
        driver = FakeMachine(folder / str(count), gpus).driver()
        try:
            await driver.look()
            took = []
            for _ in range(OFTEN):
                begun = time.perf_counter()
                found = await driver.look()
                took.append((time.perf_counter() - begun) * 1e3)
                if len(found) != count:
                    raise RuntimeError(f"{len(found)} of {count} GPUs were found")
            rows.append(Row(f"a look by NVML at {count:,} GPUs, of the fake", "ms", statistics.median(took)))
            pid = driver.nvml.pid
            rows.append(Row("  memory of the NVML process", "MiB", machine.resident_bytes(pid) / 2**20))
        finally:
            await driver.aclose()
    return rows

"""Made-up fleets for the console, as managers' records: a large one with troubles, and a calm one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from msgspec import UNSET, structs

from outfitter_proto.records import (
    Allocation,
    Cordon,
    DeadLetter,
    Host,
    InventoryDevice,
    ManagerIdentity,
    MessageSource,
    ResourceInventory,
    Transition,
)
from support.api import allocation, cordon

NOW = datetime.now(UTC)
Record = Host | Allocation | Cordon
FAR = "outfitter.dev.gpu-worker-0012.eu-central-1.compute.internal"
"""A long name, as clouds give them."""


def host(
    name: str, health: list[str], *, reason: str = "", used_by: str = "", stopped: datetime | None = None, **more: Any
) -> Host:
    """A host with a GPU for each word of `health`. `used_by`: a stranger on each. `more`: further resources."""
    devices = [
        InventoryDevice(
            id=f"GPU-{name}-{index}", health=word, reason=None if word == "healthy" else reason,
            properties={"index": str(index), "name": "NVIDIA H100 80GB HBM3", "id": f"GPU-{name}-{index}"},
            used_by=used_by or UNSET,
        )
        for index, word in enumerate(health)
    ]  # fmt: skip
    gpus = ResourceInventory(state="reported", amount=1, devices=devices, healthy=health.count("healthy"))
    since = datetime.now(UTC) - timedelta(days=3)
    manager = ManagerIdentity(instance="i", version="0.1.0", since=since, stopped_at=stopped)
    return Host(host=name, manager=manager, since=since, resources={"gpu": gpus, **more})


def holder(name: str, index: int, *, worker: str = "", state: str = "allocated", **more: Any) -> Allocation:
    """A worker that holds one GPU of a host."""
    record = allocation(name, worker or f"tm-{name}-{index}", state, devices=[f"GPU-{name}-{index}"], **more)
    return structs.replace(record, since=datetime.now(UTC) - timedelta(minutes=40), token=index + 1)


def waiter(name: str, worker: str, position: int, minutes: float, amount: int = 1, **more: Any) -> Allocation:
    """A worker that waits on a host."""
    record = allocation(name, worker, "pending", offset=position, queue_position=position, **more)
    request = structs.replace(record.request, amounts={"gpu": amount})
    return structs.replace(record, request=request, since=datetime.now(UTC) - timedelta(minutes=minutes))


def ended(name: str, worker: str) -> Allocation:
    return structs.replace(allocation(name, worker, "ended"), since=datetime.now(UTC))


def step(record: Allocation, event: str, explanation: str, *, before: str | None = None) -> Transition:
    """A step of history that led to a record."""
    return Transition(
        at=record.since, host=record.host, worker=record.worker, incarnation=record.incarnation, event=event,
        from_=before, to=record.state, explanation=explanation, record=record,
    )  # fmt: skip


def letter(host: str, reason: str) -> DeadLetter:
    """A message to a host that was refused just now."""
    source = MessageSource(topic="outfitter.registrations", partition=0, offset=7)
    return DeadLetter(
        at=datetime.now(UTC), writer=f"host/{host}", source=source, reason=reason, length=2, sha256="0", body=b"{}",
        message_key=host,
    )  # fmt: skip


def troubled(hosts: int, devices: int = 8) -> Iterator[Record]:
    """A fleet in which some things are wrong; of 100 hosts about 3 have an unhealthy device."""
    random = Random(7)
    names = [f"gpu-{number:04d}" for number in range(hosts)]
    silent, worst, fpgas = names[hosts * 2 // 5], names[hosts // 10], {names[3 % hosts], names[8 % hosts]}
    busy = "busy: 1 gpu wanted, 0 of 8 free; the next one is due when the lease of tm-3 ends"
    for name in names:
        odds = 0.4 if name == worst else 0.004
        health = ["unhealthy" if random.random() < odds else "healthy" for _ in range(devices)]
        more = {}
        if name in fpgas:
            more["fpga"] = ResourceInventory(state="driver-failed", reason="timed out after 10 s")
        stopped = datetime.now(UTC) - timedelta(minutes=6) if name == silent else None
        yield host(name, health, reason="Xid 79: the GPU has fallen off the bus", stopped=stopped, **more)
        for index, word in enumerate(health):
            if word == "healthy" and random.random() < 0.78:
                yield holder(name, index)
    for number in range(29):
        where, worker = silent if number < 2 else names[number % hosts], f"flink-prod-tm-{number}"
        yield waiter(where, worker, number + 1, 14 - number / 4, reason=busy, reason_code="busy")
    for number in range(3):
        reason = "infeasible: 16 gpu wanted, and the host has 8 healthy ones"
        yield waiter(names[1], f"train-{number}", number + 40, 22, 16, reason=reason, reason_code="infeasible")


def calm(hosts: int = 3) -> Iterator[Record]:
    """A fleet in which all is well."""
    for number in range(hosts):
        yield host(f"gpu-{number}", ["healthy"] * 4)
        yield holder(f"gpu-{number}", 0)


def shapes() -> Iterator[Record]:
    """One host of each kind that a tile can show."""
    yield host("all-free", ["healthy"] * 8)
    yield host("all-held", ["healthy"] * 8)
    yield from (holder("all-held", index) for index in range(8))
    yield host("ill", ["unhealthy", "unknown", "healthy", "healthy"], reason="ECC errors: 12 uncorrectable")
    yield holder("ill", 0)
    yield holder("ill", 2, state="releasing", delayed_by="process 4711 (python train.py) still uses it")
    yield host("silent", ["healthy"] * 4, stopped=datetime.now(UTC) - timedelta(hours=3))
    yield host("silent-and-missed", ["healthy"] * 4, stopped=datetime.now(UTC) - timedelta(hours=3))
    yield holder("silent-and-missed", 1)
    yield waiter("silent-and-missed", "forgotten", 1, 3, reason="busy: 4 gpu wanted, 3 of 4 free", reason_code="busy")
    yield host(FAR, ["healthy"] * 8)
    yield host("many", ["healthy"] * 200)
    yield from (holder("many", index) for index in range(150))
    yield host("none", [])
    yield host("out", ["healthy"] * 3 + ["unhealthy"], reason="XID 79", stopped=datetime.now(UTC) - timedelta(hours=1))
    yield holder("out", 1)
    yield cordon("out", since=datetime.now(UTC) - timedelta(hours=2))
    failed = structs.replace(allocation("none", "asks-for-too-much", "failed"), since=datetime.now(UTC))
    yield structs.replace(failed, reason="too-large: ask for fewer devices", reason_code="too-large")
    yield waiter("all-held", "patient", 1, 3, reason="busy: 1 gpu wanted, 0 of 8 free", reason_code="busy")

"""How long after an order was written it is in effect on Kafka, with a quiet manager and with one that answers."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct

from bench import loads
from outfitter_proto.bus import Bus, Entry, Reader
from outfitter_proto.bus.kafka.adapter import KafkaBus
from outfitter_proto.codec import encode
from outfitter_proto.names import control_topic, topics
from outfitter_proto.records import CordonOrder

LIMIT_MS = 1000.0
RATE = 200
"""Registrations a second of the load."""
WITHIN_S = 30.0


class Effects(Struct, kw_only=True):
    """Milliseconds from an order, and from its end, to the record that says so."""

    quiet: list[float]
    loaded: list[float]


async def measure(url: str, cluster: str, rounds: int) -> Effects:
    """Give and end `rounds` orders for one device of a manager that is at work there, twice."""
    async with KafkaBus(url) as bus:
        quiet = await _rounds(bus, cluster, rounds, "quiet")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_load, bus, cluster, tasks)
            loaded = await _rounds(bus, cluster, rounds, "loaded")
            tasks.cancel_scope.cancel()
    return Effects(quiet=quiet, loaded=loaded)


async def _rounds(bus: Bus, cluster: str, rounds: int, name: str) -> list[float]:
    took: list[float] = []
    ledger = topics(cluster).allocations
    _, end = await bus.offsets(ledger, 0)
    async with await bus.open_reader(ledger, 0, start=end, committed=True) as reader:
        for number in range(rounds):
            order = CordonOrder(
                id=f"{name}-{number}", host=loads.HOST, author="bench", reason="a round", at=datetime.now(UTC),
                device="none",
            )  # fmt: skip
            took.append(await _given(bus, cluster, reader, order))
            ended = CordonOrder(
                id=order.id, host=order.host, author="bench", reason="a round", at=order.at, device="none",
                ended_at=datetime.now(UTC),
            )  # fmt: skip
            took.append(await _given(bus, cluster, reader, ended))
    return took


async def _given(bus: Bus, cluster: str, reader: Reader, order: CordonOrder) -> float:
    key = f"@cordon/{order.host}/{order.id}".encode()
    begun = time.perf_counter()
    await bus.publish(control_topic(cluster), 0, Entry(order.key.encode(), encode(order)))
    with anyio.fail_after(WITHIN_S):
        while True:
            messages = await reader.fetch(timeout=1.0)
            if any(each.key == key and (each.value is None) == bool(order.ended_at) for each in messages):
                return (time.perf_counter() - begun) * 1000


async def _load(bus: Bus, cluster: str, tasks: TaskGroup) -> None:
    """Registrations at `RATE`, which all are granted."""
    number = 0
    begun = anyio.current_time()
    while True:
        value = loads.registration(number, resource=loads.nth_resource(0))
        tasks.start_soon(bus.publish, topics(cluster).registrations, 0, Entry(loads.HOST.encode(), value))
        number += 1
        await anyio.sleep_until(begun + number / RATE)

"""A manager starts again with the worst messages that are known in its input, and answers what comes behind them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from aiokafka.record.util import calc_crc32c

from outfitter_proto.bus import Entry
from outfitter_proto.codec import MAX_MESSAGE_BYTES
from runtime.conftest import Serve
from runtime.processor.commit.test_size_of_answers import packed, read
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.managers.in_process import HOST, TOPICS, InProcessManager, bulky, deregister, heartbeat, register, static

TIMES = 30
CRC_AT, RECORDS_AT = 17, 61
"""In a record batch of Kafka."""


def compact(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def with_a(field: str, value: bytes) -> bytes:
    """A registration with a field as long as the topic takes it, or nearly."""
    return compact(register("w"))[:-1] + b',"' + field.encode() + b'":' + value + b"}"


def later(operators: int, fields: int = 1) -> bytes:
    """A registration whose operators have fields of a later version."""
    wanted = {"gpu": {"amount": 1} | {f"x{number}": 1 for number in range(fields)}}
    return compact(register("w", f"o{operators}") | {"operators": {f"o{n}": wanted for n in range(operators)}})


def unreadable(number: int) -> bytes | None:
    """A record batch that cannot be read, as a reader hands it out."""
    [whole] = packed([compact(register("w"))] * 100)
    batch = bytearray(whole[:RECORDS_AT] + bytes([number % 256]) * (len(whole) - RECORDS_AT))
    struct.pack_into(">I", batch, CRC_AT, calc_crc32c(bytes(batch[CRC_AT + 4 :])))
    [entry] = read(bytes(batch))
    return entry.value


WORST: dict[str, Callable[[int], bytes | None]] = {
    "registrations as large as may be": lambda n: compact(register(f"w{n}", resources={}, operators=bulky(250))),
    "more operators than may be, with unknown fields": lambda _: later(1600),
    "as many operators as may be, with unknown fields": lambda _: later(256, 20),
    "unknown fields": lambda _: compact(register("w", "u") | {f"{n:x}": n for n in range(5000)}),
    "deep JSON without an end": lambda _: with_a("labels", b"[" * 60_000),
    "deep JSON in a field": lambda _: with_a("labels", b"[" * 30_000 + b"]" * 30_000),
    "deep JSON in an unknown field": lambda _: with_a("later", b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "a long whole number": lambda _: with_a("priority", b"9" * 60_000),
    "a long fraction": lambda _: with_a("lease_s", b"0." + b"9" * 60_000),
    "a long exponent": lambda _: with_a("wait_s", b"1e" + b"9" * 60_000),
    "a long number in an unknown field": lambda _: with_a("later", b"-" + b"9" * 60_000),
    "a number beyond all numbers in an unknown field": lambda _: with_a("later", b"1e999"),
    "a fault that is hard to find": lambda n: compact(
        register("w") | {"labels": {f"{place:05}": "x" for place in range(4000)} | {"99999": n}}
    ),
    "a long reason": lambda n: compact(deregister("w", f"i{n}") | {"reason": "A" * 60_000}),
    "a long name": lambda _: compact(heartbeat("w" * 60_000)),
    "garbage": lambda n: bytes([n % 256]) * (MAX_MESSAGE_BYTES - len(HOST)),
    "batches of garbage": unreadable,
    "empty messages": lambda _: b"",
    "tombstones": lambda _: None,
}


@pytest.mark.parametrize("kind", WORST)
async def test_it_starts_again_with_them_in_its_input_and_answers_the_next(
    bus: FaultyBus, serve: Serve, kind: str
) -> None:
    async with serve(static(1)) as manager:
        await answered(manager, "before")  # and then it dies
    for number in range(TIMES):
        await put(bus, WORST[kind](number))
    for life in ("with them", "behind them"):
        async with serve(static(1)) as manager:
            await answered(manager, life)
            assert manager.metric("outfitter_events_total", kind="defect") == 0
    assert (await verdict(bus.url)).violations == ()


async def test_it_starts_again_with_all_of_them_in_its_input(bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(1)) as manager:
        await answered(manager, "before")
    for number in range(3):
        for make in WORST.values():
            await put(bus, make(number))
    async with serve(static(1)) as manager:
        await answered(manager, "behind them")
    assert (await verdict(bus.url)).violations == ()


async def put(bus: FaultyBus, value: bytes | None) -> None:
    await bus.publish(TOPICS.registrations, 0, Entry(HOST.encode(), value))


async def answered(manager: InProcessManager, worker: str) -> None:
    await manager.say(register(worker.replace(" ", "-"), resources={}))
    with anyio.fail_after(60):
        await manager.state(worker.replace(" ", "-"), "allocated")
        await manager.reported()

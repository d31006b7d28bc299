"""Registrations to measure with: a backlog written at once, or a stream at a rate with its answers timed.

Registrations are published and answers read and decoded the way workers do it. What answers, a manager or the bare
loop, makes no difference here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import anyio
from msgspec import Struct

from outfitter_proto import codec
from outfitter_proto.bus import Bus, Entry, Message, Reader
from outfitter_proto.names import Topics, topics
from outfitter_proto.records import Allocation, AllocationState, Register, ResourceRequest

HOST = "bench"
REGISTRATION_BYTES = 418
"""The size that the figures of other measurements of this kind were made with."""
DEVICES = 10_000
"""Devices of one resource, the most that the static driver takes: registrations beyond ask for the next resource."""
BACKLOG_BATCH = 128
ANSWERED_WITHIN = 60.0
FIRST = 5
"""Answers of a stream that are not timed: whoever answers has been idle until then."""


class Progress(Struct, kw_only=True):
    """What became of a backlog: `commits` holds, for each commit with answers, when its batch was finished
    (milliseconds) and how many answers had been given by then."""

    answers: int
    commits: list[tuple[int, int]]

    @property
    def rate(self) -> float:
        """Answers a second, from the first commit with answers to the last."""
        (begun, before), (ended, after) = self.commits[0], self.commits[-1]
        return (after - before) * 1000 / max(1, ended - begun)


def incarnation(number: int) -> str:
    return f"01a1fec4-4ef5-70a4-bed7-{number:012d}"


def worker(number: int) -> str:
    return f"worker-{number:08d}"


def nth_resource(number: int) -> str:
    return f"gpu-{number // DEVICES:03d}"


def registration(number: int, *, host: str = HOST, resource: str | None = None) -> bytes:
    """One worker's registration for one device, of `REGISTRATION_BYTES` bytes, without a lease. `resource` left out:
    the one that has devices left."""
    empty = Register(
        host=host,
        worker=worker(number),
        incarnation=incarnation(number),
        resources={resource or nth_resource(number): ResourceRequest(amount=1)},
        lease_s=None,
        labels={"job": "mnist", "note": ""},
    )
    body = codec.encode(empty)
    return body.replace(b'"note":""', b'"note":"%b"' % (b"x" * (REGISTRATION_BYTES - len(body))))


async def publish_backlog(bus: Bus, cluster: str, numbers: range) -> None:
    """Publish the registrations of `numbers`, in order, as fast as the broker takes them."""
    topic = topics(cluster).registrations
    for start in range(numbers.start, numbers.stop, BACKLOG_BATCH):
        async with anyio.create_task_group() as tasks:
            for number in range(start, min(start + BACKLOG_BATCH, numbers.stop)):
                tasks.start_soon(bus.publish, topic, 0, Entry(HOST.encode(), registration(number)))


async def wait_until_answered(bus: Bus, names: Topics, since: int, count: int) -> None:
    """Wait until `count` answers were written after offset `since`, without reading them: reading costs CPU."""
    with anyio.fail_after(ANSWERED_WITHIN + count / 500):
        while (await bus.offsets(names.allocations, 0))[1] < since + count:  # noqa: ASYNC110  (nobody tells us)
            await anyio.sleep(0.05)
    await bus.stable_end(names.allocations, 0)


async def progress(bus: Bus, names: Topics, since: int, *, checkpoints: bool = True) -> Progress:
    """What was answered after offset `since`: each worker counts once, and only if it got its device. Without
    `checkpoints` each answer is a commit of its own."""
    end = await bus.stable_end(names.allocations, 0)
    granted: set[bytes] = set()
    commits: list[tuple[int, int]] = []
    async with await bus.open_reader(names.allocations, 0, start=since, committed=True) as reader:
        async for message in _until(reader, end):
            key = message.key or b""
            if not key.startswith(b"@checkpoint/"):
                if key not in granted and infos_in(message):
                    granted.add(key)
                    if not checkpoints:
                        commits.append((message.timestamp_ms, len(granted)))
            elif granted and (not commits or len(granted) > commits[-1][1]):
                commits.append((message.timestamp_ms, len(granted)))
    return Progress(answers=len(granted), commits=commits)


async def sample(bus: Bus, topic: str, key: bytes) -> bytes:
    """The first record under `key`."""
    end = await bus.stable_end(topic, 0)
    async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
        async for message in _until(reader, end):
            if message.key == key and message.value is not None:
                return message.value
    raise LookupError(f"{topic} has no record under {key!r}")


def infos_in(message: Message) -> bool:
    """Decode an answer as the operators' side does: whether it holds infos."""
    if message.value is None or message.key is None or message.key.startswith(b"@"):
        return False
    record = codec.decode_ledger(message.value, key=message.key)
    return isinstance(record, Allocation) and record.state == AllocationState.ALLOCATED and bool(record.resources)


async def latencies(bus: Bus, cluster: str, *, rate: float, first: int, count: int) -> list[float]:
    """Register `count` workers at `rate` a second; milliseconds from each publishing to its infos, decoded, but for the
    `FIRST` ones.

    Open loop: a slow answer holds no later registration back.
    """
    names = topics(cluster)
    _, end = await bus.offsets(names.allocations, 0)
    begun: dict[bytes, float] = {}
    took: list[float] = []
    async with await bus.open_reader(names.allocations, 0, start=end, committed=True) as reader:
        await reader.fetch(timeout=0.1)  # it is connected now, and asks for what comes

        async def observe() -> None:
            while len(took) < count:
                for message in await reader.fetch(timeout=1.0):
                    if message.key in begun and infos_in(message):
                        took.append((time.perf_counter() - begun.pop(message.key)) * 1000)  # noqa: PERF401

        with anyio.fail_after(ANSWERED_WITHIN + count / rate):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(observe)
                start = time.perf_counter()
                for sequence, number in enumerate(range(first, first + count)):
                    body = registration(number)
                    await asyncio.sleep(max(0.0, start + sequence / rate - time.perf_counter()))
                    begun[f"{HOST}/{worker(number)}/{incarnation(number)}".encode()] = time.perf_counter()
                    tasks.start_soon(bus.publish, names.registrations, 0, Entry(HOST.encode(), body))
    return took[FIRST:]


async def _until(reader: Reader, end: int) -> AsyncIterator[Message]:
    while reader.position < end:
        for message in await reader.fetch(max_records=10_000):
            yield message

"""What the read API of a large fleet costs: pages, events to many readers, memory, and its start.

The API is a real `outfitter api` on the embedded bus. Its topics are filled with records as managers write them, and
records change while pages are asked for.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from aiohttp import ClientSession, ClientTimeout, TCPConnector
from msgspec import Struct

from bench import machine
from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Allocation, Transition
from support.api import NOW, allocation, host_record
from support.managers.api import Api, running

CLUSTER = "outfitter"
PARTITIONS = 12
DEVICES, WORKERS = 8, 10
"""Of each host. The workers beyond the devices wait."""
ROUNDS = 40
"""How often each page is asked for."""
READERS = 200
EVENTS = 50
"""How many changes are timed from their publication until all readers have them."""
CHANGES_EVERY_S = 0.01
PAGE_LIMIT_MS = 50.0
EVENT_LIMIT_MS = 100.0
PAGES = (
    "status", "hosts", "hosts?limit=1000", "hosts?managed=false", "hosts/host-0500", "devices", "devices?limit=1000",
    "devices?health=unhealthy", "devices?held=false&limit=1000", "workers", "workers?limit=1000",
    "workers?state=pending", "workers?worker=worker-9-0999", "allocations", "allocations?limit=1000",
    "allocations?state=ended", "queue", "queue?limit=1000", "workers/worker-9-0500/explanations", "history",
    "history?limit=1000", "history?worker=none", "dead-letters", "writers",
)  # fmt: skip


class ApiFigures(Struct):
    """`probe_ms`: the times of /livez, which are the machine's and the client's. `pages_ms`: the times of each page.
    `events_ms`: from the publication of a change until the last reader has it. `start_s`: until the API has caught up.
    The memory is the process's.
    """

    probe_ms: list[float]
    pages_ms: dict[str, list[float]]
    events_ms: list[float]
    start_s: float
    memory_before: int
    memory_with_readers: int


def records(host: str, number: int) -> list[Allocation]:
    """The workers of one host."""
    held = [
        allocation(host, f"worker-{index}-{number:04d}", devices=[f"{host}-{index}"], offset=number * WORKERS + index)
        for index in range(DEVICES)
    ]
    waiting = [
        allocation(
            host, f"worker-{index}-{number:04d}", "pending", offset=number * WORKERS + index,
            reason="1 of gpu wanted, 0 of 8 are free", reason_code="busy", queue_position=index - DEVICES + 1,
        )
        for index in range(DEVICES, WORKERS)
    ]  # fmt: skip
    return [*held, *waiting]


async def fill(bus: Bus, hosts: int) -> None:
    """Write the records of all hosts, and a step of history for each worker."""
    await all_topics.create(bus, CLUSTER, partitions=PARTITIONS)
    of = topics(CLUSTER)
    by_partition: dict[int, list[list[tuple[str, list[Entry]]]]] = {}
    for number in range(hosts):
        host = f"host-{number:04d}"
        found = records(host, number)
        steps = [
            Transition(
                at=NOW, host=host, worker=record.worker, incarnation=record.incarnation, event="register",
                to=record.state, explanation="granted", record=record,
            )
            for record in found
        ]  # fmt: skip
        ledger = [Entry(record.key.encode(), encode(record)) for record in (host_record(host, gpus=DEVICES), *found)]
        history = [Entry(record.key.encode(), encode(step)) for record, step in zip(found, steps, strict=True)]
        by_partition.setdefault(partition_of(host, PARTITIONS), []).append(
            [(of.history, history), (of.allocations, ledger)]
        )
    for partition, commits in by_partition.items():
        async with await bus.open_writer(f"bench-{partition}", partition) as writer:
            for commit in commits:
                await writer.commit(commit)


async def measure(folder: Path, *, hosts: int = 1000) -> ApiFigures:
    """The figures of a fleet of `hosts`."""
    folder.mkdir(parents=True, exist_ok=True)
    url = f"sqlite://{folder}/bus.db?synchronous=NORMAL"
    async with connect(url) as bus:
        await fill(bus, hosts)
        begun = time.monotonic()
        with running(folder, url) as api:
            await until_ready(api)
            start_s = time.monotonic() - begun
            async with client_of(api) as client, changing(bus, hosts):
                probe = await timed(client, "/livez")
                pages = {page: await timed(client, f"/api/v1/{page}") for page in PAGES}
            before = machine.resident_bytes(api.pid)
            async with client_of(api) as client:
                events = await timed_events(client, bus)
            return ApiFigures(probe, pages, events, start_s, before, machine.resident_bytes(api.pid))


async def until_ready(api: Api) -> None:
    with anyio.fail_after(120):
        while api.url is None or not await anyio.to_thread.run_sync(lambda: api.is_ready):  # noqa: ASYNC110 - of another process
            await anyio.sleep(0.01)


@asynccontextmanager
async def client_of(api: Api) -> AsyncIterator[ClientSession]:
    connector = TCPConnector(limit=0)
    async with ClientSession(str(api.url), connector=connector, timeout=ClientTimeout(total=None)) as client:
        yield client


@asynccontextmanager
async def changing(bus: Bus, hosts: int) -> AsyncIterator[None]:
    """Records of hosts change all the time."""

    async def change() -> None:
        number = 0
        while True:
            host = f"host-{number % hosts:04d}"
            record = records(host, number % hosts)[number % WORKERS]
            await publish(bus, record)
            number += 7
            await anyio.sleep(CHANGES_EVERY_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(change)
        yield
        tasks.cancel_scope.cancel()


async def publish(bus: Bus, record: Allocation) -> None:
    entry = Entry(record.key.encode(), encode(record))
    await bus.publish(topics(CLUSTER).allocations, partition_of(record.host, PARTITIONS), entry)


async def timed(client: ClientSession, page: str) -> list[float]:
    """How long each request for a page took, to the last byte, in milliseconds."""
    took: list[float] = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        async with client.get(page) as response:
            await response.read()
            if response.status != 200:
                raise RuntimeError(f"{page}: {response.status}")
        took.append(1000 * (time.perf_counter() - begun))
    return took


async def timed_events(client: ClientSession, bus: Bus) -> list[float]:
    """From the publication of each change until the last of the readers has it, in milliseconds."""
    seen: dict[str, list[float]] = {f"event-{number}": [] for number in range(EVENTS)}
    is_open = anyio.Semaphore(0)

    async def read() -> None:
        async with client.get("/api/v1/events") as response:
            is_open.release()
            async for line in response.content:
                if line.startswith(b"data: ") and b'"key":"host-0000/event-' in line:
                    name = line.partition(b'"key":"host-0000/')[2].partition(b"/")[0].decode()
                    seen[name].append(time.perf_counter())

    took: list[float] = []
    async with anyio.create_task_group() as tasks:
        for _ in range(READERS):
            tasks.start_soon(read)
        for _ in range(READERS):
            await is_open.acquire()
        for name, times in seen.items():
            begun = time.perf_counter()
            await publish(bus, allocation("host-0000", name))
            with anyio.fail_after(30):
                while len(times) < READERS:  # noqa: ASYNC110 - the readers are many tasks
                    await anyio.sleep(0.001)
            took.append(1000 * (max(times) - begun))
        tasks.cancel_scope.cancel()
    return took

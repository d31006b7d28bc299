"""What the read API costs at its worst: readers that take nothing, and shared devices with many holders."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
from msgspec import Struct, structs

from bench import machine
from bench.api import CLUSTER, client_of, until_ready
from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.records import Allocation, Host
from outfitter_service.api.application import MOST_CONNECTIONS
from support.api import allocation, host_record
from support.managers.api import Api, running

PAGES = ("api/v1/allocations?limit=1000", "api/v1/workers?limit=1000", "metrics", "console.css", "")
LABELS = 4_000
"""Bytes of the labels of each worker."""
LOOKS, LOOK_EVERY_S = 40, 0.1
SHARERS, SHARED = 2_000, 100
"""Workers of the crowded host, and its devices, which each of them has."""
ROUNDS = 20


class ReaderFigures(Struct):
    """`unread_bytes`: how much more memory the API has, with as many readers that take nothing as it lets in.
    `line_ms`: the times of `/devices?limit=1` of a crowded host, each after a change. `probe_ms`: of `/livez` then."""

    unread_bytes: int
    line_ms: list[float]
    probe_ms: list[float]


async def measure(folder: Path) -> ReaderFigures:
    folder.mkdir(parents=True, exist_ok=True)
    unread = await _unread(folder / "unread")
    line_ms, probe_ms = await _crowded(folder / "crowded")
    return ReaderFigures(unread, line_ms, probe_ms)


async def _fill(bus: Bus, records: Iterable[Host | Allocation]) -> None:
    await all_topics.create(bus, CLUSTER, partitions=1)
    entries = [Entry(record.key.encode(), encode(record)) for record in records]
    async with await bus.open_writer("bench", 0) as writer:
        for start in range(0, len(entries), 200):
            await writer.commit([(topics(CLUSTER).allocations, entries[start : start + 200])])


def _labelled(worker: str) -> Allocation:
    record = allocation("h", worker, devices=["h-0"])
    return structs.replace(record, request=structs.replace(record.request, labels={"l": "x" * LABELS}))


async def _unread(folder: Path) -> int:
    folder.mkdir()
    url = f"sqlite://{folder}/bus.db?synchronous=NORMAL"
    async with connect(url) as bus:
        await _fill(bus, [host_record("h"), *(_labelled(f"w{number:04}") for number in range(1000))])
        with running(folder, url) as api, ExitStack() as held:
            await until_ready(api)
            async with client_of(api) as client:
                for page in PAGES:
                    await (await client.get(f"/{page}")).read()
            before = most = machine.resident_bytes(api.pid)
            for number in range(MOST_CONNECTIONS):
                _ask(api, held, PAGES[number % 2 if number % 4 else number % len(PAGES)])
            for _ in range(LOOKS):
                most = max(most, machine.resident_bytes(api.pid))
                await anyio.sleep(LOOK_EVERY_S)
            return most - before


def _ask(api: Api, held: ExitStack, page: str) -> None:
    """Ask for a page and take nothing of it."""
    host, port = str(api.url).removeprefix("http://").rstrip("/").split(":")
    reader = held.enter_context(socket.socket())
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect((host, int(port)))
    reader.sendall(f"GET /{page} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


async def _crowded(folder: Path) -> tuple[list[float], list[float]]:
    folder.mkdir()
    url = f"sqlite://{folder}/bus.db?synchronous=NORMAL"
    ids = [f"host-{number}" for number in range(SHARED)]
    host = host_record("host", gpus=SHARED)
    inventory: Any = structs.replace(host.resources["gpu"], sharing="shared")
    sharers = [
        allocation("host", f"w{number:04}", devices=ids, shared=["gpu"], offset=number) for number in range(SHARERS)
    ]
    async with connect(url) as bus:
        await _fill(bus, [structs.replace(host, resources={"gpu": inventory}), *sharers])
        with running(folder, url) as api:
            await until_ready(api)
            async with client_of(api) as client:
                line_ms, probe_ms = list[float](), list[float]()

                async def timed(path: str, into: list[float]) -> None:
                    begun = time.perf_counter()
                    async with client.get(path) as response:
                        await response.read()
                    into.append(1000 * (time.perf_counter() - begun))

                for number in range(ROUNDS):
                    record = structs.replace(sharers[number], state="releasing")
                    await bus.publish(topics(CLUSTER).allocations, 0, Entry(record.key.encode(), encode(record)))
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(timed, "/api/v1/devices?limit=1", line_ms)
                        tasks.start_soon(timed, "/api/v1/devices?limit=1000", list[float]())
                        tasks.start_soon(timed, "/livez", probe_ms)
                return line_ms, probe_ms

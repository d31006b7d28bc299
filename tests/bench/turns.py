"""The longest turn of a manager's event loop under each flood of the table of limits (service/reference.md).

A turn is one round of the loop: while it lasts nobody is answered, neither a worker nor a probe. It is measured in CPU
seconds of the loop's thread, so that what else the machine does counts for nothing. The manager is the real processor
in this process, on the embedded bus.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from msgspec import Struct

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_service import memory
from outfitter_service.runtime.identity import of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.processor.processor import Limits
from support.managers.in_process import (
    CLUSTER,
    HOST,
    TOPICS,
    InProcessManager,
    bulky,
    deregister,
    heartbeat,
    register,
    serving,
    static,
)

FLOOD = 10_000
WITHIN_S = 300.0
LIMIT_MS = 50.0
"""What a turn may take."""


class Turns(Struct, kw_only=True):
    """What one flood came to: its messages, the longest turn, the longest look for garbage (which comes on top of a
    turn) and the CPU time of all, in milliseconds."""

    flood: str
    messages: int
    longest_ms: float
    garbage_ms: float
    cpu_ms: float


class Watcher:
    """Runs once in every turn of the loop, and knows how long the longest one took."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._at = time.thread_time()
        self.begun = self._at
        self.longest = 0.0
        self.garbage = 0.0
        self._collected = 0.0
        self._thread = threading.get_ident()
        self._over = False
        gc.callbacks.append(self._collects)
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        now = time.thread_time()
        self.longest = max(self.longest, now - self._at - self._collected)
        self.garbage = max(self.garbage, self._collected)
        self._at, self._collected = now, 0.0
        if not self._over:
            self._loop.call_soon(self._look)

    def _collects(self, phase: str, _info: object) -> None:
        if threading.get_ident() == self._thread:
            now = time.thread_time()
            self._collected += -now if phase == "start" else now

    def end(self) -> None:
        self._over = True
        gc.callbacks.remove(self._collects)

    def cpu(self) -> float:
        return self._at - self.begun


Bodies = Iterable[dict[str, Any] | bytes]


async def publish(bus: Bus, bodies: Callable[[], Bodies], key: Callable[[int], str]) -> int:
    """Put all into the input, as fast as it goes; how many they were. They are made in another thread: that is not what
    is measured."""

    def make() -> list[Entry]:
        return [
            Entry(key(number).encode(), body if isinstance(body, bytes) else json.dumps(body).encode())
            for number, body in enumerate(bodies())
        ]

    entries = await anyio.to_thread.run_sync(make)
    async with await bus.open_writer("flood", 0) as writer:
        for start in range(0, len(entries), 1000):
            await writer.commit([(TOPICS.registrations, entries[start : start + 1000]), (TOPICS.history, [])])
    return len(entries)


async def through(manager: InProcessManager) -> None:
    """Wait until everything is decided and told."""
    _, end = await manager.bus.offsets(TOPICS.registrations, 0)
    with anyio.fail_after(WITHIN_S):
        while manager.processor.position < end or manager.processor.event_queue.queue:
            if manager.failure is not None:
                raise manager.failure
            await anyio.sleep(0.05)
        await manager.reported()


class Flood(Struct, kw_only=True):
    """`before` is said first and not measured, then `bodies`; `devices` are there for them, `after` comes last.
    `hosts`: in cluster scope, from so many hosts."""

    bodies: Callable[[], Bodies]
    before: Callable[[], Bodies] = list
    after: Callable[[], Bodies] = list
    devices: int = 1
    hosts: int = 0
    sharing: str = "exclusive"
    restart: bool = False
    rules: dict[str, Any] = {}


def _names(count: int = FLOOD) -> list[str]:
    return [f"w{number}" for number in range(count)]


def _odd(number: int) -> bytes:
    """What it takes long to find the fault in."""
    labels: dict[str, Any] = {f"{place:05}": "x" for place in range(4000)} | {"99999": number}
    return json.dumps(register(f"w{number}") | {"labels": labels}).encode()


FLOODS: dict[str, Flood] = {
    "granted at once": Flood(bodies=lambda: [register(w, gpu=1) for w in _names()], devices=FLOOD),
    "waiting": Flood(bodies=lambda: [register(w, gpu=1) for w in _names()]),
    "waiting, then the device comes back": Flood(
        before=lambda: [register("first", gpu=1), *[register(w, gpu=1) for w in _names(10_000)]],
        bodies=lambda: [deregister("first"), *[deregister(w) for w in _names(2000)]],
    ),
    "waiting, each for another amount": Flood(
        before=lambda: [register("first", gpu=1)],
        bodies=lambda: [register(w, gpu=1 + n % 3000) for n, w in enumerate(_names(6000))],
        after=lambda: [deregister("first")], devices=3000,
    ),
    "live without a device": Flood(bodies=lambda: [register(w, resources={}) for w in _names()]),
    "live with a shared one": Flood(bodies=lambda: [register(w, gpu=1) for w in _names()], sharing="shared"),
    "over": Flood(bodies=lambda: [deregister(w) for w in _names()]),
    "runs of one worker that fail": Flood(bodies=lambda: [register("w", name, gpu=9) for name in _names()]),
    "runs of one worker that live": Flood(bodies=lambda: [register("w", name, resources={}) for name in _names()]),
    "leases that end together": Flood(
        bodies=lambda: [register(w, resources={}, lease_s=0.5) for w in _names(9000)], rules={"retention_s": 1.0}
    ),
    "heartbeats of nobody": Flood(bodies=lambda: [heartbeat(w) for w in _names()]),
    "empty messages": Flood(bodies=lambda: [b""] * FLOOD),
    "messages whose fault is hard to find": Flood(bodies=lambda: [_odd(n) for n in range(300)]),
    "unknown fields": Flood(
        bodies=lambda: [register(w) | {f"resorces{w}{n}": n for n in range(8)} for w in _names(3000)]
    ),
    "registrations as large as may be": Flood(
        bodies=lambda: [register(w, resources={}, operators=bulky(250)) for w in _names(1000)]
    ),
    "a restart with all of it": Flood(
        before=lambda: [register(w, gpu=1, lease_s=None) for w in _names(24_000)], bodies=list, devices=4000,
        restart=True, rules={"max_final": 20_000},
    ),
    "hosts of a partition": Flood(
        bodies=lambda: [register("w", host=f"h{n}", gpu=1) for n in range(10_500)], hosts=10_500
    ),
}  # fmt: skip


@asynccontextmanager
async def manager_of(bus: Bus, folder: Path, flood: Flood) -> AsyncIterator[InProcessManager]:
    config = static(flood.devices, extra=f'sharing = "{flood.sharing}"\n')
    scope: dict[str, Any] = {}
    if flood.hosts:
        identity = of_partition(replica_identity(CLUSTER), 0)
        scope = {"identity": identity, "scope": PartitionScope(0, 1, identity.writer)}
    async with serving(bus, config, folder, limits=Limits(lease_grace_s=0.1), **scope, **flood.rules) as manager:
        manager.metrics.show(manager.processor.state_counts)
        yield manager


async def measure(name: str, folder: Path) -> Turns:
    """One flood, at a manager of its own."""
    flood = FLOODS[name]
    folder.mkdir(parents=True)
    async with connect(f"sqlite://{folder}/bus.db?synchronous=NORMAL") as bus:
        await all_topics.create(bus, CLUSTER, partitions=1)

        def key(number: int) -> str:
            return f"h{number}" if flood.hosts else HOST

        async with manager_of(bus, folder, flood) as manager:
            await publish(bus, flood.before, key)
            await through(manager)
            if not flood.restart:
                return await _watched(name, manager, lambda: _say(bus, manager, flood, key))
        watcher = Watcher()
        async with manager_of(bus, folder, flood) as manager:
            return await _watched(name, manager, lambda: _nothing(manager), watcher)


async def _say(bus: Bus, manager: InProcessManager, flood: Flood, key: Callable[[int], str]) -> int:
    count = await publish(bus, flood.bodies, key)
    await through(manager)
    count += await publish(bus, flood.after, key)
    await through(manager)
    if flood.rules.get("retention_s"):
        with anyio.fail_after(WITHIN_S):
            while manager.processor.ledger.allocations:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.1)
    return count


async def _nothing(manager: InProcessManager) -> int:
    await manager.ready()
    await through(manager)
    return 0


async def _watched(
    name: str, manager: InProcessManager, happens: Callable[[], Awaitable[int]], watcher: Watcher | None = None
) -> Turns:
    watcher = watcher or Watcher()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_scrape, manager)
        messages = await happens()
        tasks.cancel_scope.cancel()
    watcher.end()
    return Turns(
        flood=name,
        messages=messages,
        longest_ms=watcher.longest * 1000,
        garbage_ms=watcher.garbage * 1000,
        cpu_ms=watcher.cpu() * 1000,
    )


async def _scrape(manager: InProcessManager) -> None:
    while True:
        manager.metrics.exposition()
        await anyio.sleep(1.0)


async def measure_all(folder: Path, say: Callable[[str], None], only: Iterable[str] = FLOODS) -> list[Turns]:
    """Every flood, one after the other, in a process that looks after its memory as a manager does."""
    memory.tune()
    found = []
    for number, name in enumerate(only):
        say(f"turns: {name}")
        gc.collect()  # what the last manager has left
        found.append(await measure(name, folder / f"flood-{number}"))
    return found

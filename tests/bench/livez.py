"""How long a manager's process leaves a probe without an answer, under each flood of `turns`.

The manager is a real `outfitter serve` on the embedded bus; `/livez` is asked again as soon as it has answered. That
is measured in seconds that pass, with all that there is in a process and beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
from msgspec import Struct

from bench.turns import FLOODS, WITHIN_S, Bodies, Flood, publish
from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, connect
from support.managers.in_process import CLUSTER, HOST, TOPICS, register, static
from support.managers.process import Manager

LIMIT_S = 1.0
"""Between two answers; kubelet's own time-out for one."""
EVERY_S = 0.01


class Silence(Struct):
    """The longest time between two answers during a flood, in seconds."""

    flood: str
    longest_s: float


class Probe:
    """Asks for `/livez` again and again, in a thread of its own."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._over = False
        self.longest = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(self._ask)
            try:
                yield
            finally:
                self._over = True
            asked.result()

    def _ask(self) -> None:
        last = time.monotonic()
        while not self._over:
            if self._manager._get("/livez")[0] != 200:
                raise RuntimeError(f"/livez does not say 200\n{self._manager.log_tail()}")
            now = time.monotonic()
            self.longest = max(self.longest, now - last)
            last = now
            time.sleep(EVERY_S)


class Ledger:
    """The keys of the workers' records that there are, read from the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._position = 0
        self.keys: set[str] = set()

    async def until(self, condition: Callable[[set[str]], bool]) -> None:
        with anyio.fail_after(WITHIN_S):
            while not condition(self.keys):
                reader = await self._bus.open_reader(TOPICS.allocations, 0, start=self._position, committed=True)
                async with reader:
                    for message in await reader.fetch(max_records=5000, timeout=0.2):
                        key = (message.key or b"").decode()
                        self._position = message.offset + 1
                        if message.value is None:
                            self.keys.discard(key)
                        elif not key.startswith("@"):
                            self.keys.add(key)


async def measure(name: str, folder: Path) -> Silence:
    """One flood, at a manager of its own."""
    flood = FLOODS[name]
    folder.mkdir(parents=True)
    async with connect(f"sqlite://{folder}/bus.db?synchronous=NORMAL") as bus:
        await all_topics.create(bus, CLUSTER, partitions=1)
        manager = Manager(folder, _config(flood), host=HOST, arguments=["--scope", "cluster"] if flood.hosts else [])
        try:
            await anyio.to_thread.run_sync(manager.start)
            return Silence(name, await _silence(bus, manager, flood))
        finally:
            manager.kill9()


async def _silence(bus: Bus, manager: Manager, flood: Flood) -> float:
    def key(number: int) -> str:
        return f"h{number}" if flood.hosts else HOST

    ledger = Ledger(bus)

    async def said(bodies: Callable[[], Bodies], last: str) -> None:
        await publish(bus, bodies, key)
        await publish(bus, lambda: [register(last, host=key(0), resources={}, lease_s=None)], key)
        await ledger.until(lambda keys: f"{key(0)}/{last}/1" in keys)

    await said(flood.before, "before")
    probe = Probe(manager)
    if flood.restart:
        manager.kill9()
        manager.start(ready=False)
        await anyio.to_thread.run_sync(lambda: manager.wait_for(manager.listens))
    with probe.asking():
        await said(flood.bodies, "during")
        await said(flood.after, "after")
        if flood.rules.get("retention_s"):
            await ledger.until(lambda keys: len(keys) <= 3)
    return probe.longest


def _config(flood: Flood) -> str:
    retention = flood.rules.get("retention_s")
    rules = f'ended-retention = "{retention:g}s"\n' if retention else ""
    return rules + static(flood.devices, extra=f'sharing = "{flood.sharing}"\n')


async def measure_all(folder: Path, say: Callable[[str], None], only: Iterable[str] = FLOODS) -> list[Silence]:
    """Every flood, one after the other."""
    found = []
    for number, name in enumerate(only):
        say(f"livez: {name}")
        found.append(await measure(name, folder / f"livez-{number}"))
    return found

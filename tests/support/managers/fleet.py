"""Several managers of cluster scope on one cluster, and the load of many hosts on them.

fleet = Fleet(folder, url, cluster)
one = fleet.start("one")
await fleet.register(hosts(40), ["w0", "w1"])
await fleet.answered(within=60)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio

from outfitter_proto import topics as wanted_topics
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from support.managers.process import Manager
from support.polling import pause_s

PARTITIONS = 4
CONFIG = """
lease = "60s"
external-resources = ["gpu"]
[external-resource.gpu]
amount = 1
driver = "static"
param.count = 2
"""


def hosts(count: int) -> list[str]:
    return [f"host-{number}" for number in range(count)]


class Fleet:
    """Managers, workers and what one sees of them. `aclose` ends every manager as a crash would."""

    def __init__(self, folder: Path, url: str, cluster: str, *, config: str = CONFIG) -> None:
        self.folder = folder
        self.url = url
        self.cluster = cluster
        self.config = config
        self.managers: list[Manager] = []
        self.asked: set[str] = set()
        self.records: dict[str, dict[str, Any]] = {}
        self._bus: Bus = connect(url)
        self._positions = dict.fromkeys(range(PARTITIONS), 0)

    async def __aenter__(self) -> Fleet:
        await self._bus.start()
        await wanted_topics.create(self._bus, self.cluster, partitions=PARTITIONS)
        return self

    async def __aexit__(self, *exc: object) -> None:
        with anyio.CancelScope(shield=True):
            for manager in self.managers:
                manager.kill9()
                print(f"--- {manager.log}\n{manager.log_tail()}")
            await self._bus.aclose()

    def start(
        self, name: str, *, ready: bool = True, replica: bool = True, session: str = "6s", **more: Any
    ) -> Manager:
        """Start a manager of cluster scope; `replica`: under its name, as a static member."""
        arguments = ["--scope", "cluster", *(["--replica", name] if replica else [])]
        manager = Manager(
            self.folder / name,
            f'session-timeout = "{session}"\n{self.config}',
            bus=self.url,
            cluster=self.cluster,
            host=name,
            arguments=arguments,
        )
        self.managers.append(manager)
        manager.start(ready=ready)
        return manager

    async def say(self, body: dict[str, Any], *, partition: int | None = None, key: bytes | None = b"") -> int:
        """Publish one message of `body["host"]`; return its offset."""
        host = body["host"]
        where = partition_of(host, PARTITIONS) if partition is None else partition
        entry = Entry(host.encode() if key == b"" else key, json.dumps(body).encode())
        return await self._bus.publish(topics(self.cluster).registrations, where, entry)

    async def register(self, names: Iterable[str], workers: Sequence[str], **fields: Any) -> None:
        for host in names:
            for worker in workers:
                self.asked.add(f"{host}/{worker}/1")
                await self.say({"type": "register", "host": host, "worker": worker, "incarnation": "1", **fields})

    async def deregister(self, names: Iterable[str], workers: Sequence[str]) -> None:
        for host in names:
            for worker in workers:
                await self.say({"type": "deregister", "host": host, "worker": worker, "incarnation": "1"})

    async def read(self) -> dict[str, dict[str, Any]]:
        """The last record of every key of the ledger, of all partitions."""
        topic = topics(self.cluster).allocations
        for partition, position in self._positions.items():
            end = await self._bus.stable_end(topic, partition)
            if position >= end:
                continue
            async with await self._bus.open_reader(topic, partition, start=position, committed=True) as reader:
                while reader.position < end:
                    for message in await reader.fetch(timeout=0.05):
                        key = (message.key or b"").decode()
                        if message.value is None:
                            self.records.pop(key, None)
                        else:
                            self.records[key] = json.loads(message.value)
                self._positions[partition] = reader.position
        return self.records

    async def until(self, condition: Any, *, within: float = 60.0) -> Any:
        """Wait until the ledger is as `condition` says; return what it returned."""
        begun = time.monotonic()
        with anyio.fail_after(within):
            while True:
                if found := condition(await self.read()):
                    return found
                await anyio.sleep(pause_s(time.monotonic() - begun))

    async def are(self, states: dict[tuple[str, str], str]) -> None:
        """Wait until these workers (host, name) are in these states."""

        def arrived(records: dict[str, dict[str, Any]]) -> bool:
            found = {place: records.get(f"{'/'.join(place)}/1", {}).get("state") for place in states}
            return found == states

        await self.until(arrived)

    async def answered(self, *, within: float = 60.0) -> float:
        """Wait until everybody who asked has a record; return the seconds that took."""
        begun = time.monotonic()
        await self.until(lambda records: self.asked <= records.keys(), within=within)
        return time.monotonic() - begun

    async def instances(self) -> dict[int, str]:
        """Which manager last wrote to each partition: its instance."""
        records = await self.read()
        checkpoints = {n: records.get(f"@checkpoint/partition/{n}") for n in range(PARTITIONS)}
        return {n: found["instance"] for n, found in checkpoints.items() if found is not None}

"""A partition of many hosts: nothing is done for all of them in one turn of the event loop."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_service import config as configuration
from outfitter_service.core import model as m
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.drivers import loading
from outfitter_service.runtime.drivers import pool as pool_module
from outfitter_service.runtime.identity import of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.processor import commit_loop
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import CLUSTER, register, serving, static

HOSTS = [f"h{number}" for number in range(12)]
AT_ONCE = 5


class Turns:
    """Counts something by turn of the event loop."""

    def __init__(self) -> None:
        self.by_turn: Counter[int] = Counter()
        self.turn = 0
        self.over = False

    def next(self) -> None:
        self.turn += 1
        if not self.over:
            asyncio.get_running_loop().call_soon(self.next)

    def count(self) -> None:
        self.by_turn[self.turn] += 1


@contextmanager
def turns() -> Iterator[Turns]:
    found = Turns()
    found.next()
    yield found
    found.over = True


async def test_deadlines_of_some_hosts_are_looked_at_in_a_turn_and_those_of_all_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: set[str] = set()
    is_due = commit_loop.is_due
    identity = of_partition(replica_identity(CLUSTER), 0)
    scope = PartitionScope(0, 1, identity.writer)
    with turns() as found:

        def look(ledger: Any, rules: Any, host: str, now: Any) -> bool:
            found.count()
            looked.add(host)
            return is_due(ledger, rules, host, now)

        monkeypatch.setattr(commit_loop, "is_due", look)
        monkeypatch.setattr(commit_loop, "HOSTS_AT_ONCE", AT_ONCE)
        async with (
            FaultyBus(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus,
            serving(bus, static(1), tmp_path, identity=identity, scope=scope, retention_s=0.0) as manager,
        ):
            for host in HOSTS:
                body = register("w", host=host, gpu=9)  # it fails, and is forgotten when its deadline is looked at
                await manager.publish(json.dumps(body).encode(), host.encode())
            await manager.until(lambda records: looked.issuperset(HOSTS) and not any("/w/" in key for key in records))
    assert max(found.by_turn.values()) == AT_ONCE


async def test_the_devices_of_some_hosts_begin_to_be_looked_at_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, events = the_pool(tmp_path), list[m.Event]()
    monkeypatch.setattr(pool_module, "HOSTS_AT_ONCE", AT_ONCE)
    with turns() as found:

        class Counted(pool_module.Supervisor):
            def __init__(self, *args: Any, **more: Any) -> None:
                found.count()
                super().__init__(*args, **more)

        monkeypatch.setattr(pool_module, "Supervisor", Counted)
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(lambda: pool.run(events.append, started=started))
            await started.wait()
            for host in [*HOSTS, *HOSTS]:
                pool.start_host(host)
            assert pool.hosts == set(HOSTS)
            pool.stop_host("h9")
            while len({event.host for event in events if isinstance(event, m.DriverReport)}) < len(HOSTS) - 1:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            assert pool.hosts == set(HOSTS) - {"h9"}
            tasks.cancel_scope.cancel()
    assert sorted(found.by_turn.values()) == [1, AT_ONCE, AT_ONCE]


def the_pool(folder: Path) -> pool_module.DriverPool:
    path = folder / "outfitter.toml"
    path.write_text(static(1))
    loaded = loading.load(configuration.load(path, environment={}).resources)
    return pool_module.DriverPool(loaded, metrics=Metrics(loaded))

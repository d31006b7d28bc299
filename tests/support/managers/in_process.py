"""One manager in this process: the real processor and the real drivers on a bus, without HTTP and machine lock.

    async with serving(bus, config) as manager:
        await manager.say(register("w", gpu=1))
        record = await manager.state("w", "allocated")

Leaving the block ends it as a crash would (everything is cancelled where it stands), unless `stop` was called.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from msgspec import structs

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, Entry
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_service import config as configuration
from outfitter_service.core.decide import Rules
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.drivers import loading
from outfitter_service.runtime.drivers.pool import DriverPool
from outfitter_service.runtime.identity import Identity, host_identity
from outfitter_service.runtime.input.scope import Scope
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.processor.processor import Limits, Processor
from outfitter_service.runtime.survivors.survivor_watch import SurvivorWatch
from support.managers.assignments import assignment_of, nobody_runs

HOST = "h"
CLUSTER = "outfitter"
TOPICS = topics(CLUSTER)
WITHIN_S = 20.0


def register(worker: str, incarnation: str = "1", *, host: str = HOST, **fields: Any) -> dict[str, Any]:
    """A registration's body. Whole numbers are amounts of resources, the rest are fields of the message."""
    plain = ("priority", "lease_s", "wait_s")
    amounts = {name: {"amount": n} for name, n in fields.items() if type(n) is int and name not in plain}
    rest = {name: value for name, value in fields.items() if name not in amounts}
    body = {"type": "register", "host": host, "worker": worker, "incarnation": incarnation, **rest}
    return body | ({"resources": amounts} if amounts else {})


def bulky(count: int) -> dict[str, Any]:
    """Operators for a registration: each makes it some 210 bytes larger, and its record some 450."""
    return {f"{number:03}".ljust(200, "o"): {} for number in range(count)}


def heartbeat(worker: str, incarnation: str = "1") -> dict[str, Any]:
    return {"type": "heartbeat", "host": HOST, "worker": worker, "incarnation": incarnation}


def deregister(worker: str, incarnation: str | None = "1", *, host: str = HOST) -> dict[str, Any]:
    return {"type": "deregister", "host": host, "worker": worker, "incarnation": incarnation}


def static(count: int = 2, name: str = "gpu", extra: str = "") -> str:
    """TOML of one resource of `count` devices; `extra` are more of its settings, a line each."""
    return (
        f'external-resources = ["{name}"]\n[external-resource.{name}]\namount = 1\n'
        f'driver = "static"\nparam.count = {count}\n{extra}'
    )


def preparing(bench: str, extra: str = "") -> str:
    """TOML of the resource `gpu` whose devices lie on a bench (support/drivers/preparing.py)."""
    return (
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\n'
        f'driver = "support.drivers.preparing:PreparingDriverFactory"\nparam.bench = "{bench}"\n{extra}'
    )


class InProcessManager:
    """One manager, and what one sees of it on the bus."""

    def __init__(
        self,
        bus: Bus,
        processor: Processor,
        drivers: DriverPool,
        metrics: Metrics,
        *,
        cluster: str = CLUSTER,
        partition: int = 0,
    ) -> None:
        self.bus = bus
        self.topics = topics(cluster)
        self.partition = partition
        self.processor = processor
        self.drivers = drivers
        self.metrics = metrics
        self.failure: BaseException | None = None
        self.ended = anyio.Event()
        self._last: dict[str, dict[str, Any]] = {}
        self._position = 0

    # --- saying ---

    async def say(self, *bodies: dict[str, Any]) -> None:
        for body in bodies:
            await self.publish(json.dumps(body).encode())

    async def publish(self, value: bytes | None, key: bytes | None = HOST.encode()) -> int:
        return await self.bus.publish(self.topics.registrations, self.partition, Entry(key, value))

    # --- seeing ---

    async def records(self) -> dict[str, dict[str, Any]]:
        """The ledger as it is now: the last record of every key."""
        while messages := await self._fetch(self.topics.allocations, self._position):
            for message in messages:
                key = (message.key or b"").decode()
                if message.value is None:
                    self._last.pop(key, None)
                else:
                    self._last[key] = json.loads(message.value)
            self._position = messages[-1].offset + 1
        return self._last

    async def until(self, condition: Callable[[dict[str, dict[str, Any]]], Any]) -> Any:
        """Wait until the ledger is as `condition` says; return what it returned."""
        with anyio.fail_after(WITHIN_S):
            while True:
                records = await self.records()
                if found := condition(records):
                    return found
                if self.failure is not None:
                    raise self.failure
                await self._fetch(self.topics.allocations, self._position, timeout=0.2)

    async def state(self, worker: str, state: str, incarnation: str = "1") -> dict[str, Any]:
        """Wait until a worker's record is in `state`; return the record."""
        key = f"{HOST}/{worker}/{incarnation}"
        found: dict[str, Any] = await self.until(
            lambda records: key in records and records[key]["state"] == state and records[key]
        )
        return found

    async def dead_letters(self, count: int) -> list[dict[str, Any]]:
        """Wait for `count` dead letters; return them."""
        return [json.loads(m.value or b"") for m in await self._wait_for(self.topics.dead_letters, count)]

    async def history(self) -> list[dict[str, Any]]:
        return [json.loads(m.value or b"") for m in await self._fetch(self.topics.history, 0)]

    async def _wait_for(self, topic: str, count: int) -> list[Any]:
        with anyio.fail_after(WITHIN_S):
            found: list[Any] = []
            while len(found) < count:
                found += await self._fetch(topic, found[-1].offset + 1 if found else 0, timeout=0.2)
            return found

    async def _fetch(self, topic: str, position: int, timeout: float = 0.0) -> list[Any]:
        answers_at_once = self.bus.local
        async with await self.bus.open_reader(topic, self.partition, start=position, committed=True) as reader:
            return await reader.fetch(max_records=5000, timeout=timeout if answers_at_once else 0.2)

    def metric(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"no metric {name}{labels}"
        return value

    async def ready(self) -> None:
        with anyio.fail_after(WITHIN_S):
            while not self.processor.ready and self.failure is None:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.005)
        if self.failure is not None:
            raise self.failure

    async def reported(self) -> None:
        """Wait until the manager has acted on its commits and reported them: readers may see a commit before it."""
        with anyio.fail_after(WITHIN_S):
            while not self._is_quiet() and self.failure is None:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.005)
        if self.failure is not None:
            raise self.failure

    def _is_quiet(self) -> bool:
        loop = self.processor._loop
        return loop is not None and loop._sent is None and not loop._reporter.behind

    async def ended_by(self, kind: type[Exception]) -> str:
        """Wait until it has ended by itself, with an error of this kind: what the error says."""
        with anyio.fail_after(WITHIN_S):
            await self.ended.wait()
        assert self.failure is not None
        failure = self.failure.exceptions[0] if isinstance(self.failure, BaseExceptionGroup) else self.failure
        assert isinstance(failure, kind)
        return str(failure)

    async def stop(self) -> None:
        """End it in an orderly way."""
        self.processor.stop()
        with anyio.fail_after(WITHIN_S):
            await self.ended.wait()


def _silent(limits: Limits) -> Limits:
    """Without signs of life, unless a test names their interval: they add a commit at a moment of their own."""
    return structs.replace(limits, beat_s=None) if limits.beat_s == Limits().beat_s else limits


@asynccontextmanager
async def serving(
    bus: Bus,
    config: str,
    folder: Path,
    *,
    identity: Identity | None = None,
    scope: Scope | None = None,
    owns_partition: Callable[[], Awaitable[bool]] | None = None,
    limits: Limits | None = None,
    clock: Clock = SYSTEM,
    ready: bool = True,
    cluster: str = CLUSTER,
    partition: int | None = None,
    **rules: Any,
) -> AsyncIterator[InProcessManager]:
    """Serve `HOST` on `bus` (which is open) with `config` (TOML), where it belongs among the partitions that there are
    (one, if there are no topics yet), or `partition`; what ended it by itself is in `failure`."""
    await all_topics.create(bus, cluster, partitions=await all_topics.partition_count(bus, cluster) or 1)
    partitions = (await bus.topic(topics(cluster).allocations)).partitions
    partition = partition_of(HOST, partitions) if partition is None else partition
    path = folder / "outfitter.toml"
    path.write_text(config)
    settings = configuration.load(path, environment={})
    loaded = loading.load(settings.resources)
    metrics = Metrics(loaded)
    identity = identity or host_identity(cluster, HOST)
    pool = DriverPool(loaded, metrics=metrics, survivors=SurvivorWatch(identity), identity=identity)
    processor = Processor(
        assignment_of(bus, identity, partition=partition, partitions=partitions, scope=scope, clock=clock),
        rules=Rules(
            writer=identity.writer,
            specs={name: each.spec for name, each in loaded.items()},
            sees=identity.sees,
            **rules,
        ),
        limits=_silent(limits or Limits(lease_grace_s=0.1)),
        instruments=Instruments.of(metrics, clock),
        drivers=pool,
        owns_partition=owns_partition,
        search_processes=nobody_runs,  # tests at the same time have the same host
    )
    manager = InProcessManager(bus, processor, pool, metrics, cluster=cluster, partition=partition)

    async def live() -> None:
        try:
            await processor.run()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            manager.failure = error
        finally:
            manager.ended.set()

    async with anyio.create_task_group() as tasks:
        started = anyio.Event()
        tasks.start_soon(lambda: pool.run(processor.event_queue.add, started=started, host=identity.host))
        await started.wait()
        tasks.start_soon(live)
        try:
            if ready:
                await manager.ready()
            yield manager
        finally:
            tasks.cancel_scope.cancel()


def another(identity: Identity | None = None, **changes: Any) -> Identity:
    """The identity of another manager of the same host."""
    return structs.replace(identity or host_identity(CLUSTER, HOST), **changes)

"""Cluster scope: what one, two and three replicas answer together, and how long it takes to replace one.

All replicas share this machine with the broker and with who registers: on few processors more replicas are no faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio

from bench import loads
from outfitter_proto.bus import Bus, Entry
from outfitter_proto.bus.kafka.adapter import KafkaBus
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from support.managers.fleet import PARTITIONS, Fleet, hosts
from support.managers.process import Manager

SESSION_S = 6.0
"""The shortest session that Kafka's brokers take by default."""
SHARED_WITHIN = 60.0
HOSTS = hosts(16)
AT_ONCE = 256


async def rate(folder: Path, url: str, cluster: str, *, replicas: int, count: int) -> float:
    """Registrations answered a second, from the first that is published to the last answer."""
    async with Fleet(folder, url, cluster, config=_config(count)) as fleet, KafkaBus(url) as bus:
        with _quiet(fleet):
            await _share_out(await _start(fleet, replicas))
            begun = time.perf_counter()
            await _publish(bus, cluster, range(count))
            await _answered(bus, cluster, count)
            return count / (time.perf_counter() - begun)


async def replacement(folder: Path, url: str, cluster: str) -> float:
    """Seconds from the kill -9 of one of two replicas until a worker of every host, registered then, has its answer."""
    async with Fleet(folder, url, cluster) as fleet:
        with _quiet(fleet):
            one, two = await _start(fleet, 2)
            await _share_out([one, two])
            await fleet.register(HOSTS, ["before"])
            await fleet.answered()
            begun = time.perf_counter()
            one.kill9()
            await fleet.register(HOSTS, ["after"])
            await fleet.answered()
            return time.perf_counter() - begun


async def _start(fleet: Fleet, replicas: int) -> list[Manager]:
    def start() -> list[Manager]:
        return [fleet.start(f"r{number}", session=f"{SESSION_S:g}s") for number in range(replicas)]

    return await anyio.to_thread.run_sync(start)


@contextmanager
def _quiet(fleet: Fleet) -> Iterator[None]:
    """A fleet prints the logs of the managers it has at its end, which is for what failed."""
    yield
    for manager in fleet.managers:
        manager.stop()
    fleet.managers.clear()


async def _share_out(managers: Sequence[Manager]) -> None:
    """Wait until these replicas serve all partitions, each its share."""

    def owned() -> list[int]:
        numbers = [str(number) for number in range(PARTITIONS)]
        return [sum(m.metric("outfitter_partition_ready", partition=n) == 1 for n in numbers) for m in managers]

    with anyio.fail_after(SHARED_WITHIN):
        while True:
            shares = await anyio.to_thread.run_sync(owned)
            if sum(shares) == PARTITIONS and min(shares) >= PARTITIONS // len(managers):
                return
            await anyio.sleep(0.1)


async def _publish(bus: Bus, cluster: str, numbers: range) -> None:
    """Publish registrations, each host's in its partition."""
    topic = topics(cluster).registrations
    for start in range(numbers.start, numbers.stop, AT_ONCE):
        async with anyio.create_task_group() as tasks:
            for number in range(start, min(start + AT_ONCE, numbers.stop)):
                host = HOSTS[number % len(HOSTS)]
                body = loads.registration(number, host=host, resource="gpu")
                tasks.start_soon(bus.publish, topic, partition_of(host, PARTITIONS), Entry(host.encode(), body))


async def _answered(bus: Bus, cluster: str, count: int) -> None:
    """Wait until `count` workers have their devices, reading all partitions as operators do."""
    topic = topics(cluster).allocations
    granted: set[bytes] = set()

    async def follow(partition: int, enough: anyio.Event) -> None:
        async with await bus.open_reader(topic, partition, start=0, committed=True) as reader:
            while len(granted) < count:
                granted.update(m.key or b"" for m in await reader.fetch(timeout=0.2) if loads.infos_in(m))
        enough.set()

    enough = anyio.Event()
    with anyio.fail_after(loads.ANSWERED_WITHIN + count / 200):
        async with anyio.create_task_group() as tasks:
            for partition in range(PARTITIONS):
                tasks.start_soon(follow, partition, enough)
            await enough.wait()


def _config(count: int) -> str:
    """Devices enough on each host for all of its workers."""
    each = -(-count // len(HOSTS))
    return (
        'lease = "none"\nlog-level = "warning"\nexternal-resources = ["gpu"]\n'
        f'[external-resource.gpu]\namount = 1\ndriver = "static"\nparam.count = {each}\n'
    )

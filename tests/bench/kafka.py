"""Outfitter on Kafka against the bare loop: throughput from a backlog, latency at three rates, and replaying a ledger.

One broker, both sides by turns, so that what else the machine does hits both. The bare loop runs twice over: with
a manager's own records (`bare`, what the ratios are to), and with one record of a registration's size for each
(`plain`, to be compared with what is known of such loops).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from bench import loads, machine
from bench.bare import Job
from outfitter_proto import topics as wanted_topics
from outfitter_proto.bus.kafka.adapter import KafkaBus
from outfitter_proto.names import checkpoint_key, host_writer, topics
from support.manager import Manager, environment

RATES = (20, 200, 1000)
READY_WITHIN = 30.0


class Sizes(Struct, frozen=True, kw_only=True):
    """How much is measured: registrations of a backlog, seconds at each rate, rounds, records of a ledger."""

    backlog: int = 50_000
    seconds: float = 6.0
    rounds: int = 3
    ledger: int = 200_000


class Run(Struct, kw_only=True):
    """One backlog's figures: answers and transactions a second, CPU microseconds an answer (without the start)."""

    rate: float
    commits: float
    cpu_us: float


def config(workers: int) -> str:
    """A manager's configuration with so many devices that none of `workers` waits."""
    resources = [loads.resource(first) for first in range(0, workers, loads.DEVICES)]
    described = [
        f'[external-resource.{name}]\namount = 1\ndriver = "static"\nparam.count = {loads.DEVICES}\n'
        for name in resources
    ]
    return f"external-resources = {json.dumps(resources)}\n{''.join(described)}"


class Contest:
    """Managers and bare loops by turns on one broker. Each run over a backlog has topics of its own."""

    def __init__(self, bootstrap: str, folder: Path, sizes: Sizes) -> None:
        self.bootstrap = bootstrap
        self.url = f"kafka://{bootstrap}"
        self.folder = folder
        self.sizes = sizes
        self.samples: dict[str, bytes] = {}
        self._start_cpu: dict[str, float] = {}
        self._runs = 0

    # --- the two sides --------------------------------------------------------------------------------------

    @contextmanager
    def manager(self, cluster: str, workers: int) -> Iterator[int]:
        """A manager at work; its pid."""
        manager = Manager(
            self.folder / cluster,
            config(workers),
            bus=self.url,
            host=loads.HOST,
            cluster=cluster,
            arguments=["--log-level", "warning"],
        )
        manager.start()
        try:
            yield manager.pid
        finally:
            manager.stop()

    @contextmanager
    def bare(self, cluster: str, *, plain: bool) -> Iterator[int]:
        """A bare loop at work; its pid."""
        names = topics(cluster)
        job = Job(
            bootstrap=self.bootstrap,
            identity=f"{cluster}-bare",
            source=names.registrations,
            ledger_topic=names.allocations,
            history_topic=names.history,
            worker=loads.worker(0),
            incarnation=loads.incarnation(0),
            ledger=plain_answer() if plain else self.samples["ledger"],
            history=None if plain else self.samples["history"],
            checkpoint=self.samples["checkpoint"],
            uvloop=machine.has_uvloop(),
        )
        path = self.folder / f"{cluster}.json"
        path.write_bytes(msgspec.json.encode(job))
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.bare", str(path)], stdout=subprocess.PIPE, env=environment(), text=True
        )
        try:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("the bare loop did not start; what it said is above")
            yield process.pid
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    # --- what is measured -----------------------------------------------------------------------------------

    async def take_samples(self) -> None:
        """Have a manager answer one registration, and keep the records it wrote."""
        cluster = await self.new_cluster("sample")
        names = topics(cluster)
        async with KafkaBus(self.url) as bus:
            await loads.publish_backlog(bus, cluster, range(1))
            with self.manager(cluster, self.sizes.backlog):
                await loads.wait_until_answered(bus, names, 0, 3)
            key = f"{loads.HOST}/{loads.worker(0)}/{loads.incarnation(0)}".encode()
            self.samples["ledger"] = await loads.sample(bus, names.allocations, key)
            self.samples["history"] = await loads.sample(bus, names.history, key)
            self.samples["checkpoint"] = await loads.sample(
                bus, names.allocations, checkpoint_key(host_writer(loads.HOST)).encode()
            )

    async def backlog(self, kind: str) -> Run:
        """Answer a backlog that was there before: `outfitter`, `bare` or `plain`."""
        if kind not in self._start_cpu:
            with self.side(kind, await self.new_cluster(f"{kind}-start")) as pid:
                self._start_cpu[kind] = machine.cpu_seconds(pid)
        cluster = await self.new_cluster(kind)
        names = topics(cluster)
        count = self.sizes.backlog
        async with KafkaBus(self.url) as bus:
            await loads.publish_backlog(bus, cluster, range(count))
            with self.side(kind, cluster) as pid:
                await loads.wait_until_answered(bus, names, 0, count)
                cpu = machine.cpu_seconds(pid) - self._start_cpu[kind]
            found = await loads.progress(bus, names, 0)
        if found.answers != count:
            raise RuntimeError(f"{kind} answered {found.answers} registrations of {count}")
        seconds = count / found.rate
        return Run(rate=found.rate, commits=len(found.commits) / seconds, cpu_us=cpu / count * 1e6)

    def side(self, kind: str, cluster: str) -> AbstractContextManager[int]:
        if kind == "outfitter":
            return self.manager(cluster, self.sizes.backlog)
        return self.bare(cluster, plain=kind == "plain")

    async def latency(self, kind: str, cluster: str, rate: int, first: int) -> list[float]:
        """Milliseconds from registration to infos, at `rate` a second."""
        count = max(20, int(rate * self.sizes.seconds))
        return await loads.latencies(self.url, cluster, rate=rate, first=first, count=count)

    async def new_cluster(self, kind: str) -> str:
        """A cluster with topics as `outfitter topics create` makes them, of one partition."""
        self._runs += 1
        cluster = f"bench-{self._runs}-{kind}"
        async with KafkaBus(self.url) as bus:
            await wanted_topics.create(bus, cluster, partitions=1)
        return cluster


def plain_answer() -> bytes:
    """An allocation record with nothing in it but what must be, filled up to a registration's size."""
    body = (
        f'{{"type":"allocation","host":"{loads.HOST}","worker":"{loads.worker(0)}",'
        f'"incarnation":"{loads.incarnation(0)}","state":"allocated","request":{{"amounts":{{}}}},'
        '"since":"2026-01-01T00:00:00Z","writer":"w","commit":1,"source":{"partition":0,"offset":0},'
        '"resources":{"gpu":[]},"reason":"'
    )
    return (body + "x" * (loads.REGISTRATION_BYTES - len(body) - 2) + '"}').encode()

"""Outfitter on Kafka against the bare loop: throughput from a backlog, latency at three rates, replaying a ledger, and
the time to an answer after a manager was killed.

One broker, both sides by turns, so that what else the machine does hits both. The bare loop runs twice over: with
a manager's own records (`bare`, what the ratios are to), and with one record of a registration's size for each
(`plain`, to be compared with what is known of such loops).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import anyio
import msgspec
from msgspec import Struct

from bench import loads, machine
from bench.baselines.bare import Job
from outfitter_proto import topics as wanted_topics
from outfitter_proto.bus.kafka.adapter import KafkaBus
from outfitter_proto.keys import checkpoint_key, host_writer
from outfitter_proto.names import Topics, topics
from support.managers.process import Manager, environment

RATES = (20, 200, 1000)
READY_WITHIN = 30.0


class Sizes(Struct, frozen=True, kw_only=True):
    """How much is measured: registrations of a backlog, and of FastStream's, how many backlogs of each side, seconds at
    each rate, registrations timed by each turn at least, rounds of all else, records of a ledger that is replayed,
    allocations in the ledger of a manager that is killed, registrations for replicas."""

    backlog: int = 50_000
    slow_backlog: int = 10_000
    backlogs: int = 7  # two of one side, a few seconds apart, may differ by a fifth
    seconds: float = 6.0
    timed: int = 200  # by each turn, 600 in a round: of 120, the p99 of two bare loops may differ by more than half
    rounds: int = 3
    ledger: int = 1_000_000
    held: int = 40_000
    replicas: int = 20_000


class Run(Struct, kw_only=True):
    """One backlog's figures: answers and transactions a second, CPU microseconds an answer (without the start), bytes
    of memory in use at the end."""

    rate: float
    commits: float
    cpu_us: float
    memory: int


def config(workers: int) -> str:
    """A manager's configuration with so many devices that none of `workers` waits."""
    resources = [loads.nth_resource(first) for first in range(0, workers, loads.DEVICES)]
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
        manager = self.new_manager(cluster, workers)
        manager.start()
        try:
            yield manager.pid
        finally:
            manager.stop()

    def new_manager(self, cluster: str, workers: int) -> Manager:
        """A manager that is not started yet, with devices for `workers`."""
        return Manager(
            self.folder / cluster,
            config(workers),
            bus=self.url,
            host=loads.HOST,
            cluster=cluster,
            arguments=["--log-level", "warning"],
        )

    def bare(self, cluster: str, *, plain: bool) -> AbstractContextManager[int]:
        """A bare loop at work; its pid."""
        return self.process("bench.baselines.bare", cluster, self.job(cluster, plain=plain))

    def job(self, cluster: str, *, plain: bool) -> Job:
        """What the bare loop does on a cluster's topics."""
        names = topics(cluster)
        return Job(
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

    @contextmanager
    def process(self, module: str, cluster: str, job: Job) -> Iterator[int]:
        """A process that does a job and says `ready`; its pid."""
        path = self.folder / f"{cluster}.json"
        path.write_bytes(msgspec.json.encode(job))
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(path)], stdout=subprocess.PIPE, env=environment(), text=True
        )
        try:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{module} did not start; what it said is above")
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
        count = self.sizes.slow_backlog if kind == "faststream" else self.sizes.backlog
        async with KafkaBus(self.url) as bus:
            await loads.publish_backlog(bus, cluster, range(count))
            with self.side(kind, cluster) as pid:
                await loads.wait_until_answered(bus, names, 0, count)
                found = await self._all(bus, names, count, checkpoints=kind != "faststream")
                cpu = machine.cpu_seconds(pid) - self._start_cpu[kind]
                memory = machine.resident_bytes(pid)
        seconds = count / found.rate
        return Run(rate=found.rate, commits=len(found.commits) / seconds, cpu_us=cpu / count * 1e6, memory=memory)

    @staticmethod
    async def _all(bus: KafkaBus, names: Topics, count: int, *, checkpoints: bool) -> loads.Progress:
        """What became of a backlog once all of it is answered: what was waited for may be markers and checkpoints."""
        with anyio.fail_after(loads.ANSWERED_WITHIN):
            while True:
                found = await loads.progress(bus, names, 0, checkpoints=checkpoints)
                if found.answers >= count:
                    return found

    def side(self, kind: str, cluster: str, workers: int | None = None) -> AbstractContextManager[int]:
        """What answers, at work; its pid. A manager has devices for `workers`, or for a backlog."""
        match kind:
            case "outfitter":
                return self.manager(cluster, workers or self.sizes.backlog)
            case "faststream":
                return self.process("bench.baselines.framework", cluster, self.job(cluster, plain=False))
            case _:
                return self.bare(cluster, plain=kind == "plain")

    async def after_kill(self) -> list[float]:
        """Kill -9 a manager whose ledger has `Sizes.held` allocations, and start it again; milliseconds from each kill
        to the infos, decoded, of a worker that registered right after it."""
        cluster, held, rounds = await self.new_cluster("kill"), self.sizes.held, self.sizes.rounds
        names = topics(cluster)
        manager = self.new_manager(cluster, held + rounds)
        took: list[float] = []
        async with KafkaBus(self.url) as bus:
            await loads.publish_backlog(bus, cluster, range(held))
            manager.start()
            try:
                await loads.wait_until_answered(bus, names, 0, held)
                await self._all(bus, names, held, checkpoints=True)
                for number in range(held, held + rounds):
                    _, end = await bus.offsets(names.allocations, 0)
                    async with await bus.open_reader(names.allocations, 0, start=end, committed=True) as reader:
                        begun = time.perf_counter()
                        manager.kill9()
                        manager.start(ready=False)
                        await loads.publish_backlog(bus, cluster, range(number, number + 1))
                        key = f"{loads.HOST}/{loads.worker(number)}/{loads.incarnation(number)}".encode()
                        with anyio.fail_after(loads.ANSWERED_WITHIN):
                            while not any(m.key == key and loads.infos_in(m) for m in await reader.fetch(timeout=1.0)):
                                pass
                        took.append((time.perf_counter() - begun) * 1000)
            finally:
                manager.stop()
        return took

    async def new_cluster(self, kind: str) -> str:
        """A cluster with topics as `outfitter topics create` makes them, of one partition."""
        cluster = self.fresh_name(kind)
        async with KafkaBus(self.url) as bus:
            await wanted_topics.create(bus, cluster, partitions=1)
        return cluster

    def fresh_name(self, kind: str) -> str:
        """A cluster name that was not used yet."""
        self._runs += 1
        return f"bench-{self._runs}-{kind}"


def plain_answer() -> bytes:
    """An allocation record with nothing in it but what must be, filled up to a registration's size."""
    body = (
        f'{{"type":"allocation","host":"{loads.HOST}","worker":"{loads.worker(0)}",'
        f'"incarnation":"{loads.incarnation(0)}","state":"allocated","request":{{"amounts":{{}}}},'
        '"since":"2026-01-01T00:00:00Z","writer":"w","commit":1,"source":{"partition":0,"offset":0},'
        '"resources":{"gpu":[]},"reason":"'
    )
    return (body + "x" * (loads.REGISTRATION_BYTES - len(body) - 2) + '"}').encode()

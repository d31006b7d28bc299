"""One run: a seed makes a world of hosts, managers and workers, ill-treats it for a while, and lets it come to rest.

In the first part managers are killed, stopped, cut off, replaced while they sleep, and the network and the broker
misbehave. Then all faults end; each worker registers once more and must be served, and leaves; what is left must be a
ledger in which everything is over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
from msgspec import Struct

from outfitter_proto.names import Topics, topics
from outfitter_proto.partitioning import partition_of
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.processor import Limits
from simulation.broker import Broker, Habits
from simulation.client import ModelBus
from simulation.hardware import RESOURCE, Bench
from simulation.loop import Loop, Process
from simulation.managers import CLUSTER, Manager, Site
from simulation.network import CALM, Link, Network, Weather
from simulation.owners import Owners
from simulation.workers import Worker

TOPICS: Topics = topics(CLUSTER)
COMPACTED = {TOPICS.registrations: False, TOPICS.allocations: True, TOPICS.history: False, TOPICS.dead_letters: False}
POINTS = ("EndTxn", "EndTxn", "Produce", "AddPartitionsToTxn", "InitProducerId", "ListOffsets", "Fetch", "Metadata")
STAGES = ("sent", "done", "answered")
STORMS: tuple[tuple[str, ...], ...] = (
    (), (), ("EndTxn",), ("EndTxn", "AddPartitionsToTxn"), ("Produce",), ("InitProducerId", "EndTxn"), ("Fetch",),
)  # fmt: skip
"""The requests to which something happens: to all of them seldom, or to some of them often."""
REST_S = 240.0
"""How long the world may take, once all faults are over, until every worker was served and has left."""
LONGEST_LEASE_S = 15.0

MakeBus = Callable[..., ModelBus]


class Setting(Struct, kw_only=True, frozen=True):
    """What the seed decides before anything happens."""

    partitions: int
    hosts: int
    workers: int
    trouble_s: float
    faults_every_s: float
    weather: Weather
    habits: Habits
    transaction_timeout_s: float


def setting(seed: int) -> Setting:
    """The setting of a seed."""
    dice = random.Random(f"{seed}/setting")
    requests = dice.choice(STORMS)
    bad = dice.choice((0.0, 0.01, 0.03, 0.06)) * (5 if requests else 1)
    return Setting(
        partitions=dice.choice((1, 1, 2)),
        hosts=dice.choice((1, 1, 2, 3)),
        workers=dice.choice((2, 3, 4)),
        trouble_s=dice.choice((20.0, 40.0, 60.0)),
        faults_every_s=dice.choice((2.0, 4.0, 8.0)),
        weather=Weather(
            latency_s=dice.choice((0.001, 0.005, 0.05)),
            request_lost=bad * dice.random(),
            answer_lost=bad * dice.random(),
            late=bad * dice.random(),
            refused=bad * dice.random() * 0.5,
            requests=requests,
        ),
        habits=Habits(
            marker_s=dice.choice((0.002, 0.05, 0.5)),
            scan_s=dice.choice((1.0, 5.0)),
            clean_s=dice.choice((None, 3.0, 10.0)),
        ),
        transaction_timeout_s=dice.choice((1.0, 5.0, 15.0)),
    )


class World:
    """See the module. `log`, if there is one, collects what happened, for people."""

    def __init__(self, loop: Loop, seed: int, *, make_bus: MakeBus = ModelBus, log: list[str] | None = None) -> None:
        self.loop = loop
        self.seed = seed
        self.setting = setting(seed)
        self.log = log
        self.dice = random.Random(f"{seed}/world")
        self.broker = Broker(loop, seed, COMPACTED, self.setting.partitions, self.setting.habits)
        self.network = Network(loop, seed)
        self.network.watch = self._watch
        if log is not None:
            self.network.trace = self.note
        self.managers: list[Manager] = []
        self.workers: list[Worker] = []
        self.stalled: list[str] = []
        self.faults = 0
        self.over = False
        self._make_bus = make_bus
        self._trap: tuple[str, str, int, Callable[[Process], None]] | None = None
        self.sites = [self._site(number) for number in range(self.setting.hosts)]
        self._started = 0

    @property
    def processes(self) -> list[Process]:
        managers = [manager.process for manager in self.managers]
        return [self.loop.world, *managers, *(worker.process for worker in self.workers)]

    def note(self, who: str, what: str) -> None:
        """Write down what happened."""
        if self.log is not None:
            self.log.append(f"{self.loop.time() - 1000:9.3f} {who:10} {what}")

    def _site(self, number: int) -> Site:
        dice = self.dice
        host = f"h{number}"
        return Site(
            host=host,
            partition=partition_of(host, self.setting.partitions),
            owners=Owners(self.loop, host),
            bench=Bench(host, dice.choice((1, 2, 3)), prepares=dice.random() < 0.4, dice=dice),
            limits=Limits(
                batch_records=dice.choice((2, 5, 1000)),
                lease_grace_s=dice.choice((0.5, 2.0)),
                checkpoint_records=dice.choice((3, 20, 5000)),
                checkpoint_interval_s=dice.choice((5.0, 3600.0)),
            ),
            lease_s=10.0,
            retention_s=dice.choice((60.0, 3600.0)),
            chunk=dice.choice((1, 3, 256)),
            metrics=Metrics([RESOURCE]),
            skew_s=dice.uniform(-3.0, 3.0),
        )

    # --- a run ---

    async def main(self) -> None:
        """The whole run."""
        world = self.loop.world
        self.loop.spawn(world, self.broker.run)
        for site in self.sites:
            self.start(site)
            for number in range(self.setting.workers):
                self._start_worker(site, f"w{number}")
        self.network.weather = self.setting.weather
        await self._ill_treat()
        await self._rest()
        self.over = True

    def start(self, site: Site) -> Manager:
        """Start a manager of a host."""
        self._started += 1
        process = Process(f"m{self._started}@{site.host}")
        link = Link(self.network, process)
        bus = self._make_bus(self.broker, link, transaction_timeout_s=self.setting.transaction_timeout_s)
        site.skew_s += self.dice.uniform(-1.0, 1.0)
        manager = Manager(self.loop, link, bus, TOPICS, site, f"{self._started:04}-{process.name}")
        self.managers.append(manager)
        self.loop.spawn(process, manager.main)
        self.note(process.name, "started")
        return manager

    def _start_worker(self, site: Site, name: str) -> None:
        process_dice = random.Random(f"{self.seed}/{site.host}/{name}")

        def told(what: str, key: str) -> None:
            self.note(key, what)

        link = Link(self.network, Process(""))
        worker = Worker(
            self.loop, ModelBus(self.broker, link), TOPICS, host=site.host, name=name, partition=site.partition,
            devices=len(site.bench.ids), owners=site.owners, dice=process_dice, told=told,
        )  # fmt: skip
        link.process = worker.process
        self.workers.append(worker)
        self.loop.spawn(worker.process, worker.main)

    # --- faults ---

    async def _ill_treat(self) -> None:
        end = self.loop.time() + self.setting.trouble_s
        while self.loop.time() < end:
            await anyio.sleep(self.dice.expovariate(1 / self.setting.faults_every_s))
            self.faults += 1
            if self.dice.random() < 0.4:
                self._set_trap()
            else:
                self._fault()
            for site in self.sites:
                if not any(manager.up for manager in self.managers if manager.site is site):
                    self._later(self.dice.random() * 3, self._ensure, site)

    def _later(self, seconds: float, act: Callable[..., Any], *args: Any) -> None:
        self.loop.call_later(seconds, act, *args, context=self.loop.within(self.loop.world))

    def _ensure(self, site: Site) -> None:
        if not any(manager.up for manager in self.managers if manager.site is site):
            self.start(site)

    def _fault(self) -> None:
        dice = self.dice
        up = [manager for manager in self.managers if manager.up]
        kind = dice.choice(("kill", "kill", "stop", "stop", "cut", "down", "worker", "device", "slow", "compaction"))
        if kind == "worker":
            worker = dice.choice(self.workers)
            if dice.random() < 0.5:
                self._stop(worker.process, dice.random() * 20)
            else:
                self._cut(worker.bus.link, dice.random() * 20)
        elif kind == "device":
            bench = dice.choice(self.sites).bench
            name = dice.choice(bench.ids)
            bench.missing.add(name)
            self.note(bench.host, f"device {name} is gone")
            self._later(dice.random() * 20, bench.missing.discard, name)
        elif kind == "slow":
            bench = dice.choice(self.sites).bench
            bench.slow_s, bench.failing = dice.choice((0.0, 1.0, 8.0)), dice.choice((0.0, 0.3))
            self.note(bench.host, f"drivers take up to {bench.slow_s} s, and fail {bench.failing:.0%}")
        elif kind == "down":
            self.network.down = True
            seconds = dice.random() * 8
            self.note("broker", f"away for {seconds:.1f} s")
            self._later(seconds, self._come_back)
        elif kind == "compaction":
            self.broker.logs[TOPICS.allocations, dice.randrange(self.setting.partitions)].clean()
        elif up:
            self._harm(dice.choice(up), kind)

    def _harm(self, manager: Manager, kind: str) -> None:
        if not manager.up:
            return
        if kind == "kill":
            self.loop.kill(manager.process)
            self.note(manager.process.name, "killed")
            self._later(self.dice.random() ** 2 * 6, self._ensure, manager.site)
        elif kind == "stop":
            seconds = self.dice.random() ** 2 * 40
            self._stop(manager.process, seconds)
            if self.dice.random() < 0.6:
                self._later(self.dice.random() * min(seconds, 10), self._replace, manager)
        else:
            self._cut(manager.link, self.dice.random() * 15)
            if self.dice.random() < 0.4:
                self._later(self.dice.random() * 10, self._replace, manager)

    def _replace(self, manager: Manager) -> None:
        """Somebody (an orchestrator) thinks that it is gone, and starts another one."""
        if not self.over and (manager.process.stopped or manager.link.cut):
            self.note(manager.process.name, "replaced while it is away")
            self.start(manager.site)

    def _stop(self, process: Process, seconds: float) -> None:
        self.loop.stop_process(process)
        self.note(process.name, f"stopped for {seconds:.1f} s")
        self._later(seconds, self._go_on, process)

    def _go_on(self, process: Process) -> None:
        if process.stopped:
            self.loop.go_on(process)
            self.note(process.name, "goes on")

    def _cut(self, link: Link, seconds: float) -> None:
        link.cut = True
        self.note(link.process.name, f"cut off for {seconds:.1f} s")
        self._later(seconds, self._join, link)

    def _join(self, link: Link) -> None:
        if link.cut:
            link.cut = False
            self.note(link.process.name, "is connected again")

    def _come_back(self) -> None:
        if self.network.down:
            self.network.down = False
            self.note("broker", "is back")

    def _set_trap(self) -> None:
        """Harm whichever manager comes to a certain point of its work next."""
        kind = self.dice.choice(("kill", "stop", "cut"))
        by_process = {manager.process: manager for manager in self.managers}

        def snap(process: Process) -> None:
            manager = by_process.get(process)
            if manager is not None:
                self._harm(manager, kind)

        self._trap = (self.dice.choice(POINTS), self.dice.choice(STAGES), self.dice.randrange(12), snap)

    def _watch(self, process: Process, what: str, stage: str) -> None:
        if self.log is not None and what != "Fetch" and what != "ListOffsets":
            self.note(process.name, f"{what} {stage}")
        if self._trap is None or "@" not in process.name:
            return
        wanted, at, left, snap = self._trap
        if what == wanted and stage == at:
            self._trap = (wanted, at, left - 1, snap) if left else None
            if not left:
                self.note(process.name, f"(at {what} {stage})")
                snap(process)

    # --- rest ---

    async def _rest(self) -> None:
        """End all faults and wait until the last worker is gone, and what the silent ones held is free."""
        self.note("world", "all faults end")
        self._trap = None
        self.over = True
        self.network.down = False
        self.network.weather = CALM
        for manager in self.managers:
            manager.link.cut = False
            self._go_on(manager.process)
        for site in self.sites:
            site.bench.missing.clear()
            site.bench.slow_s = site.bench.failing = 0.0
        for worker in self.workers:
            worker.bus.link.cut = False
            self._go_on(worker.process)
            worker.closing = True
        deadline = self.loop.time() + REST_S
        while self.loop.time() < deadline and not all(worker.finished for worker in self.workers):
            await anyio.sleep(1.0)
            for site in self.sites:
                self._ensure(site)
        self.stalled = [worker.waiting_for or worker.process.name for worker in self.workers if not worker.finished]
        await anyio.sleep(LONGEST_LEASE_S * 2 + 10)
        for site in self.sites:
            self._ensure(site)
        await anyio.sleep(5.0)

    def close(self) -> None:
        """Nobody looks any more: every process may go on, without a bus."""
        for manager in self.managers:
            manager.link.closed = True
            self.loop.raise_up(manager.process)
        for worker in self.workers:
            worker.bus.link.closed = True
            self.loop.raise_up(worker.process)

"""One run: a seed makes a world of hosts, managers and workers, ill-treats it for a while, and lets it come to rest.

In the first part managers are killed, stopped, cut off, replaced while they sleep, and the network and the broker
misbehave. Then all faults end; each worker registers once more and must be served, and leaves; what is left must be a
ledger in which everything is over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
from msgspec import structs

from outfitter_proto.names import managers_topic
from outfitter_proto.partitioning import partition_of
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.changelog.snapshots import Pace
from outfitter_service.runtime.processor.processor import Limits
from simulation.bulk import most_decided
from simulation.hosts.hardware import ASKED, BOOKED, MAP, Bench, Oddities
from simulation.hosts.managers import CLUSTER, TOPICS, Host, HostManager, Job, Manager, ReplicaManager
from simulation.hosts.owners import PID_NS, Owners
from simulation.hosts.workers import LONGEST_LEASE_S, Worker
from simulation.loop import Loop, Process
from simulation.model.broker import Broker
from simulation.model.client import ModelBus
from simulation.model.network import CALM, Link, Network
from simulation.world import settings
from simulation.world.faults import Faults
from simulation.world.lowering import lowering
from simulation.world.onlooker import Onlooker
from simulation.world.operators import operators
from simulation.world.remaking import adopt, remake, remaking
from simulation.world.retention import retention
from simulation.world.settings import setting
from simulation.world.silence import silences
from simulation.world.strangers import lateness, strangers

COMPACTED = {
    TOPICS.registrations: False,
    TOPICS.allocations: True,
    TOPICS.history: False,
    TOPICS.dead_letters: False,
    managers_topic(CLUSTER): True,
}
REST_S = 240.0
"""How long the world may take, once all faults are over, until every worker was served and has left."""
SWEPT_WITHIN_S = 90.0
"""How long what is nobody's may take to be answered: a sweeper that had trouble tries again every 36 s at least."""

MakeBus = Callable[..., ModelBus]


class World:
    """See the module. `log`, if there is one, collects what happened, for people."""

    def __init__(self, loop: Loop, seed: int, *, make_bus: MakeBus = ModelBus, log: list[str] | None = None) -> None:
        self.loop = loop
        self.seed = seed
        self.setting = setting(seed)
        self.log = log
        self.dice = random.Random(f"{seed}/world")
        self.broker = Broker(loop, seed, COMPACTED, self.setting.partitions, self.setting.habits)
        self.remaking = remaking(TOPICS, seed, self.setting.trouble_s)
        self.remade_at: float | None = None
        self.written: set[str] = set()
        self.complaints: list[str] = []
        lost = retention(self.broker, TOPICS, seed, many=bool(self.setting.replicas))
        self.retention = lost if self.remaking is None else None
        self.lowering = lowering(self.broker, seed)
        self.network = Network(loop, seed)
        if log is not None:
            self.network.trace = self.note
        self.managers: list[Manager] = []
        self.workers: list[Worker] = []
        self.stalled: list[str] = []
        self.faults = Faults(self)
        self.network.watch = self.faults.watch
        self.over = False
        self._make_bus = make_bus
        self.onlooker = Onlooker(self) if self.setting.beat_s is not None and self.remaking is None else None
        self.hosts = [self._host(number) for number in range(self.setting.hosts)]
        names = [host.name for host in self.hosts]
        self.strangers = strangers(self.broker, TOPICS, seed, hosts=names, many=bool(self.setting.replicas))
        self.operators = operators(self)
        self.silences = silences(self)
        self.jobs = self._jobs()
        if self.remaking is not None:
            for job in self.jobs:
                job.limits = structs.replace(job.limits, look_s=self.remaking.look_s)
        self.usual = {job.name: structs.replace(job) for job in self.jobs}
        self._configuring = random.Random(f"{seed}/configurations")
        self._walls = random.Random(f"{seed}/namespaces")
        self._started = 0

    @property
    def processes(self) -> list[Process]:
        managers = [manager.process for manager in self.managers]
        return [self.loop.world, *managers, *(worker.process for worker in self.workers)]

    def note(self, who: str, what: str) -> None:
        """Write down what happened."""
        if self.log is not None:
            self.log.append(f"{self.loop.time() - 1000:9.3f} {who:10} {what}")

    def _host(self, number: int) -> Host:
        name = f"h{number}"
        devices = self.dice.choice((1, 2, 3))
        large = self.setting.bulk
        if large is not None:
            devices = large.devices
        cards = random.Random(f"{self.seed}/{name}/cards").randint(1, devices)
        return Host(
            name=name,
            partition=partition_of(name, self.setting.partitions),
            owners=Owners(self.loop, name, survivors=self._survivors(name)),
            bench=Bench(name, devices, dice=self.dice, catalogue=self.setting.catalogue, cards=cards, bulk=large),
        )

    def _kept(self, retention_s: float) -> float:
        return settings.KEPT_S if self.setting.catalogue.books else retention_s

    def _survivors(self, host: str) -> random.Random | None:
        """The dice of workers that leave processes behind. Where a ledger is made anew nobody knows of these."""
        dice = random.Random(f"{self.seed}/{host}/survivors")
        return dice if dice.random() < settings.HAUNTED and self.remaking is None else None

    def _jobs(self) -> list[Job]:
        if not self.setting.replicas:
            jobs = [self._job(host.name, [host]) for host in self.hosts]
            if self.strangers is not None:
                jobs[-1].begins_at = self.loop.time() + lateness(self.seed)
            return jobs
        first = self._job("r0", self.hosts)
        first.limits = self._limits_of_many(first.limits)
        return [first, *(structs.replace(first, name=f"r{number}") for number in range(1, self.setting.replicas))]

    def _limits_of_many(self, limits: Limits) -> Limits:
        """Of managers of cluster scope: in a flood they commit and read ahead little, so that it lasts."""
        dice = random.Random(f"{self.seed}/limits")
        if not self.setting.flood:
            return structs.replace(limits, events_per_commit=Limits().events_per_commit)
        return structs.replace(
            limits,
            events_per_commit=dice.choice((5, 10)),
            read_ahead=dice.choice((3, 10, 30)),
            quiet_limit=dice.choice((1, 4, 20)),
        )

    def _job(self, name: str, hosts: list[Host]) -> Job:
        dice = self.dice
        return Job(
            name=name,
            hosts=hosts,
            machine=f"machine-of-{name}",
            prepares=dice.random() < 0.4,
            limits=Limits(
                events_per_commit=dice.choice((2, 5, 1000)),
                lease_grace_s=max(dice.choice((0.5, 2.0)), self.setting.lease_grace_s),
                checkpoint_records=dice.choice((3, 20, 5000)),
                checkpoint_interval_s=dice.choice((5.0, 3600.0)),
                history=dice.choice((None, Pace(), Pace())),
                beat_s=self.setting.beat_s,
                max_bytes=most_decided(self.setting.takes_bytes),
            ),
            lease_s=10.0,
            retention_s=self._kept(dice.choice((60.0, settings.KEPT_S))),
            chunk=dice.choice((1, 3, 256)),
            metrics=Metrics(self.setting.catalogue.names),
            catalogue=self.setting.catalogue,
            partitions=self.setting.partitions,
            skew_s=dice.uniform(-3.0, 3.0),
        )

    # --- a run ---

    async def main(self) -> None:
        """The whole run."""
        world = self.loop.world
        self.loop.spawn(world, self.broker.run)
        for job in self.jobs:
            if job.begins_at > self.loop.time():
                self.later(job.begins_at - self.loop.time(), self.ensure, job)
            else:
                self.start(job)
        for host in self.hosts:
            for number in range(self.setting.workers):
                self._start_worker(host, f"w{number}")
        if self.setting.unruly:
            self._start_worker(self.hosts[0], "w0", twin="t")
        self.network.weather = self.setting.weather
        if self.setting.flood:
            self.loop.spawn(world, self.faults.flood)
        if self.setting.jumps:
            self.loop.spawn(world, self.faults.set_clocks)
        for each in (self.retention, self.strangers, self.lowering, *self.silences):
            if each is not None:
                self.loop.spawn(world, partial(each.run, lambda: self.over))
        if self.onlooker is not None:
            self.loop.spawn(world, partial(self.onlooker.run, lambda: self.over))
        if self.operators is not None:
            self.loop.spawn(world, partial(self.operators.run, lambda: self.over))
            self.loop.spawn(world, partial(self.operators.lose_topic, lambda: self.over))
        if self.remaking is not None:
            self.loop.spawn(world, partial(remake, self, self.remaking))
        await self.faults.run()
        await self._rest()
        self.over = True

    def start(self, job: Job) -> Manager:
        """Start a manager."""
        if self.setting.changes:
            self._configure(job)
        job.pid_ns = self._pid_ns(job)
        self._started += 1
        process = Process(f"m{self._started}@{job.name}")
        link = Link(self.network, process)
        setting = self.setting
        bus = self._make_bus(
            self.broker, link, transaction_timeout_s=setting.transaction_timeout_s, takes_bytes=setting.takes_bytes
        )
        job.skew_s += self.dice.uniform(-1.0, 1.0)
        instance = f"{self._started:04}-{process.name}"
        # what it makes of events and the like belongs to its process
        manager: Manager = self.loop.within(process).run(self._make, job, link, bus, instance)
        self.managers.append(manager)
        self.loop.spawn(process, manager.main)
        self.note(process.name, "started")
        return manager

    def _pid_ns(self, job: Job) -> int:
        """Where the job's next manager runs: in another PID namespace than workers now and then, but not in the end."""
        is_walled = self.setting.walled and not self.over and self._walls.random() < 0.5
        return PID_NS + 1 if is_walled else PID_NS

    def _configure(self, job: Job) -> None:
        """What the job's next manager is configured with: what is usual, as always in the end, or something else.

        Where the driver of `map` alone knows which names mean one device, its silence is a fault of its own: neither is
        it left out, nor are all devices lent at once meanwhile, as shared ones are. Nor is a script with books left
        out: its driver alone knows what it has offered.
        """
        dice, usual = self._configuring, self.usual[job.name]
        mapped = usual.catalogue.mapped
        new = usual
        if not self.over and dice.random() < 0.6:
            names = usual.catalogue.names
            odd = {name: dice.random() for name in names}
            kept = (BOOKED, MAP) if mapped else (BOOKED,)
            new = structs.replace(
                usual,
                prepares=dice.random() < 0.5,
                lease_s=dice.choice((5.0, 10.0, LONGEST_LEASE_S)),
                retention_s=self._kept(dice.choice((20.0, 60.0, settings.KEPT_S))),
                limits=structs.replace(usual.limits, lease_grace_s=dice.choice((0.1, 0.5, 2.0))),
                oddities=Oddities(
                    without=frozenset(name for name in names if odd[name] < 0.2 and name not in kept),
                    turned=frozenset(name for name in names if odd[name] > 0.8 and name not in ASKED and not mapped),
                    backwards=dice.random() < 0.5,
                ),
            )
        for name in ("prepares", "lease_s", "retention_s", "limits", "oddities"):
            setattr(job, name, getattr(new, name))
        self.note(job.name, f"is configured with {job.oddities}, prepares={job.prepares}")

    def _make(self, job: Job, link: Link, bus: ModelBus, instance: str) -> Manager:
        if not self.setting.replicas:
            # one always may, of the others some: whoever may sweeps as soon as it serves
            may = job.hosts[0] is self.hosts[0] or random.Random(f"{self.seed}/{job.name}/sweeps").random() < 0.4
            sweeps = self.strangers is not None and may
            return HostManager(self.loop, job, link, bus, instance, sweeps=sweeps)
        setting = self.setting
        return ReplicaManager(self.loop, job, link, bus, instance, static=setting.static, session_s=setting.session_s)

    def _start_worker(self, host: Host, name: str, *, twin: str = "") -> None:
        dice = random.Random(f"{self.seed}/{host.name}/{name}{twin}")
        unruly = random.Random(f"{self.seed}/{host.name}/{name}{twin}/unruly") if self.setting.unruly else None
        link = Link(self.network, Process(""))
        worker = Worker(
            self.loop, ModelBus(self.broker, link, gives_records=dice.choice((3, 3, 1000))), host=host.name, name=name,
            bench=host.bench, owners=host.owners if not self.setting.replicas else None, dice=dice,
            tenacious=self.setting.tenacious, told=lambda what, key: self.note(key, what),
            unruly=unruly, twin=twin, silent=self._silent(host, f"{name}{twin}"),
            choosy=random.Random(f"{self.seed}/{host.name}/{name}{twin}/choosy") if self.setting.choosy else None,
        )  # fmt: skip
        link.process = worker.process
        self.workers.append(worker)
        self.loop.spawn(worker.process, worker.main)

    def _silent(self, host: Host, name: str) -> random.Random | None:
        """The dice of a worker for whom nobody sends heartbeats now and then. A ledger made anew knows none of them."""
        is_any = self.setting.walled and self.remaking is None and host.owners.survivors is None
        return random.Random(f"{self.seed}/{host.name}/{name}/silent") if is_any else None

    def later(self, seconds: float, act: Callable[..., Any], *args: Any) -> None:
        """Call `act` after so many seconds, whatever process runs now."""
        self.loop.call_later(seconds, act, *args, context=self.loop.within(self.loop.world))

    def is_done(self, job: Job) -> bool:
        """Whether a manager runs for the job, or none should yet."""
        is_early = job.begins_at > self.loop.time()
        return is_early or any(manager.up for manager in self.managers if manager.job is job)

    def ensure(self, job: Job) -> None:
        """Start a manager for the job if none runs."""
        if not self.is_done(job):
            self.start(job)

    # --- rest ---

    async def _rest(self) -> None:
        """End all faults and wait until the last worker is gone, and what the silent ones held is free."""
        self.note("world", "all faults end")
        self.faults.end()
        self.over = True
        self.network.down = False
        self.network.weather = CALM
        self.broker.lowered_to = None
        for manager in self.managers:
            manager.link.cut = False
            self.faults.go_on(manager.process)
        if self.setting.changes or self.setting.walled:
            for manager in self.managers:
                self.faults.harm(manager, "end")  # whoever comes next is configured as usual, and sees all processes
        for host in self.hosts:
            host.bench.recover()
        if self.operators is not None:
            self.operators.end_all()
        for worker in self.workers:
            worker.bus.link.cut = worker.bus.link.deaf = False
            self.faults.go_on(worker.process)
            worker.closing = True
        if self.remade_at is not None and self.remaking is not None and self.remaking.of_ledger:
            await adopt(self, self.remaking)
        deadline = self.loop.time() + REST_S
        while self.loop.time() < deadline and not all(worker.finished for worker in self.workers):
            await anyio.sleep(1.0)
            for job in self.jobs:
                self.ensure(job)
        self.stalled = [worker.waiting_for or worker.process.name for worker in self.workers if not worker.finished]
        await self._until_all_is_swept()
        if self.operators is not None:
            self.operators.give_last()
        for _ in range(int(LONGEST_LEASE_S * 2) + 15):
            for job in self.jobs:  # one that was told to stop may still be about to
                self.ensure(job)
            await anyio.sleep(1.0)

    async def _until_all_is_swept(self) -> None:
        deadline = self.loop.time() + SWEPT_WITHIN_S
        while self.strangers is not None and self.strangers.unanswered() and self.loop.time() < deadline:
            await anyio.sleep(1.0)
            for job in self.jobs:
                self.ensure(job)

    def close(self) -> None:
        """Nobody looks any more: every process may go on, without a bus."""
        for manager in self.managers:
            manager.link.closed = True
            self.loop.raise_up(manager.process)
        for worker in self.workers:
            worker.bus.link.closed = True
            self.loop.raise_up(worker.process)

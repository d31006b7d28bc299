"""One run: a seed makes a world of hosts, managers and workers, ill-treats it for a while, and lets it come to rest.

In the first part managers are killed, stopped, cut off, replaced while they sleep, and the network and the broker
misbehave. Then all faults end; each worker registers once more and must be served, and leaves; what is left must be a
ledger in which everything is over.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
from msgspec import Struct, structs

from outfitter_proto.bus import Entry
from outfitter_proto.keys import host_writer, partition_writer
from outfitter_proto.names import Topics, topics, transactional_id
from outfitter_proto.partitioning import partition_of
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.changelog.snapshots import Pace
from outfitter_service.runtime.processor.processor import Limits
from simulation.broker import Broker, Habits
from simulation.bulk import Bulk, bulk
from simulation.client import MAX_BATCH_BYTES, ModelBus
from simulation.hardware import MAP, PORT, Bench, Catalogue, Oddities
from simulation.loop import Loop, Process
from simulation.managers import CLUSTER, Host, HostManager, Job, Manager, ReplicaManager
from simulation.network import CALM, LATEST_S, Link, Network, Weather
from simulation.owners import Owners
from simulation.remaking import Remaking, fill, is_told, remaking
from simulation.retention import retention
from simulation.strangers import lateness, strangers
from simulation.workers import LONGEST_LEASE_S, Worker

TOPICS: Topics = topics(CLUSTER)
COMPACTED = {TOPICS.registrations: False, TOPICS.allocations: True, TOPICS.history: False, TOPICS.dead_letters: False}
POINTS = ("EndTxn", "EndTxn", "Produce", "AddPartitionsToTxn", "InitProducerId", "ListOffsets", "Fetch", "Metadata")
STAGES = ("sent", "done", "answered")
STORMS: tuple[tuple[str, ...], ...] = (
    (), (), ("EndTxn",), ("EndTxn", "AddPartitionsToTxn"), ("Produce",), ("InitProducerId", "EndTxn"), ("Fetch",),
)  # fmt: skip
"""The requests to which something happens: to all of them seldom, or to some of them often."""
FAULTS = (
    "kill",
    "kill",
    "stop",
    "stop",
    "sleep",
    "cut",
    "end",
    "down",
    "worker",
    "worker",
    "device",
    "slow",
    "compaction",
)
REST_S = 240.0
"""How long the world may take, once all faults are over, until every worker was served and has left."""
JUMPY = 0.3
"""How many of the worlds have machines whose wall clocks are set."""
CHANGING = 0.3
"""How many of the worlds have managers whose configuration changes."""
UNRULY = 0.3
"""How many of the worlds have unruly workers."""
JUMPS_S = (100.0, 4000.0, 100_000.0, 300_000.0)
"""By how much, forwards or back: a lease, a retention, a day, several."""
SWEPT_WITHIN_S = 90.0
"""How long what is nobody's may take to be answered: a sweeper that had trouble tries again every 36 s at least."""
ENDS_WITHIN_S = 15.0
"""How long after it has looked a manager may take to end."""
FLOOD = 300
SMALL_BATCH_BYTES = 6000
"""Little more than the least that one event's effects are cut to, and a checkpoint."""

MakeBus = Callable[..., ModelBus]


class Setting(Struct, kw_only=True, frozen=True):
    """What the seed decides before anything happens."""

    replicas: int
    """Managers of cluster scope; 0: host scope, one manager a host."""
    static: bool
    session_s: float
    partitions: int
    hosts: int
    workers: int
    trouble_s: float
    faults_every_s: float
    faults: tuple[str, ...]
    """All kinds, or a few of them: what hides a bug is often another fault."""
    tenacious: bool
    """Workers with short leases keep what they get for long."""
    weather: Weather
    habits: Habits
    transaction_timeout_s: float
    flood: int
    """Messages with which hosts of cluster scope flood their partition, of which managers read few ahead; 0: none."""
    takes_bytes: int
    """The largest ledger batch; for some it is too small for what managers make of a flood."""
    bulk: Bulk | None
    """Such a world's topics say what they take."""
    catalogue: Catalogue
    jumps: bool
    """Whether wall clocks jump."""
    changes: bool
    """Whether managers are started with another configuration now and then."""
    unruly: bool
    """Whether workers say what no client would, and one of them runs twice at once."""


def setting(seed: int) -> Setting:
    """The setting of a seed."""
    dice = random.Random(f"{seed}/setting")
    requests = dice.choice(STORMS)
    bad = dice.choice((0.0, 0.01, 0.03, 0.06)) * (5 if requests else 1)
    replicas = dice.choice((0, 0, 0, 2, 3))
    flooded = bool(replicas) and random.Random(f"{seed}/flooded").random() < 0.5
    takes_bytes = SMALL_BATCH_BYTES if flooded and random.Random(f"{seed}/bytes").random() < 0.5 else MAX_BATCH_BYTES
    large = bulk(seed) if takes_bytes == MAX_BATCH_BYTES else None
    return Setting(
        replicas=replicas,
        static=dice.random() < 0.5,
        session_s=dice.choice((3.0, 6.0, 10.0)),
        partitions=(1 if flooded else dice.choice((2, 3))) if replicas else dice.choice((1, 1, 2)),
        hosts=dice.choice((2, 3, 4)) if replicas else dice.choice((1, 1, 2, 3)),
        workers=dice.choice((2, 3, 4)),
        trouble_s=dice.choice((20.0, 40.0, 60.0)),
        faults_every_s=dice.choice((2.0, 4.0, 8.0)),
        faults=FAULTS if dice.random() < 0.5 else tuple(dice.sample(sorted(set(FAULTS)), 3)),
        tenacious=dice.random() < 0.3,
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
        flood=FLOOD if flooded else 0,
        catalogue=_catalogue(random.Random(f"{seed}/catalogue")),
        jumps=random.Random(f"{seed}/jumps").random() < JUMPY,
        changes=random.Random(f"{seed}/changes").random() < CHANGING,
        unruly=random.Random(f"{seed}/unruly").random() < UNRULY,
        takes_bytes=large.takes_bytes if large is not None else takes_bytes,
        bulk=large,
    )


def _catalogue(dice: random.Random) -> Catalogue:
    """Half of the worlds have resources beside the first one."""
    if dice.random() < 0.5:
        return Catalogue()
    cards = dice.random() < 0.8
    return Catalogue(
        cards=cards, mapped=cards and dice.random() < 0.5, maps=dice.random() < 0.4, ports=dice.random() < 0.3
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
        if self.setting.bulk is not None:
            self.broker.takes_bytes = self.setting.bulk.takes_bytes
        self.remaking = remaking(TOPICS, seed, self.setting.trouble_s)
        self.remade_at: float | None = None
        self._written: set[str] = set()
        self.complaints: list[str] = []
        lost = retention(self.broker, TOPICS, seed, many=bool(self.setting.replicas))
        self.retention = lost if self.remaking is None else None
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
        self._ambushed: dict[Process, float] = {}
        """Workers that are stopped, for so many seconds, as soon as the broker has their next registration."""
        self._trap: tuple[str, str, int, Callable[[Process], None]] | None = None
        self.hosts = [self._host(number) for number in range(self.setting.hosts)]
        names = [host.name for host in self.hosts]
        self.strangers = strangers(self.broker, TOPICS, seed, hosts=names, many=bool(self.setting.replicas))
        self.jobs = self._jobs()
        if self.remaking is not None:
            for job in self.jobs:
                job.limits = structs.replace(job.limits, look_s=self.remaking.look_s)
        self._usual = {job.name: structs.replace(job) for job in self.jobs}
        self._configuring = random.Random(f"{seed}/configurations")
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
            owners=Owners(self.loop, name),
            bench=Bench(name, devices, dice=self.dice, catalogue=self.setting.catalogue, cards=cards, bulk=large),
        )

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
            return structs.replace(limits, batch_records=Limits().batch_records)
        return structs.replace(
            limits,
            batch_records=dice.choice((5, 10)),
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
                batch_records=dice.choice((2, 5, 1000)),
                lease_grace_s=dice.choice((0.5, 2.0)),
                checkpoint_records=dice.choice((3, 20, 5000)),
                checkpoint_interval_s=dice.choice((5.0, 3600.0)),
                history=dice.choice((None, Pace(), Pace())),
            ),
            lease_s=10.0,
            retention_s=dice.choice((60.0, 3600.0)),
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
                self._later(job.begins_at - self.loop.time(), self._ensure, job)
            else:
                self.start(job)
        for host in self.hosts:
            for number in range(self.setting.workers):
                self._start_worker(host, f"w{number}")
        if self.setting.unruly:
            self._start_worker(self.hosts[0], "w0", twin="t")
        self.network.weather = self.setting.weather
        if self.setting.flood:
            self.loop.spawn(world, self._flood)
        if self.setting.jumps:
            self.loop.spawn(world, self._set_clocks)
        for each in (self.retention, self.strangers):
            if each is not None:
                self.loop.spawn(world, partial(each.run, lambda: self.over))
        if self.remaking is not None:
            self.loop.spawn(world, partial(self._remake, self.remaking))
        await self._ill_treat()
        await self._rest()
        self.over = True

    def start(self, job: Job) -> Manager:
        """Start a manager."""
        if self.setting.changes:
            self._configure(job)
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

    def _configure(self, job: Job) -> None:
        """What the job's next manager is configured with: what is usual, as always in the end, or something else.

        Where the driver of `map` alone knows which names mean one device, its silence is a fault of its own: neither is
        it left out, nor are all devices lent at once meanwhile, as shared ones are.
        """
        dice, usual = self._configuring, self._usual[job.name]
        mapped = usual.catalogue.mapped
        new = usual
        if not self.over and dice.random() < 0.6:
            names = usual.catalogue.names
            odd = {name: dice.random() for name in names}
            new = structs.replace(
                usual,
                prepares=dice.random() < 0.5,
                lease_s=dice.choice((5.0, 10.0, LONGEST_LEASE_S)),
                retention_s=dice.choice((20.0, 60.0, 3600.0)),
                limits=structs.replace(usual.limits, lease_grace_s=dice.choice((0.1, 0.5, 2.0))),
                oddities=Oddities(
                    without=frozenset(name for name in names if odd[name] < 0.2 and not (mapped and name == MAP)),
                    turned=frozenset(name for name in names if odd[name] > 0.8 and name != PORT and not mapped),
                    backwards=dice.random() < 0.5,
                ),
            )
        for name in ("prepares", "lease_s", "retention_s", "limits", "oddities"):
            setattr(job, name, getattr(new, name))
        self.note(job.name, f"is configured with {job.oddities}, prepares={job.prepares}")

    def _make(self, job: Job, link: Link, bus: ModelBus, instance: str) -> Manager:
        if not self.setting.replicas:
            sweeps = self.strangers is not None
            return HostManager(self.loop, job, link, bus, TOPICS, instance, sweeps=sweeps)
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
            unruly=unruly, twin=twin,
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
            for job in self.jobs:
                if not self._is_done(job):
                    self._later(self.dice.random() * 3, self._ensure, job)

    async def _flood(self) -> None:
        """One host says a lot, another one a little now and then: heartbeats and goodbyes of workers that nobody knows,
        each to be one dead letter, or one record that is over."""
        dice = random.Random(f"{self.seed}/flood")
        loud, *others = dice.sample(self.hosts, len(self.hosts))
        left = self.setting.flood
        while left > 0 and not self.over:
            await anyio.sleep(dice.expovariate(0.5))
            burst = min(left, dice.choice((5, 20, 60)))
            left -= burst
            for number in range(left, left + burst):
                host = loud if not others or dice.random() < 0.9 else others[0]
                kind = dice.choice(("heartbeat", "deregister"))
                body = {"type": kind, "host": host.name, "worker": f"{kind}-{number}", "incarnation": "1"}
                entry = Entry(host.name.encode(), json.dumps(body).encode())
                self.broker.publish(self.broker.logs[TOPICS.registrations, host.partition], entry)

    async def _set_clocks(self) -> None:
        """Somebody sets the wall clock of one machine after the other; monotonic time goes on as it did."""
        dice = random.Random(f"{self.seed}/clocks")
        while not self.over:
            await anyio.sleep(dice.expovariate(0.1))
            job, seconds = dice.choice(self.jobs), dice.choice(JUMPS_S) * dice.choice((-1, 1))
            job.skew_s += seconds
            for manager in self.managers:
                if manager.job is job:
                    manager.clock.skew_s += seconds
            self.note(job.machine, f"its clock is set by {seconds:+,.0f} s")

    async def _remake(self, plan: Remaking) -> None:
        """Delete a topic and make it anew, while managers serve or while all are down."""
        await anyio.sleep(plan.after_s)
        identities = self._identities()
        late_s = LATEST_S + 1 if plan.of_ledger and self.setting.weather.late else 0.0
        if plan.down:
            for job in self.jobs:
                job.begins_at = self.loop.time() + late_s + (plan.fill_s or 0.0) + 1.0
                self._later(job.begins_at - self.loop.time(), self._ensure, job)
            for manager in self.managers:
                self.loop.kill(manager.process)
            await anyio.sleep(late_s)
        while plan.of_ledger and not is_told(self.broker, identities):  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.05)
        if self.over:
            return
        self._written = {each for each in identities if each in self.broker.transactions}
        ends = [self.broker.logs[plan.topic, number].end for number in range(self.broker.partitions)]
        self.broker.remake(plan.topic)
        self.remade_at = self.loop.time()
        self.note("world", f"{plan.topic} is made anew")
        if self.strangers is not None and not plan.of_ledger:
            self.strangers.said.clear()
        if plan.fill_s is not None:
            await anyio.sleep(plan.fill_s)
            for number, end in enumerate(ends):
                fill(self.broker, TOPICS, number, end)

    def _identities(self) -> list[str]:
        """The writers of all partitions, or of all hosts."""
        if self.setting.replicas:
            return [transactional_id(CLUSTER, partition_writer(number)) for number in range(self.setting.partitions)]
        return [transactional_id(CLUSTER, host_writer(host.name)) for host in self.hosts]

    def _numbers(self, manager: Manager) -> list[int]:
        """The partitions, or the host, that a manager serves."""
        served = [number for number, _ in manager.serving()]
        return served if self.setting.replicas or not served else [self.jobs.index(manager.job)]

    async def _adopt(self, plan: Remaking) -> None:
        """Do as managers say whose ledger was made anew: once no worker has anything, put devices back as they were,
        and start managers to adopt the ledger."""
        await anyio.sleep(plan.look_s + ENDS_WITHIN_S)
        names = self._identities()
        self.complaints += [
            f"PROMISE 3: {manager.process.name} serves on although its ledger was made anew"
            for manager in self.managers
            if manager.up and any(names[number] in self._written for number in self._numbers(manager))
        ]
        ends = [held.until for worker in self.workers for held in worker.holdings]
        while max(ends, default=0.0) > self.loop.time():
            await anyio.sleep(1.0)
            ends = [held.until for worker in self.workers for held in worker.holdings]
        for job in [*self.jobs, *self._usual.values()]:
            job.limits = structs.replace(job.limits, adopt=True)
        for manager in self.managers:
            self.loop.kill(manager.process)
        for host in self.hosts:
            host.bench.reset()
        self.note("world", "the new ledger is adopted")

    def _later(self, seconds: float, act: Callable[..., Any], *args: Any) -> None:
        self.loop.call_later(seconds, act, *args, context=self.loop.within(self.loop.world))

    def _is_done(self, job: Job) -> bool:
        is_early = job.begins_at > self.loop.time()
        return is_early or any(manager.up for manager in self.managers if manager.job is job)

    def _ensure(self, job: Job) -> None:
        if not self._is_done(job):
            self.start(job)

    def _fault(self) -> None:
        dice = self.dice
        up = [manager for manager in self.managers if manager.up]
        kind = dice.choice(self.setting.faults)
        if kind == "worker":
            worker = dice.choice(self.workers)
            how = dice.random()
            if how < 0.4:
                self._stop(worker.process, dice.random() * 20)
            elif how < 0.7:
                self._ambushed[worker.process] = dice.random() * 40
            else:
                self._cut(worker.bus.link, dice.random() * 20)
        elif kind == "device":
            bench = dice.choice(self.hosts).bench
            name = dice.choice(bench.places)
            bench.lose(name, self.loop.time())
            self.note(bench.host, f"device {name} is gone")
            self._later(dice.random() * 20, bench.missing.discard, name)
        elif kind == "slow":
            bench = dice.choice(self.hosts).bench
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
            self._later(self.dice.random() ** 2 * 6, self._ensure, manager.job)
        elif kind == "end":
            self.note(manager.process.name, "is told to stop")
            self.loop.call_soon(manager.stop, context=self.loop.within(manager.process))
        elif kind in ("stop", "sleep"):
            seconds = self.dice.random() ** 2 * 40
            self._stop(manager.process, seconds)
            if kind == "sleep":  # the machine with it
                manager.clock.asleep_s += seconds
            if self.dice.random() < 0.6:
                self._later(self.dice.random() * min(seconds, 10), self._replace, manager)
        else:
            self._cut(manager.link, self.dice.random() * 15)
            if self.dice.random() < 0.4:
                self._later(self.dice.random() * 10, self._replace, manager)

    def _replace(self, manager: Manager) -> None:
        """Somebody (an orchestrator) thinks that it is gone, and starts another one."""
        is_away = manager.process.stopped or manager.link.cut
        if not self.over and is_away and manager.job.begins_at <= self.loop.time():
            self.note(manager.process.name, "replaced while it is away")
            self.start(manager.job)

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
        kind = self.dice.choice(("kill", "stop", "cut", "end"))
        by_process = {manager.process: manager for manager in self.managers}

        def snap(process: Process) -> None:
            manager = by_process.get(process)
            if manager is not None:
                self._harm(manager, kind)

        self._trap = (self.dice.choice(POINTS), self.dice.choice(STAGES), self.dice.randrange(12), snap)

    def _watch(self, process: Process, what: str, stage: str) -> None:
        if self.log is not None and what != "Fetch" and what != "ListOffsets":
            self.note(process.name, f"{what} {stage}")
        if what == "Produce" and stage == "done" and process in self._ambushed:
            [registering] = [worker.registering for worker in self.workers if worker.process is process]
            if registering:
                self._stop(process, self._ambushed.pop(process))
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
        self._ambushed.clear()
        self.over = True
        self.network.down = False
        self.network.weather = CALM
        for manager in self.managers:
            manager.link.cut = False
            self._go_on(manager.process)
        if self.setting.changes:
            for manager in self.managers:
                self._harm(manager, "end")  # whoever comes next is configured as usual
        for host in self.hosts:
            host.bench.missing.clear()
            host.bench.slow_s = host.bench.failing = 0.0
        for worker in self.workers:
            worker.bus.link.cut = False
            self._go_on(worker.process)
            worker.closing = True
        if self.remade_at is not None and self.remaking is not None and self.remaking.of_ledger:
            await self._adopt(self.remaking)
        deadline = self.loop.time() + REST_S
        while self.loop.time() < deadline and not all(worker.finished for worker in self.workers):
            await anyio.sleep(1.0)
            for job in self.jobs:
                self._ensure(job)
        self.stalled = [worker.waiting_for or worker.process.name for worker in self.workers if not worker.finished]
        await self._until_all_is_swept()
        for _ in range(int(LONGEST_LEASE_S * 2) + 15):
            for job in self.jobs:  # one that was told to stop may still be about to
                self._ensure(job)
            await anyio.sleep(1.0)

    async def _until_all_is_swept(self) -> None:
        deadline = self.loop.time() + SWEPT_WITHIN_S
        while self.strangers is not None and self.strangers.unanswered() and self.loop.time() < deadline:
            await anyio.sleep(1.0)
            for job in self.jobs:
                self._ensure(job)

    def close(self) -> None:
        """Nobody looks any more: every process may go on, without a bus."""
        for manager in self.managers:
            manager.link.closed = True
            self.loop.raise_up(manager.process)
        for worker in self.workers:
            worker.bus.link.closed = True
            self.loop.raise_up(worker.process)

"""The trouble of a world: processes that are killed, stopped and cut off, floods, clocks that are set."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from outfitter_proto.bus import Entry
from simulation.hosts.managers import TOPICS, Manager
from simulation.loop import Process
from simulation.model.network import Link
from simulation.world import settings

if TYPE_CHECKING:
    from simulation.world.world import World

POINTS = ("EndTxn", "EndTxn", "Produce", "AddPartitionsToTxn", "InitProducerId", "ListOffsets", "Fetch", "Metadata")
STAGES = ("sent", "done", "answered")
JUMPS_S = (100.0, 4000.0, 100_000.0, 300_000.0)
"""By how much, forwards or back: a lease, a retention, a day, several."""


class Faults:
    """Does harm to a world until its trouble is over. Its dice are the world's own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loop, self.dice, self.setting = world.loop, world.dice, world.setting
        self.count = 0
        self._deaf_dice = random.Random(f"{world.seed}/deaf")
        self._illnesses = random.Random(f"{world.seed}/illnesses")
        self._refusals = random.Random(f"{world.seed}/refusals")
        self._ambushed: dict[Process, float] = {}
        """Workers that are stopped, for so many seconds, as soon as the broker has their next registration."""
        self._trap: tuple[str, str, int, Callable[[Process], None]] | None = None

    def end(self) -> None:
        """Set no more traps."""
        self._trap = None
        self._ambushed.clear()

    async def run(self) -> None:
        """One fault after another, and managers that are started again, for the seconds of the setting."""
        end = self.loop.time() + self.setting.trouble_s
        while self.loop.time() < end:
            await anyio.sleep(self.dice.expovariate(1 / self.setting.faults_every_s))
            self.count += 1
            if self.dice.random() < 0.4:
                self._set_trap()
            else:
                self._fault()
            for job in self.world.jobs:
                if not self.world.is_done(job):
                    self.world.later(self.dice.random() * 3, self.world.ensure, job)

    async def flood(self) -> None:
        """One host says a lot, another one a little now and then: heartbeats and deregistrations of workers that
        nobody knows, each to be one dead letter, or one record that is over."""
        dice = random.Random(f"{self.world.seed}/flood")
        loud, *others = dice.sample(self.world.hosts, len(self.world.hosts))
        left = self.setting.flood
        while left > 0 and not self.world.over:
            await anyio.sleep(dice.expovariate(0.5))
            burst = min(left, dice.choice((5, 20, 60)))
            left -= burst
            for number in range(left, left + burst):
                host = loud if not others or dice.random() < 0.9 else others[0]
                kind = dice.choice(("heartbeat", "deregister"))
                body = {"type": kind, "host": host.name, "worker": f"{kind}-{number}", "incarnation": "1"}
                entry = Entry(host.name.encode(), json.dumps(body).encode())
                self.world.broker.publish(self.world.broker.logs[TOPICS.registrations, host.partition], entry)

    async def set_clocks(self) -> None:
        """Somebody sets the wall clock of one machine after the other; monotonic time goes on as it did."""
        dice = random.Random(f"{self.world.seed}/clocks")
        while not self.world.over:
            await anyio.sleep(dice.expovariate(0.1))
            job, seconds = dice.choice(self.world.jobs), dice.choice(JUMPS_S) * dice.choice((-1, 1))
            job.skew_s += seconds
            for manager in self.world.managers:
                if manager.job is job:
                    manager.clock.skew_s += seconds
            self.world.note(job.machine, f"its clock is set by {seconds:+,.0f} s")

    def _fault(self) -> None:
        dice = self.dice
        up = [manager for manager in self.world.managers if manager.up]
        kind = dice.choice(self.setting.faults)
        if kind == "worker":
            worker = dice.choice(self.world.workers)
            how = dice.random()
            if how < 0.4:
                self._stop(worker.process, dice.random() * 20)
            elif how < 0.7:
                self._ambushed[worker.process] = dice.random() * 40
            else:
                self._cut(worker.bus.link, dice.random() * 20)
                if self._deaf_dice.random() < settings.DEAF:
                    self._deafen(worker.bus.link)
        elif kind == "device":
            bench = dice.choice(self.world.hosts).bench
            name = dice.choice(bench.places)
            seconds = dice.random() * 20
            if bench.catalogue.min_healthy_s and self._illnesses.random() < settings.ILL:
                bench.ill.add(name)
                self.world.note(bench.host, f"device {name} is ill")
                self.world.later(seconds, bench.ill.discard, name)
            else:
                bench.lose(name, self.loop.time())
                self.world.note(bench.host, f"device {name} is gone")
                self.world.later(seconds, bench.missing.discard, name)
        elif kind == "slow":
            bench = dice.choice(self.world.hosts).bench
            bench.slow_s, bench.failing = dice.choice((0.0, 1.0, 8.0)), dice.choice((0.0, 0.3))
            self.world.note(bench.host, f"drivers take up to {bench.slow_s} s, and fail {bench.failing:.0%}")
        elif kind == "down":
            self.world.network.refusing = self._refusals.random() < settings.REFUSING
            self.world.network.down = True
            seconds = dice.random() * 8
            self.world.note("broker", f"away for {seconds:.1f} s")
            self.world.later(seconds, self._come_back)
        elif kind == "compaction":
            self.world.broker.logs[TOPICS.allocations, dice.randrange(self.setting.partitions)].clean()
        elif up:
            self.harm(dice.choice(up), kind)

    def harm(self, manager: Manager, kind: str) -> None:
        if not manager.up:
            return
        if kind == "kill":
            self.loop.kill(manager.process)
            self.world.note(manager.process.name, "killed")
            self.world.later(self.dice.random() ** 2 * 6, self.world.ensure, manager.job)
        elif kind == "end":
            self.world.note(manager.process.name, "is told to stop")
            self.loop.call_soon(manager.stop, context=self.loop.within(manager.process))
        elif kind in ("stop", "sleep"):
            seconds = self.dice.random() ** 2 * 40
            self._stop(manager.process, seconds)
            if kind == "sleep":  # the machine with it
                manager.clock.asleep_s += seconds
            if self.dice.random() < 0.6:
                self.world.later(self.dice.random() * min(seconds, 10), self._replace, manager)
        else:
            self._cut(manager.link, self.dice.random() * 15)
            if self.dice.random() < 0.4:
                self.world.later(self.dice.random() * 10, self._replace, manager)

    def _replace(self, manager: Manager) -> None:
        """Somebody (an orchestrator) thinks that it is gone, and starts another one. On the machine of a script with
        books none starts while the first one lives."""
        if self.setting.catalogue.books:
            return
        is_away = manager.process.stopped or manager.link.cut
        if not self.world.over and is_away and manager.job.begins_at <= self.loop.time():
            self.world.note(manager.process.name, "replaced while it is away")
            self.world.start(manager.job)

    def _stop(self, process: Process, seconds: float) -> None:
        self.loop.stop_process(process)
        self.world.note(process.name, f"stopped for {seconds:.1f} s")
        self.world.later(seconds, self.go_on, process)

    def go_on(self, process: Process) -> None:
        if process.stopped:
            self.loop.go_on(process)
            self.world.note(process.name, "goes on")

    def _cut(self, link: Link, seconds: float) -> None:
        link.cut = True
        self.world.note(link.process.name, f"cut off for {seconds:.1f} s")
        self.world.later(seconds, self._join, link)

    def _join(self, link: Link) -> None:
        if link.cut:
            link.cut = False
            self.world.note(link.process.name, "is connected again")

    def _deafen(self, link: Link) -> None:
        """Let it read nothing, be it that what it writes gets through again meanwhile."""
        link.deaf = True
        seconds = self._deaf_dice.random() * 40
        self.world.note(link.process.name, f"reads nothing for {seconds:.1f} s")
        self.world.later(seconds, self._undeafen, link)

    def _undeafen(self, link: Link) -> None:
        if link.deaf:
            link.deaf = False
            self.world.note(link.process.name, "can read again")

    def _come_back(self) -> None:
        if self.world.network.down:
            self.world.network.down = False
            self.world.note("broker", "is back")

    def _set_trap(self) -> None:
        """Harm whichever manager comes to a certain point of its work next."""
        kind = self.dice.choice(("kill", "stop", "cut", "end"))
        by_process = {manager.process: manager for manager in self.world.managers}

        def snap(process: Process) -> None:
            manager = by_process.get(process)
            if manager is not None:
                self.harm(manager, kind)

        self._trap = (
            self.dice.choice(POINTS),
            self.dice.choice(STAGES),
            self.dice.randrange(12),
            snap,
        )

    def watch(self, process: Process, what: str, stage: str) -> None:
        if self.world.log is not None and what != "Fetch" and what != "ListOffsets":
            self.world.note(process.name, f"{what} {stage}")
        if what == "Produce" and stage == "done" and process in self._ambushed:
            [registering] = [worker.registering for worker in self.world.workers if worker.process is process]
            if registering:
                self._stop(process, self._ambushed.pop(process))
        if self._trap is None or "@" not in process.name:
            return
        wanted, at, left, snap = self._trap
        if what == wanted and stage == at:
            self._trap = (wanted, at, left - 1, snap) if left else None
            if not left:
                self.world.note(process.name, f"(at {what} {stage})")
                snap(process)

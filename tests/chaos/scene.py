"""One scene: managers of several hosts on a broker's topics, a fleet of workers, and a verdict after each fault."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

from chaos import bare
from chaos.adjusted import ADJUSTED, WallClock
from chaos.fleet import Fleet
from chaos.report import Row, seed
from outfitter_proto import topics as all_topics
from outfitter_proto.bus import TopicSpec, connect
from outfitter_proto.keys import host_writer, partition_writer
from outfitter_proto.names import transactional_id
from outfitter_proto.partitioning import partition_of
from outfitter_verify import verify
from support.kafka.cluster import KafkaCluster
from support.managers.process import Manager

PARTITIONS = 2
DEVICES = 4
ENOUGH = 3
"""Registrations of each host that are to be answered after a fault before it counts as over."""
Note = Callable[[Row], None]


class Trouble:
    """A fault under way: say `begin` when it strikes, and each time that one more is killed."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.kills = 0

    def begin(self, kills: int = 1) -> None:
        self.since = self.since or time.monotonic()
        self.kills += kills


class Scene:
    """See the module. Two of three hosts share one partition, the third has the other one.

    `managers`: in host scope one for each host, by its name; in cluster scope replicas of which each may have either
    partition, by the replica's name.
    """

    def __init__(
        self,
        broker: KafkaCluster,
        folder: Path,
        name: str,
        note: Note,
        *,
        extra: str = "",
        replicas: int = 0,
        keepers: int = 0,
        beside_bare: bool = False,
        adjusted: bool = False,
    ) -> None:
        """`extra`: more of the managers' settings, a line each. `replicas`: so many managers of cluster scope.
        `keepers` is `Fleet`'s. `beside_bare`: bare loops are at work as well (`chaos.bare`), for their figures.
        `adjusted`: managers have clocks of their own, and look at their topics often (`chaos.adjusted`)."""
        self.broker = broker
        self.name = name
        self.dice = random.Random(f"{seed()}/{name}")
        self.cluster = broker.new_cluster()
        self.hosts = [_host_in(0), _host_in(0), _host_in(1)]
        self.clocks: dict[str, WallClock] = {}
        """By manager, where those are adjusted."""
        self._note = note
        self._adjusted = adjusted
        self._config = (
            f'{extra}\nlease-grace = "100ms"\nexternal-resources = ["gpu"]\n[external-resource.gpu]\n'
            f'amount = 1\ndriver = "static"\nparam.count = {DEVICES}\n'
        )
        if replicas:
            names = [f"replica-{number}" for number in range(replicas)]
            self.managers = {
                name: self._manager(folder, name, "--scope", "cluster", "--replica", name) for name in names
            }
        else:
            self.managers = {host: self._manager(folder, host) for host in self.hosts}
        self.writers = {
            host: partition_writer(partition_of(host, PARTITIONS)) if replicas else host_writer(host)
            for host in self.hosts
        }
        """Who writes of each host."""
        self.bare = bare.BareLoops(broker.direct, self.cluster, PARTITIONS) if beside_bare else None
        self.fleet = Fleet(
            broker.direct,
            self.cluster,
            self.hosts,
            [*self.writers.values(), *(self.bare.writers if self.bare else ())],
            seed=f"{seed()}/{name}",
            devices=DEVICES,
            keepers=keepers,
            bare=(bare.source(self.cluster), bare.goal(self.cluster)) if self.bare else None,
        )

    def _manager(self, folder: Path, name: str, *arguments: str) -> Manager:
        options: dict[str, Any] = {}
        if self._adjusted:
            clock = self.clocks[name] = WallClock(folder / f"{name}.clock")
            options = {"program": ADJUSTED, "variables": clock.variables}
        return Manager(
            folder / name,
            self._config,
            bus=self.broker.url,
            host=name,
            cluster=self.cluster,
            arguments=arguments,
            **options,
        )

    def writer_id(self, host: str) -> str:
        """The transactional id that this host's records are written with, which is the producer's client id, too."""
        return transactional_id(self.cluster, self.writers[host])

    def start(self) -> None:
        """Make the topics, start everything, and wait until each host has answered."""

        async def make() -> None:
            async with connect(f"kafka://{self.broker.direct}") as bus:
                await all_topics.create(bus, self.cluster, partitions=PARTITIONS)
                assert await all_topics.check(bus, self.cluster) == []  # as many copies as there are brokers, and so on
                if self.bare:
                    names = bare.source(self.cluster), bare.goal(self.cluster)
                    await bus.create_topics([TopicSpec(name, PARTITIONS, {}) for name in names])

        anyio.run(make)
        with ThreadPoolExecutor(len(self.managers)) as pool:
            list(pool.map(Manager.start, self.managers.values()))
        if self.bare:
            self.bare.start()
        self.fleet.start()
        self.fleet.await_answers(ENOUGH, since=0.0)
        if self.bare and not self.fleet.await_commits(self.bare.writers, since=0.0):
            raise AssertionError("the bare loops do not begin; what they said is above")

    def close(self) -> None:
        try:
            self.fleet.close()
        finally:
            if self.bare:
                self.bare.close()
            for manager in self.managers.values():
                manager.kill9()
                print(f"--- {manager.log}\n{manager.log_tail()}")

    @contextmanager
    def fault(
        self, name: str, *, expected: str | None = None, seen_by: Sequence[str] | None = None
    ) -> Iterator[Trouble]:
        """What the block does is the fault. After it: each host answers again, all is checked, a row is noted.

        `expected`: what the checker rightly complains of (a regular expression), such as a key that the fault itself
        has written to. `seen_by`: the hosts whose figures are noted, all by default.

        Raises:
            AssertionError: a promise was broken, or something asked was not answered.
        """
        trouble = Trouble()
        since = time.monotonic()
        before = self.fleet.said
        yield trouble
        healed = time.monotonic()
        since = trouble.since or since
        hosts = seen_by or self.hosts
        self.fleet.await_answers(ENOUGH, since=healed)
        compared = self.bare is not None and self.fleet.await_commits(self.bare.writers, since=healed)
        until = time.monotonic()
        lost = self.fleet.pause()
        found = [*self.check(), *self.fleet.clashes, *self.fleet.robbed]
        violations = [each for each in found if expected is None or not re.search(expected, each)]
        row = Row(
            fault=name,
            kafka=self.broker.kafka,
            events=self.fleet.said - before,
            kills=trouble.kills,
            violations=tuple(violations),
            lost=tuple(lost),
            first_answer_s=self.fleet.first_answer(since, hosts),
            gap_s=self.fleet.longest_gap(since, until, {self.writers[host] for host in hosts}),
            bare_gap_s=self.fleet.longest_gap(since, until, self.bare.writers) if self.bare and compared else None,
        )
        self._note(row)
        assert not violations, violations
        assert not lost, lost
        self.fleet.resume()

    def check(self) -> list[str]:
        """What the checker finds in all that was committed until now."""

        return [str(violation) for violation in verify(f"kafka://{self.broker.direct}", self.cluster).violations]

    def freeze(self, pid: int, seconds: float, trouble: Trouble) -> None:
        """Stop a process for so long, and let it go on."""
        os.kill(pid, signal.SIGSTOP)
        trouble.begin()
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def playing(broker: KafkaCluster, folder: Path, name: str, note: Note, **options: Any) -> Iterator[Scene]:
    """A scene, started; ended whatever happens. `options` are `Scene`'s."""
    scene = Scene(broker, folder, name, note, **options)
    try:
        scene.start()
        yield scene
    finally:
        scene.close()


def _host_in(partition: int) -> str:
    """A new host's name (one machine has one manager a name) that hashes to this partition."""
    while True:
        name = f"c-{random.SystemRandom().randrange(1 << 32):08x}"
        if partition_of(name, PARTITIONS) == partition:
            return name

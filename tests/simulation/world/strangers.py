"""Messages that are nobody's: for hosts without a manager, in wrong partitions, without a usable key."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection

import anyio

from outfitter_proto.bus import Entry
from outfitter_proto.names import Topics
from outfitter_proto.partitioning import partition_of
from simulation.model.broker import Broker

EVERY_S = 4.0


class Strangers:
    """Whoever sends them. `said` are those that want an answer: a dead letter, by partition and offset."""

    def __init__(
        self, broker: Broker, topics: Topics, dice: random.Random, *, hosts: Collection[str], many: bool
    ) -> None:
        """`hosts` have a manager each or, if there are `many` of any name, one that serves whole partitions."""
        self._broker = broker
        self._topics = topics
        self._dice = dice
        self._hosts = sorted(hosts)
        self._kinds: list[Callable[[int], None]] = [self._without_key, self._bad_key]
        if broker.partitions > 1:
            self._kinds.append(self._elsewhere)
        if not many:
            self._kinds += [self._unmanaged, self._unmanaged, self._unmanaged, self._alive]
        self.said: list[tuple[int, int]] = []

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Send until the world is at rest."""
        number = 0
        while True:
            await anyio.sleep(self._dice.expovariate(1 / EVERY_S))
            if is_over():
                return
            number += 1
            self._dice.choice(self._kinds)(number)

    def unanswered(self) -> list[tuple[int, int]]:
        """What has no dead letter yet. One that stands for several answers as many of those that are in its range."""
        left = dict.fromkeys(self.said)
        letters = [
            json.loads(record.value or b"")
            for (topic, _), log in self._broker.logs.items()
            if topic == self._topics.dead_letters
            for record, _ in log.committed()
        ]
        for letter in letters:
            left.pop((letter["source"]["partition"], letter["source"]["offset"]), None)
        for letter in letters:
            partition, first = letter["source"]["partition"], letter["source"]["offset"]
            range_ = range(first, letter.get("until", first))
            answered = [place for place in left if place[0] == partition and place[1] in range_]
            for place in answered[: letter.get("count", 1) - 1]:
                del left[place]
        return list(left)

    def _without_key(self, number: int) -> None:
        self._say(None, {"type": "register", "host": self._hosts[0], "worker": f"keyless-{number}"})

    def _bad_key(self, number: int) -> None:
        self._say(b"no host's name!", {"type": "register", "worker": f"w{number}"})

    def _elsewhere(self, number: int) -> None:
        host = self._dice.choice(self._hosts)
        wrong = (partition_of(host, self._broker.partitions) + 1) % self._broker.partitions
        self._say(host.encode(), _registration(host, f"lost-{number}"), wrong)

    def _unmanaged(self, number: int) -> None:
        host = f"nobody-{number % 5}"
        self._say(host.encode(), _registration(host, f"w{number}"), partition_of(host, self._broker.partitions))

    def _alive(self, number: int) -> None:
        """A sign of life wants no answer."""
        host = f"nobody-{number % 5}"
        body = {"type": "heartbeat", "host": host, "worker": "w1", "incarnation": "1"}
        self._say(host.encode(), body, partition_of(host, self._broker.partitions), asks=False)

    def _say(
        self, key: bytes | None, body: dict[str, object], partition: int | None = None, *, asks: bool = True
    ) -> None:
        if partition is None:
            partition = self._dice.randrange(self._broker.partitions)
        log = self._broker.logs[self._topics.registrations, partition]
        offset = self._broker.publish(log, Entry(key, json.dumps(body).encode()))
        if asks:
            self.said.append((partition, offset))


def _registration(host: str, worker: str) -> dict[str, object]:
    return {"type": "register", "host": host, "worker": worker, "incarnation": "1", "resources": {"gpu": {"amount": 1}}}


def strangers(broker: Broker, topics: Topics, seed: int, *, hosts: Collection[str], many: bool) -> Strangers | None:
    """A third of the worlds have some, and there a host's manager sweeps."""
    dice = random.Random(f"{seed}/strangers")
    return Strangers(broker, topics, dice, hosts=hosts, many=many) if dice.random() < 0.35 else None


def lateness(seed: int) -> float:
    """How many seconds a host's manager begins after its workers: often just when a sweeper gives their first messages
    up."""
    dice = random.Random(f"{seed}/lateness")
    return dice.choice((0.0, dice.uniform(4.0, 7.0), dice.uniform(4.0, 7.0), dice.uniform(0.0, 25.0)))

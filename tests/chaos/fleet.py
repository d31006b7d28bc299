"""The load: workers of several hosts that register, beat and go, by a stock client (confluent-kafka) in a thread.

Each worker is a small machine: it registers a new incarnation, waits for an answer, holds what it got while it
beats, deregisters (or falls silent), waits until that is in the ledger, and comes again. What it does is drawn from a
seed; when it does it depends on the answers. The fleet knows the wire contract only, and notes when it saw what.
"""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from support.exclusivity import Held
from support.kafka.cluster import QUIET

LEASE_S = 20.0
"""Of workers that beat. Longer than most faults, so that few leases end."""
BRIEF_LEASE_S = 1.0
"""Of workers that fall silent."""
KEEPER_LEASE_S = 6.0
"""Of workers that hold what they got as long as they may: several times what lies between two of their beats."""
BEAT_EVERY_S = 1.0
FEED_EVERY_S = 0.05
FEED = b'{"type":"heartbeat","host":"nobody","worker":"nobody","incarnation":"1"}'
FINAL = ("ended", "failed")
HOLDING = ("preparing", "allocated", "releasing")


class Worker:
    """One worker: `phase` is idle, asked, holding or leaving; `due` is when it does the next thing by itself."""

    def __init__(self, host: str, name: str, dice: random.Random, now: float, *, keeps: bool) -> None:
        self.host = host
        self.name = name
        self.dice = dice
        self.keeps = keeps
        self.run = 0
        self.phase = "idle"
        self.silent = False
        self.amount = 1
        self.held = Held()
        self.due = now + dice.random() * 0.5
        self.leaves = 0.0
        self.asked = 0.0
        self.answered = False

    @property
    def key(self) -> str:
        """Of its current incarnation's record."""
        return f"{self.host}/{self.name}/{self.run}"

    @property
    def lease_s(self) -> float:
        if self.keeps:
            return KEEPER_LEASE_S
        return BRIEF_LEASE_S if self.silent else LEASE_S


class Fleet:
    """`workers` for each of `hosts`, which have `devices` each and are written by `writers`. Times are monotonic."""

    def __init__(
        self,
        bootstrap: str,
        cluster: str,
        hosts: Sequence[str],
        writers: Iterable[str],
        *,
        seed: str,
        workers: int = 8,
        devices: int = 4,
        keepers: int = 0,
        bare: tuple[str, str] | None = None,
    ) -> None:
        """`keepers`: so many of each host's workers hold a device, and beat, until all are to rest. `bare`: a topic
        that is fed at a steady pace, whatever is answered, and the one in which checkpoints are of those who read
        it."""
        self.hosts = list(hosts)
        self.said = 0
        self.answers: list[tuple[float, float, str]] = []
        """When it was asked, when the first record of that incarnation was seen, and the host."""
        self.commits: dict[str, list[float]] = {writer: [] for writer in writers}
        """When each writer's checkpoints were seen."""
        self.refusals: list[str] = []
        """Why registrations and deregistrations came back as dead letters."""
        self.clashes: list[str] = []
        """Exclusive devices that a worker was given while another one had them, as workers saw it."""
        self.robbed: list[str] = []
        """Workers whose leases were judged to be over while they beat."""
        self._cluster = cluster
        self._amounts = [1, 1, 1, 2, devices - keepers]
        self._bootstrap = bootstrap
        self._topics = [f"{cluster}.allocations", f"{cluster}.dead-letters"]
        self._fed: list[tuple[str, int]] = []
        self._feed_due = 0.0
        self._bare = bare
        now = time.monotonic()
        self._workers = {
            f"{host}/w{number}": Worker(
                host, f"w{number}", random.Random(f"{seed}/{host_number}/{number}"), now, keeps=number < keepers
            )
            for host_number, host in enumerate(hosts)
            for number in range(workers)
        }
        self._resting = threading.Event()
        self._at_rest = threading.Event()
        self._news = threading.Condition()
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._connect()

    def _connect(self) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": self._bootstrap, "partitioner": "murmur2_random", "enable.idempotence": True,
                "linger.ms": 0, "request.timeout.ms": 2000, "socket.timeout.ms": 4000,
                "delivery.timeout.ms": 4000, "reconnect.backoff.max.ms": 500, **QUIET,
            }
        )  # fmt: skip
        self._consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap, "group.id": f"{self._cluster}-fleet", "enable.auto.commit": False,
                "isolation.level": "read_committed", "auto.offset.reset": "earliest", "fetch.wait.max.ms": 100,
                "socket.timeout.ms": 5000, "reconnect.backoff.max.ms": 500, **QUIET,
            }
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    # --- from outside -----------------------------------------------------------------------------------------

    def start(self) -> None:
        found = self._consumer.list_topics(timeout=20).topics
        if self._bare is not None:
            source, goal = self._bare
            self._fed = [(source, number) for number in found[source].partitions]
            self._topics.append(goal)
        self._consumer.assign(
            [TopicPartition(name, number, 0) for name in self._topics for number in found[name].partitions]
        )
        self._thread.start()

    def begin_anew(self, *, ended: bool = False) -> None:
        """The topics are other ones, or have more partitions: connect anew, read all of it, and say again what was not
        answered. `ended`: every worker was ended, without a word, as an operator does who ends processes.

        What was read before is heard again, which changes nothing.
        """
        self.close()
        now = time.monotonic()
        self._over.clear()
        self._connect()
        for worker in self._busy():
            if ended:
                worker.phase, worker.held, worker.due = "idle", Held(), now
            elif worker.phase == "asked":
                self._register(worker)
            elif worker.phase == "leaving" and not worker.silent:
                self._say(worker, "deregister", reason="finished")
        self.start()

    def await_keepers(self, within: float = 90.0) -> None:
        """Block until each worker that keeps what it gets has got it."""
        keepers = [worker for worker in self._workers.values() if worker.keeps]
        if not self._until(lambda: all(worker.phase == "holding" for worker in keepers), within):
            raise AssertionError(f"there are workers without a device after {within:g} s")

    def await_answers(
        self, count: int, *, since: float, hosts: Sequence[str] | None = None, within: float = 90.0
    ) -> None:
        """Block until each host (of `hosts`) has answered `count` registrations that were said after `since`."""

        def late() -> list[str]:
            answered = Counter(of for asked, _, of in self.answers if asked >= since)
            return [host for host in (self.hosts if hosts is None else hosts) if answered[host] < count]

        if not self._until(lambda: not late(), within):
            raise AssertionError(f"fewer than {count} answers in time, {within:g} s, from {late() or 'some hosts'}")

    def await_commits(self, writers: Iterable[str], *, since: float, within: float = 90.0) -> bool:
        """Block until each of these writers has committed after `since`; False: one has not."""
        own = [self.commits[writer] for writer in writers]
        return self._until(lambda: all(commits and commits[-1] >= since for commits in own), within)

    def _until(self, condition: Callable[[], bool], within: float) -> bool:
        """Block until `condition` holds, as far as the fleet has heard; False: it did not in time."""

        def settled() -> bool:
            self._check_alive()
            return condition()

        with self._news:
            return self._news.wait_for(settled, within)

    def pause(self, within: float = 90.0) -> list[str]:
        """Have every worker deregister and rest; return what stays without an answer for `within` seconds."""
        self._at_rest.clear()
        self._resting.set()
        deadline = time.monotonic() + within
        while not self._at_rest.wait(0.05):
            self._check_alive()
            if time.monotonic() > deadline:
                break
        return [f"{w.key} asked {time.monotonic() - w.asked:.1f} s ago and is still {w.phase}" for w in self._busy()]

    def resume(self) -> None:
        self._resting.clear()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(30)
        self._consumer.close()

    # --- figures -----------------------------------------------------------------------------------------------

    def first_answer(self, since: float, hosts: Iterable[str]) -> float:
        """Seconds from `since` until the last of these hosts had answered something that was said after it."""
        first = [
            min((seen for asked, seen, of in self.answers if of == host and asked >= since), default=float("inf"))
            for host in hosts
        ]
        return max(first) - since

    def longest_gap(self, since: float, until: float, writers: Iterable[str]) -> float:
        """The longest time without a commit, of the one of these writers whose was longest."""
        longest = 0.0
        for writer in writers:
            points = [since, *(at for at in self.commits[writer] if since < at < until), until]
            longest = max(longest, *(after - before for before, after in pairwise(points)))
        return longest

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                heard = self._consumer.consume(500, 0.02)
                with self._news:
                    for message in heard:
                        if message.error() is None:
                            self._hear(message)
                    self._news.notify_all()
                self._producer.poll(0)
                now = time.monotonic()
                for worker in self._workers.values():
                    if worker.due <= now:
                        self._act(worker, now)
                self._feed(now)
                if self._resting.is_set() and not self._busy() and not len(self._producer):
                    self._at_rest.set()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the fleet is told
            self._failure = error
            with self._news:
                self._news.notify_all()

    def _feed(self, now: float) -> None:
        if now >= self._feed_due and not self._resting.is_set():
            self._feed_due = now + FEED_EVERY_S
            for topic, partition in self._fed:
                self._producer.produce(topic, FEED, partition=partition)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the fleet has ended") from self._failure

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.phase != "idle"]

    def _act(self, worker: Worker, now: float) -> None:
        dice = worker.dice
        match worker.phase:
            case "idle":
                if self._resting.is_set():
                    worker.due = now + 0.1
                    return
                worker.run += 1
                worker.held = Held()
                worker.silent = dice.random() < 0.03 and not worker.keeps
                worker.phase, worker.asked, worker.answered = "asked", now, False
                worker.due = float("inf")
                worker.amount = 1 if worker.keeps else dice.choice(self._amounts)
                self._register(worker)
                if dice.random() < 0.03:  # the same once more
                    self._say(worker, "heartbeat")
            case "holding":
                if worker.leaves <= now or self._resting.is_set():
                    worker.phase = "leaving"
                    worker.held = Held()
                    worker.due = float("inf")
                    if not worker.silent:
                        self._say(worker, "deregister", reason="finished")
                else:
                    worker.due = min(worker.leaves, now + BEAT_EVERY_S)
                    if not worker.silent:
                        self._say(worker, "heartbeat")

    def _register(self, worker: Worker) -> None:
        self._say(worker, "register", resources={"gpu": {"amount": worker.amount}}, lease_s=worker.lease_s)

    def _say(self, worker: Worker, kind: str, **fields: Any) -> None:
        body = {"type": kind, "host": worker.host, "worker": worker.name, "incarnation": str(worker.run), **fields}
        self._publish(worker.host, body)
        self.said += 1

    def _publish(self, host: str, body: dict[str, Any]) -> None:
        self._producer.produce(
            f"{self._cluster}.registrations", json.dumps(body).encode(), host.encode(), on_delivery=self._taken
        )

    def _taken(self, error: KafkaError | None, message: Message) -> None:
        """A worker that was not acknowledged says it again, if that matters still."""
        if error is None:
            return
        body = json.loads(message.value() or b"{}")
        worker = self._workers[f"{body['host']}/{body['worker']}"]
        waits = {"register": "asked", "deregister": "leaving"}.get(body["type"])
        if str(worker.run) == body["incarnation"] and worker.phase == waits:
            self._publish(worker.host, body)

    def _hear(self, message: Message) -> None:
        now = time.monotonic()
        key = (message.key() or b"").decode()
        if (message.topic() or "").endswith(".dead-letters"):
            self._hear_refusal(json.loads(message.value() or b"{}"), now)
            return
        if key.startswith("@"):
            writer = key.removeprefix("@checkpoint/")
            if writer in self.commits:
                self.commits[writer].append(now)
            return
        worker = self._workers.get(key.rpartition("/")[0])
        value = message.value()
        if worker is None or value is None or worker.key != key or worker.phase == "idle":
            return
        record = json.loads(value)
        state = record["state"]
        self._follow_devices(worker, record)
        if not worker.answered:
            self.answers.append((worker.asked, now, worker.host))
            worker.answered = True
        if state in FINAL and worker.phase != "idle":
            if record.get("reason_code") == "lease-expired" and worker.phase == "holding" and not worker.silent:
                self.robbed.append(f"{key} had its lease end at {record['since']} while it beat")
            worker.phase = "idle"
            worker.due = now + worker.dice.random() * 0.3
        elif worker.phase == "asked":
            worker.phase = "holding"
            worker.leaves = float("inf") if worker.keeps else now + 0.1 + worker.dice.random() * 0.5
            worker.due = now

    def _follow_devices(self, worker: Worker, record: dict[str, Any]) -> None:
        """Whoever has got a device uses it until it leaves, or its record says otherwise, whatever became of the topic
        meanwhile: the record of its end may have been in it."""
        exclusive = [name for name in record["resources"] if name not in record.get("shared", ())]
        found = frozenset(device["id"] for name in exclusive for device in record["resources"][name])
        worker.held = Held(found) if record["state"] in HOLDING and worker.phase != "leaving" else Held()
        for other in self._workers.values():
            if other is not worker and other.host == worker.host and (both := worker.held.clash(other.held)):
                self.clashes.append(f"{worker.key} was given {', '.join(sorted(both))}, which {other.key} has")

    def _hear_refusal(self, letter: dict[str, Any], now: float) -> None:
        """A registration that comes back as a dead letter is answered, and over; a deregistration is sent again."""
        body = json.loads(base64.b64decode(letter["body"]))
        worker = self._workers.get(f"{body['host']}/{body['worker']}")
        if worker is None or worker.key != f"{body['host']}/{body['worker']}/{body['incarnation']}":
            return
        again = {("register", "asked"): "idle", ("deregister", "leaving"): "holding"}.get((body["type"], worker.phase))
        if again is not None:
            self.refusals.append(letter["reason"])
            worker.phase = again
            worker.due = now + 0.5 + worker.dice.random()

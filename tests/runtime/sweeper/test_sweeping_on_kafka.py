"""What is nobody's on a real broker, with several managers: once each, whatever happens to the one that sweeps."""

from __future__ import annotations

import json
import secrets
import time
import zlib
from collections import Counter
from typing import Any

import anyio
import pytest
from confluent_kafka import Producer

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import connect
from outfitter_proto.codec import decode_dead_letter
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import DeadLetter
from outfitter_service.runtime.dead_letter_quota import A_MINUTE
from outfitter_verify import verify
from support.bus.committed import committed
from support.kafka.broker import KafkaBroker
from support.managers.in_process import register
from support.managers.process import Manager, StartManager

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180), pytest.mark.slow]

PARTITIONS = 3
ROUNDS = A_MINUTE // 2 - 2
"""Each of them may be two dead letters of one code and partition: few enough for a letter each."""


class SweptCluster:
    """A cluster of topics of its own, and a producer that partitions as librdkafka does by default."""

    def __init__(self, broker: KafkaBroker) -> None:
        self.url, self.cluster = broker.url, KafkaBroker.new_cluster()
        self.topics = topics(self.cluster)
        self.sent: dict[tuple[int, int], str] = {}
        self._producer = Producer({"bootstrap.servers": broker.bootstrap})
        anyio.run(self._make)

    async def _make(self) -> None:
        async with connect(self.url) as bus:
            await all_topics.create(bus, self.cluster, partitions=PARTITIONS)

    def say(self, worker: str, host: str, *, key: str | None, partition: int | None = None) -> None:
        """Publish a registration; `sent` has it under its place, by worker."""

        def delivered(error: object, message: Any) -> None:
            assert error is None
            self.sent[message.partition(), message.offset()] = worker

        place = {} if partition is None else {"partition": partition}
        self._producer.produce(
            self.topics.registrations, json.dumps(register(worker, host=host, gpu=1)).encode(), key,
            on_delivery=delivered, **place,
        )  # fmt: skip

    def flush(self) -> None:
        assert self._producer.flush(30) == 0

    def letters(self) -> list[DeadLetter]:
        """All dead letters that are committed."""
        return anyio.run(self._letters)

    async def _letters(self) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        async with connect(self.url) as bus:
            for partition in range(PARTITIONS):
                letters = await committed(bus, self.topics.dead_letters, partition)
                found += [decode_dead_letter(message.value or b"") for message in letters]
        return found

    def wait_for_letters(self, count: int, within: float = 120.0) -> list[DeadLetter]:
        deadline = time.monotonic() + within
        while len(found := self.letters()) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count}"
            time.sleep(0.2)
        return found


@pytest.fixture
def swept(kafka_broker: KafkaBroker) -> SweptCluster:
    return SweptCluster(kafka_broker)


def sweeper(managers: list[Manager]) -> Manager | None:
    """One that sweeps a partition now."""
    return next((each for each in managers if each.metric("outfitter_swept_partitions")), None)


def misplaced_host() -> str:
    """A new host that librdkafka's default partitioner (`consistent_random`: CRC-32) puts where it does not belong."""
    while True:
        name = f"t-{secrets.token_hex(5)}"
        if zlib.crc32(name.encode()) % PARTITIONS != partition_of(name, PARTITIONS):
            return name


def test_what_librdkafkas_own_partitioner_misplaces_is_a_dead_letter_once_although_a_sweeper_is_killed(
    swept: SweptCluster, start_manager: StartManager
) -> None:
    """Each registration ends in one dead letter or with its manager; the remedy stands in the letter."""
    named = [misplaced_host() for _ in range(3)]
    managers = [
        start_manager(bus=swept.url, cluster=swept.cluster, host=name, gpus=4, extra='beat-interval = "5s"')
        for name in named
    ]
    managers[0].wait_for(lambda: sum(each.metric("outfitter_swept_partitions") or 0 for each in managers) == PARTITIONS)
    hosts = [each.host for each in managers]
    for n in range(ROUNDS):
        swept.say(f"keyless-{n}", hosts[n % 3], key=None)
        swept.say(f"unserved-{n}", f"nowhere-{n % 7}", key=f"nowhere-{n % 7}")
        swept.say(f"misplaced-{n}", hosts[n % 3], key=hosts[n % 3])
        if n == ROUNDS // 2:
            swept.flush()
            victim = sweeper(managers)
            assert victim is not None
            victim.kill9()
    swept.flush()
    home = {host: partition_of(host, PARTITIONS) for host in hosts}
    nobodys = {
        place: worker
        for place, worker in swept.sent.items()
        if not worker.startswith("misplaced") or home[hosts[int(worker.split("-")[1]) % 3]] != place[0]
    }
    assert any(worker.startswith("misplaced") for worker in nobodys.values()), "librdkafka has put all of them right"
    letters = swept.wait_for_letters(len(nobodys))
    assert Counter((letter.source.partition, letter.source.offset) for letter in letters) == Counter(nobodys.keys())
    for letter in letters:
        worker = nobodys[letter.source.partition, letter.source.offset]
        right = partition_of(letter.message_key, PARTITIONS) == letter.source.partition if letter.message_key else True
        assert letter.code == (
            "no-key" if worker.startswith("keyless") else "no-manager" if right else "wrong-partition"
        )
        assert ("partitioner=murmur2_random" in letter.reason) == (letter.code != "no-manager")
    report = verify(swept.url, swept.cluster)
    assert report.violations == ()


def test_a_host_without_a_manager_is_named_and_a_worker_that_waits_for_its_first_one_is_served(
    swept: SweptCluster, start_manager: StartManager
) -> None:
    """The registration is given up, status says so, and the worker registers again when the manager comes."""
    manager = start_manager(bus=swept.url, cluster=swept.cluster)
    host = f"{manager.host}-2"
    waiting = manager.popen(
        "run", "--wait-for-manager", "--host", host, "--resource", "gpu=1", "--lease", "none", "--",
        "sh", "-c", "echo $CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
    try:
        [letter] = swept.wait_for_letters(1)
        assert f"no manager serves host '{host}'; hosts served: {manager.host}." in letter.reason
        manager.wait_for(lambda: manager.metric("outfitter_swept_total", reason="no-manager") == 1)
        assert manager.metric("outfitter_dead_letters_total") == 1
        assert f"no manager serves host '{host}': 1 of its messages" in manager.outfitter("status").stderr
        start_manager(bus=swept.url, cluster=swept.cluster, host=host)
        output, errors = waiting.communicate(timeout=30)
        assert (waiting.returncode, output.strip()) == (0, "GPU-0"), errors
        assert host not in manager.outfitter("status").stderr
    finally:
        waiting.kill()
        waiting.communicate()

"""The ledger itself: compacted while it is restored, with emptied control batches, and with a damaged record."""

from __future__ import annotations

import re
import time
from pathlib import Path

import anyio
import pytest
from aiokafka import AIOKafkaProducer

from bus.kafka.reading.test_compaction import plain_consumer_dies
from chaos.harm import Harmed, strike
from chaos.scene import Note, Scene, playing
from outfitter_proto.bus import Entry, connect
from outfitter_proto.names import topics
from support.kafka.broker import KafkaBroker
from support.kafka.proxy import END_TXN, Harm

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]

GUIDE = Path(__file__).resolve().parents[3] / "service" / "troubleshooting.md"
EMPTIED_WITHIN = 100.0
QUICK_CLEANING = {
    "segment_ms": "1000", "min_cleanable_dirty_ratio": "0.01", "delete_retention_ms": "100",
    "max_compaction_lag_ms": "1000",
}  # fmt: skip
NO_CLEANING = {
    "segment_ms": "604800000", "min_cleanable_dirty_ratio": "1", "delete_retention_ms": "86400000",
    "max_compaction_lag_ms": "9223372036854775807",
}  # fmt: skip


def test_a_ledger_compacted_while_it_is_restored_with_emptied_control_batches_in_it_loses_nothing(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    """Managers refuse to start on a ledger whose deletions are forgotten so quickly: it is made so afterwards."""
    broker = KafkaBroker(harmed.broker.direct)
    with playing(harmed.broker, tmp_path, "compaction", note, extra='ended-retention = "500ms"') as scene:
        ledger = topics(scene.cluster).allocations
        anyio.run(leave_a_transaction_open, broker, ledger)
        with scene.fault("the ledger compacted while restored, control batches emptied") as trouble:
            trouble.begin(0)
            harmed.broker.configure(ledger, **QUICK_CLEANING)
            deadline = time.monotonic() + EMPTIED_WITHIN
            while not anyio.run(plain_consumer_dies, broker, ledger):
                assert time.monotonic() < deadline, "the log cleaner has left no emptied control batch"
                for host in scene.hosts:  # which has it restore the ledger
                    strike(harmed, scene, END_TXN, Harm.CONNECTION_LOST, trouble, host=host)
            for host in scene.hosts:  # each of them reads past it
                strike(harmed, scene, END_TXN, Harm.CONNECTION_LOST, trouble, host=host)
                scene.fleet.await_answers(1, since=time.monotonic(), hosts=[host])
            harmed.broker.configure(ledger, **NO_CLEANING)  # and the checker is to read what lies still
            for manager in scene.managers.values():
                manager.kill9()
                manager.start()
                trouble.begin()


async def leave_a_transaction_open(broker: KafkaBroker, ledger: str) -> None:
    """Begin a transaction in the ledger's first partition, and vanish: nobody's next epoch cleans up after it."""
    producer = AIOKafkaProducer(
        bootstrap_servers=broker.bootstrap, transactional_id=f"{ledger}-lost", transaction_timeout_ms=2000
    )
    await producer.start()
    await producer.begin_transaction()
    await producer.send_and_wait(ledger, b"never", key=b"lost", partition=0)
    await producer.stop()  # which does not abort


def test_a_damaged_record_stops_its_own_host_alone_until_it_is_put_right_as_the_guide_says(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    with playing(harmed.broker, tmp_path, "damage", note) as scene:
        host, *others = scene.hosts
        manager = scene.managers[host]
        key = f"{host}/damaged/1"
        with scene.fault("a damaged record in the ledger, put right as the guide says", expected=key) as trouble:
            trouble.begin()
            anyio.run(damage, scene, key)
            manager.kill9()
            manager.start(ready=False)
            assert manager.wait() == 1
            assert re.search(rf"{key}.*damaged", manager.log_tail())
            scene.fleet.await_answers(3, since=time.monotonic(), hosts=others)
            put_right(scene, host, key)
            manager.start()


def test_a_damaged_record_stops_its_own_host_alone_in_cluster_scope_as_well(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    with playing(harmed.broker, tmp_path, "damage", note, replicas=1) as scene:
        host, *others = scene.hosts
        [manager] = scene.managers.values()
        key = f"{host}/damaged/1"
        name = "a damaged record in the ledger, put right as the guide says (cluster scope)"
        with scene.fault(name, expected=key) as trouble:
            trouble.begin()
            anyio.run(damage, scene, key)
            manager.kill9()
            manager.start()
            scene.fleet.await_answers(3, since=time.monotonic(), hosts=others)
            manager.wait_for(lambda: scene.fleet.refusals)
            assert all(re.search(rf"{key}.*damaged", reason) for reason in scene.fleet.refusals)
            put_right(scene, host, key)
            manager.restart()


async def damage(scene: Scene, key: str) -> None:
    """Write half a record into the first partition, which the first host's name hashes to."""
    async with connect(scene.broker.url) as bus:
        await bus.publish(topics(scene.cluster).allocations, 0, Entry(key.encode(), b'{"type":"alloc'))


def put_right(scene: Scene, host: str, key: str) -> None:
    """Give the guide's command, with our key in the place of that in it."""
    command = guide().replace("gpu-3/tm-17/run-1", key)
    assert command == f"outfitter ledger forget {key}"
    manager = scene.managers.get(host) or next(iter(scene.managers.values()))
    done = manager.outfitter(*command.split()[1:], "--yes")
    assert done.returncode == 0, done.stderr


def guide() -> str:
    """The command on the page for troubleshooting that deletes a damaged record."""
    _, _, chapter = GUIDE.read_text().partition("### The ledger is refused")
    found = re.search(r"```sh\n(.*?)\n```", chapter, re.DOTALL)
    assert found is not None
    return found[1]

"""More partitions by the commands of deploy/README.md, while workers live: nothing is lost, and nothing lent twice.

A plain producer goes on with the metadata that it had, as every Kafka client does for minutes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from confluent_kafka import KafkaError, Producer

from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import Entry, connect
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Deregister, Heartbeat, Register, Registration
from outfitter_service.runtime.changelog.backup.restoration import restore_backup
from support.bus.faulty_bus import FaultyBus
from support.bus.remaking import ledger, remake
from support.kafka.broker import KafkaBroker
from support.managers.process import Manager, ManagerError, serving_on
from support.polling import until
from support.recipes import DEPLOYING, commands, run

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]

LEASE_S = 15.0
MANY = 24


class PlainProducer:
    """A stock client that has looked at the topic once. `refusals`: what it was told of what nobody acknowledged."""

    def __init__(self, broker: KafkaBroker, cluster: str) -> None:
        self._topic = topics(cluster).registrations
        self._producer = Producer(
            {"bootstrap.servers": broker.bootstrap, "partitioner": "murmur2_random", "linger.ms": 0, "acks": "all"}
        )
        self.refusals: list[int] = []

    def say(self, message: Registration) -> bool:
        """Send a message; whether it was acknowledged."""
        told: list[KafkaError | None] = []
        self._producer.produce(
            self._topic, encode(message), message.host.encode(), on_delivery=lambda error, _: told.append(error)
        )
        self._producer.flush(60)
        [error] = told
        if error is not None:
            self.refusals.append(error.code())
        return error is None


@contextmanager
def session(portal: BlockingPortal, manager: Manager, asked: Register) -> Iterator[WorkerSession]:
    """A worker by the client library, with a lease."""
    with (
        portal.wrap_async_context_manager(connect(manager.bus_url)) as bus,
        portal.wrap_async_context_manager(WorkerSession(bus, asked, cluster=manager.cluster)) as worker,
    ):
        portal.call(worker.wait)
        yield worker


def devices(record: dict[str, Any]) -> list[str]:
    return [info["id"] for info in record["resources"]["gpu"]]


def publish(manager: Manager, partitions: int, message: Registration) -> None:
    async def say() -> None:
        async with connect(manager.bus_url) as bus:
            place = topics(manager.cluster).registrations, partition_of(message.host, partitions)
            await bus.publish(*place, Entry(message.host.encode(), encode(message)))

    anyio.run(say)


async def killed_at_each_change(successor: Manager, old: str) -> None:
    """Restore, killed at each change of the bus: no manager starts on a part. Then the ledger's topic is made anew."""
    cluster, file = successor.cluster, successor.folder / "ledger.gz"
    for point in range(1, 99):
        async with FaultyBus(successor.bus_url) as bus:
            work = partial(restore_backup, bus, cluster, file, history=True, origin=old)
            changes = await bus.killed(work, point)
            if b'"partitions":0' in b"".join(
                value for each in (await ledger(bus, cluster)).values() for value in each.values()
            ):
                with pytest.raises(ManagerError, match="ended with 1 before it was ready"):
                    await anyio.to_thread.run_sync(successor.start, "--adopt-ledger")
                assert "`outfitter restore` has not completed" in successor.log_tail()
            await remake(bus, cluster, [topics(cluster).allocations], partitions=MANY)
            if changes < point:
                assert point > 3
                return
    raise AssertionError("it never came to its end")


def test_more_partitions_by_the_page_lose_nothing_and_lend_nothing_twice(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    old, new = KafkaBroker.new_cluster(), KafkaBroker.new_cluster()
    names = {"fleet-2": new}
    with (
        serving_on(kafka_broker, tmp_path / "manager", gpus=3, cluster=old) as manager,
        start_blocking_portal() as portal,
    ):
        host = manager.host
        asked = [
            Register(
                host=host, worker=worker, incarnation="1", lease_s=LEASE_S if worker in ("leased", "plain") else None
            )
            for worker in ("leased", "plain", "waiting", "unanswered")
        ]
        producer = PlainProducer(kafka_broker, old)
        runner = manager.popen("run", "--worker", "runner", "--", "sleep", "600", start_new_session=True)
        successor = Manager(
            tmp_path / "manager", manager.config.read_text(), bus=manager.bus_url, host=host, cluster=new
        )
        try:
            held = {"runner": devices(manager.wait_for_state("runner", "allocated"))}
            with session(portal, manager, asked[0]) as leased:
                assert all(producer.say(message) for message in asked[1:3])
                held |= {worker: devices(manager.wait_for_state(worker, "allocated")) for worker in ("leased", "plain")}
                manager.wait_for_state("waiting", "pending")
                assert sorted(device for each in held.values() for device in each) == ["GPU-0", "GPU-1", "GPU-2"]

                assert producer.say(Heartbeat(host=host, worker="plain", incarnation="1"))
                create, close, stop, backup, restore, delete, start = commands("More partitions", page=DEPLOYING)
                run(manager, stop)
                assert producer.say(asked[3])  # it is acknowledged, and nobody serves
                run(manager, create, **names)
                publish(successor, MANY, Register(host=host, worker="early", incarnation="1", lease_s=None))
                run(manager, close, **names)
                beat = Heartbeat(host=host, worker="plain", incarnation="1")
                until(lambda: not producer.say(beat), lambda: "the old topic still takes messages")
                assert not producer.say(Register(host=host, worker="late", incarnation="1"))
                assert "and 1 unanswered message" in run(manager, backup)
                words = [old if word == "outfitter" else word for word in restore[1:]]
                anyio.run(killed_at_each_change, successor, old)
                # an earlier run has sent it, and the topic is still there
                assert "0 registrations sent again" in run(manager, ["outfitter", *words], **names)
                run(manager, delete, **names)
                run(successor, start, **names)
                assert {worker: devices(successor.record(worker) or {}) for worker in held} == held

                # the device of one whose lease has ended is lent on, once that worker knows that it has lost it
                for worker in ("early", "waiting"):
                    successor.wait_for_state(worker, "allocated")
                assert leased.allocation_watch.lease.at_risk
                assert not producer.say(Heartbeat(host=host, worker="plain", incarnation="1"))
                assert set(producer.refusals) == {KafkaError.MSG_SIZE_TOO_LARGE}
                ended = {successor.record(worker)["state"] for worker in ("leased", "plain")}  # type: ignore[index]
                assert ended == {"ended"}
                assert devices(successor.record("runner") or {}) == held["runner"]
                assert runner.poll() is None
                successor.wait_for_state("unanswered", "pending")
            os.killpg(runner.pid, signal.SIGKILL)  # its owner's death frees the device
            successor.wait_for_state("unanswered", "allocated")
            for worker in ("early", "waiting", "unanswered"):
                publish(successor, MANY, Deregister(host=host, worker=worker, incarnation="1"))
                successor.wait_for_state(worker, "ended")
            successor.stop()
            verdict = successor.outfitter("verify")
            assert verdict.returncode == 0, verdict.stdout
        finally:
            successor.kill9()
            runner.kill()
            runner.communicate()
            print(f"--- {successor.log}\n{successor.log_tail()}")

"""The only broker: killed and started again, and out of disk space."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.chosen import KAFKA, OPTIONS
from chaos.scene import Note, playing
from support.kafka.cluster import KafkaCluster, running
from support.kafka.small_disk import SmallDisk

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]


@pytest.fixture
def only_broker(tmp_path: Path) -> Iterator[tuple[KafkaCluster, SmallDisk]]:
    """One broker whose data lie on a small disk."""
    folder = tmp_path / "kafka"
    with SmallDisk(folder / "node1" / "data", megabytes=128) as disk, ExitStack() as stack:
        cluster = KafkaCluster(folder, nodes=1, kafka=KAFKA, options=OPTIONS, within=disk.within)
        yield stack.enter_context(running(cluster)), disk


def test_an_only_broker_killed_or_out_of_space_loses_nothing(
    only_broker: tuple[KafkaCluster, SmallDisk], tmp_path: Path, note: Note
) -> None:
    cluster, disk = only_broker
    broker = cluster.brokers[1]
    with playing(cluster, tmp_path, "only broker", note, beside_bare=True) as scene:
        for seconds in (0, 5):
            with scene.fault(f"the only broker: kill -9, started after {seconds} s") as trouble:
                broker.kill9()
                trouble.begin()
                time.sleep(seconds)
                cluster.restart(1)
        with scene.fault("the only broker: its disk is full until it ends") as trouble:
            disk.fill()
            trouble.begin()
            broker.await_end()
            disk.free()
            cluster.restart(1)

"""Cluster scope: replicas killed and frozen, one at a time and all at once, and in the middle of a transaction."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from chaos.harm import Harmed, in_a_transaction
from chaos.scene import PARTITIONS, Note, Scene, playing
from support.managers.process import Manager

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]

REPLICAS = 2
SESSION = 'session-timeout = "6s"'
FROZEN_S = 12


def owner(scene: Scene, partition: int) -> Manager:
    """The replica that serves a partition."""
    found: list[Manager] = []

    def look() -> bool:
        found[:] = [
            m for m in scene.managers.values() if m.metric("outfitter_partition_ready", partition=str(partition))
        ]
        return bool(found)

    next(iter(scene.managers.values())).wait_for(look)
    return found[0]


def shared_out(scene: Scene) -> None:
    """Wait until each replica serves a partition."""
    first, *_ = scene.managers.values()
    first.wait_for(lambda: len({owner(scene, partition).pid for partition in range(PARTITIONS)}) == REPLICAS)


def test_replicas_killed_one_at_a_time_and_all_at_once_lose_nothing(harmed: Harmed, tmp_path: Path, note: Note) -> None:
    with playing(harmed.broker, tmp_path, "replicas", note, extra=SESSION, replicas=REPLICAS) as scene:
        shared_out(scene)
        with scene.fault("a replica: kill -9 for good, session 6 s") as trouble:
            killed = owner(scene, 0)
            killed.kill9()
            trouble.begin()
        killed.start()
        shared_out(scene)
        with scene.fault("a replica: kill -9, started at once (static member)") as trouble:
            killed = owner(scene, 0)
            killed.kill9()
            trouble.begin()
            killed.start()
        with scene.fault("all replicas: kill -9, started at once") as trouble:
            for manager in scene.managers.values():
                manager.kill9()
                trouble.begin()
            for manager in scene.managers.values():
                manager.start()


def test_a_replica_frozen_in_a_transaction_commits_nothing_when_it_wakes_up(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    with playing(harmed.broker, tmp_path, "zombie", note, extra=SESSION, replicas=REPLICAS) as scene:
        shared_out(scene)
        frozen = owner(scene, 0)
        with scene.fault(f"a replica: SIGSTOP {FROZEN_S} s in a transaction, session 6 s") as trouble:
            in_a_transaction(harmed, scene, scene.hosts[0])
            scene.freeze(frozen.pid, FROZEN_S, trouble)
        since = time.monotonic()
        shared_out(scene)  # it serves again what it is given
        scene.fleet.await_answers(1, since=since)

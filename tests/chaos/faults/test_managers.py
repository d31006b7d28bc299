"""Managers killed and frozen, anywhere and in the middle of a transaction, also for longer than it may last."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from chaos.harm import Harmed, in_a_transaction
from chaos.scene import Note, playing

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]


def test_managers_killed_at_any_moment_lose_nothing(harmed: Harmed, tmp_path: Path, note: Note) -> None:
    with playing(harmed.broker, tmp_path, "managers", note) as scene:
        for host in scene.hosts:
            with scene.fault("a manager: kill -9, started at once") as trouble:
                time.sleep(scene.dice.random())
                scene.managers[host].kill9()
                trouble.begin()
                scene.managers[host].start(ready=False)


def test_a_manager_killed_in_a_transaction_loses_nothing(harmed: Harmed, tmp_path: Path, note: Note) -> None:
    with playing(harmed.broker, tmp_path, "manager in transaction", note) as scene:
        host = scene.dice.choice(scene.hosts)
        with scene.fault("a manager: kill -9 in a transaction, started at once") as trouble:
            in_a_transaction(harmed, scene, host)
            scene.managers[host].kill9()
            trouble.begin()
            scene.managers[host].start(ready=False)


@pytest.mark.parametrize("seconds", [2, 10])
def test_a_manager_frozen_in_a_transaction_loses_nothing_and_hides_the_others_answers_no_longer_than_its_time_out(
    harmed: Harmed, tmp_path: Path, note: Note, seconds: int
) -> None:
    """Two seconds are less than its transaction may last, ten are more: the broker ends it and fences the manager."""
    with playing(harmed.broker, tmp_path, f"manager frozen {seconds}", note) as scene:
        host, beside, _ = scene.hosts
        name = f"a manager: SIGSTOP {seconds} s in a transaction, as its partition's other host sees it"
        with scene.fault(name, seen_by=[beside]) as trouble:
            in_a_transaction(harmed, scene, host)
            scene.freeze(scene.managers[host].pid, seconds, trouble)

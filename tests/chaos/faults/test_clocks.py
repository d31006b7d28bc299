"""Clocks: managers whose wall clocks are wrong, apart, and set while they run; frozen for longer than a lease lasts.

Some workers hold a device and beat all the while, with leases of a few seconds: none of them may lose it
(`Fleet.robbed`). The brokers' clocks are right, so what managers date differs from what brokers do. (They take nothing
from more than an hour ahead, which managers say.)
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from chaos.fleet import KEEPER_LEASE_S
from chaos.harm import Harmed, in_a_transaction
from chaos.scene import Note, playing

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]

HOUR_S = 3500.0
DAY_S = 24 * HOUR_S
WRONG = {
    "an hour ahead, an hour behind, right": (HOUR_S, -HOUR_S, 0.0),
    "an hour behind, an hour ahead, two days behind": (-HOUR_S, HOUR_S, -2 * DAY_S),
    "set right": (0.0, 0.0, 0.0),
}


def test_leases_and_grants_do_not_depend_on_managers_wall_clocks(harmed: Harmed, tmp_path: Path, note: Note) -> None:
    """They are set while managers run, and stand while one of them is killed and started again."""
    with playing(harmed.broker, tmp_path, "wall clocks", note, keepers=1, adjusted=True) as scene:
        for name, ahead in WRONG.items():
            with scene.fault(f"managers' wall clocks: {name}") as trouble:
                scene.fleet.await_keepers()
                trouble.begin(0)
                for host, seconds in zip(scene.hosts, ahead, strict=True):
                    scene.clocks[host].set_ahead(seconds)
                time.sleep(2.0)
                killed = scene.managers[scene.dice.choice(scene.hosts)]
                killed.kill9()
                trouble.begin()
                killed.start(ready=False)
                scene.fleet.await_answers(1, since=time.monotonic())


def test_a_manager_frozen_for_longer_than_leases_last_hears_what_was_said_meanwhile_before_it_judges(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    with playing(harmed.broker, tmp_path, "frozen", note, keepers=2) as scene:
        for host, where in zip(scene.hosts[1:], ("", " in a transaction"), strict=True):
            seconds = KEEPER_LEASE_S + 3
            with scene.fault(f"a manager: SIGSTOP {seconds:g} s{where}, leases of {KEEPER_LEASE_S:g} s") as trouble:
                scene.fleet.await_keepers()
                if where:
                    in_a_transaction(harmed, scene, host)
                scene.freeze(scene.managers[host].pid, seconds, trouble)
                time.sleep(2.0)  # who is judged wrongly is judged soon

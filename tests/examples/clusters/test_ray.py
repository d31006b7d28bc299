"""examples/ray on a real cluster: whatever is killed, nobody has a device that a living process of a node still uses.

The actors' processes say what they use, and look whether the one before them lives.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.clusters import uses
from support.clusters.ray import EXAMPLE, RayCluster, raylet_of
from support.managers.process import Manager, StartManager
from support.processes.ending import wait_until_ended
from support.processes.worker_program import WorkerProgram

ACTORS = Path(__file__).with_name("ray_actors.py")

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]


class Scene:
    """Two nodes: the head, and the one that comes to harm."""

    def __init__(self, cluster: RayCluster, manager: Manager) -> None:
        self.cluster = cluster
        self.manager = manager
        self.uses = cluster.folder / "uses"
        cluster.wait_for_node(cluster.start_node())
        self.node = cluster.start_node()
        cluster.wait_for_node(self.node)
        (info,) = self.record_of(self.node)["resources"]["gpu"]
        self.device = str(info["id"])

    def compute(self, user: str = "actor") -> None:
        """Block until there is an actor on each node, and each device is used."""
        self.cluster.submit(ACTORS, str(Path(uses.__file__).parent), str(self.uses), user)
        self.wait_for_both()

    def wait_for_both(self) -> None:
        """Block until two actors say, from now on, that a device each is used."""
        before = len(uses.lines(self.uses))

        def are_used() -> bool:
            last = {said["device"]: said for said in uses.lines(self.uses)[before:] if said["what"] == "beat"}
            return len(last) == 2 and all(uses.Process(said["pid"], said["ticks"]).is_alive() for said in last.values())

        self.cluster.wait_for(are_used, "two devices in use")

    def user(self) -> int:
        """The process that used the device of `node` last."""
        return int([said for said in uses.lines(self.uses) if said["device"] == self.device][-1]["pid"])

    def record_of(self, node: WorkerProgram) -> dict[str, Any]:
        """The record of a node, as far as it has one."""
        found = [record for record in self.manager.records() if record["request"]["owner"]["pid"] == node.pid]
        return found[0] if found else {"state": None}

    def wait_for_state(self, node: WorkerProgram, state: str) -> dict[str, Any]:
        """Block until the record of a node is in this state; return it."""
        self.cluster.wait_for(lambda: self.record_of(node)["state"] == state, f"a node in state {state}")
        return self.record_of(node)

    def wait_for_another(self, than: int) -> None:
        """Block until another process than `than` uses the device of `node`: a dying one may go on for a moment."""

        def is_used() -> bool:
            if not self.cluster.nodes[-1].is_running():  # Ray gives up if a start takes longer than 30 s
                self.cluster.start_node()
            return self.user() != than

        self.cluster.wait_for(is_used, f"another user of {self.device}")
        self.wait_for_both()

    def check(self) -> None:
        """Nobody has had a device that a living process still used."""
        assert uses.overlaps(self.uses) == []
        verdict = self.manager.outfitter("verify")
        assert verdict.returncode == 0, verdict.stdout


@pytest.fixture
def scene(start_manager: StartManager, tmp_path: Path) -> Iterator[Scene]:
    manager = start_manager(gpus=2)
    with RayCluster(tmp_path / "ray", manager) as cluster:
        yield Scene(cluster, manager)


def test_the_actors_of_the_example_have_the_gpu_of_their_node(scene: Scene) -> None:
    job = scene.cluster.submit(EXAMPLE / "worker.py")
    for device in ("GPU-0", "GPU-1"):
        scene.cluster.wait_for_output(job, rf"^scored \d+ on {device}$")


def test_a_node_that_is_told_to_end_gives_its_gpu_to_the_next_one(scene: Scene) -> None:
    scene.compute()
    user = scene.user()
    scene.node.signal(signal.SIGTERM)
    assert scene.wait_for_state(scene.node, "ended")["reason_code"] == "deregistered"
    wait_until_ended(user)
    scene.cluster.start_node()
    scene.wait_for_another(user)
    scene.check()


def test_a_killed_node_gives_its_gpu_to_the_next_one(scene: Scene) -> None:
    scene.compute()
    user = scene.user()
    scene.node.signal(signal.SIGKILL)
    scene.cluster.start_node()
    scene.wait_for_another(user)
    assert scene.record_of(scene.node)["reason_code"] == "owner-died"
    scene.check()


def test_a_killed_raylet_gives_the_gpu_of_its_node_to_the_next_one(scene: Scene) -> None:
    scene.compute()
    user = scene.user()
    raylet_of(user).kill()
    scene.cluster.start_node()
    scene.wait_for_another(user)
    assert scene.record_of(scene.node)["reason_code"] == "deregistered"
    scene.check()


def test_a_frozen_actor_keeps_the_gpu_of_its_node_although_its_raylet_is_dead(scene: Scene) -> None:
    scene.compute()
    actor = scene.user()
    raylet = raylet_of(actor)
    os.kill(actor, signal.SIGSTOP)
    raylet.kill()
    scene.cluster.wait_for_output(scene.node, "keeps the devices until what it left behind has ended")
    another = scene.cluster.start_node()
    scene.wait_for_state(another, "pending")
    assert scene.record_of(scene.node)["state"] == "allocated"
    os.kill(actor, signal.SIGCONT)
    scene.wait_for_another(actor)
    scene.check()


def test_a_daemon_of_an_actor_keeps_the_gpu_of_its_killed_node(scene: Scene) -> None:
    scene.compute("daemon")
    daemon = scene.user()
    scene.node.signal(signal.SIGKILL)
    another = scene.cluster.start_node()
    scene.wait_for_state(another, "pending")
    assert scene.record_of(scene.node)["state"] == "releasing"
    os.kill(daemon, signal.SIGKILL)
    scene.wait_for_another(daemon)
    scene.check()


def test_a_killed_actor_starts_anew_with_the_gpu_of_its_node(scene: Scene) -> None:
    scene.compute()
    before, killed = scene.record_of(scene.node), scene.user()
    os.kill(killed, signal.SIGKILL)
    scene.wait_for_another(killed)
    assert scene.record_of(scene.node) == before
    scene.check()


def test_a_manager_that_is_killed_and_comes_back_changes_nothing(scene: Scene) -> None:
    scene.compute()
    before = scene.record_of(scene.node)
    begun = [said for said in uses.lines(scene.uses) if said["what"] == "begin"]
    scene.manager.kill9()
    scene.wait_for_both()
    scene.manager.start()
    scene.wait_for_both()
    assert [said for said in uses.lines(scene.uses) if said["what"] == "begin"] == begun
    assert scene.record_of(scene.node)["token"] == before["token"]
    scene.check()

"""examples/pyflink on a real cluster: whatever ends a function or its process, nobody has a device that a living
process still uses. The processes themselves say what they use, and look whether the one before them lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.clusters import uses
from support.clusters.flink import PYFLINK, Flink, FlinkCluster, flink
from support.documents import ROOT
from support.kafka.broker import KafkaBroker
from support.managers.process import Manager, serving_on
from support.processes.ending import wait_until_ended

JOB = Path(__file__).with_name("pyflink_job.py")
MODULES = (ROOT / "examples" / "pyflink" / "job.py", Path(uses.__file__))
NUMBERS_AT_ONCE = "-Dpython.fn-execution.bundle.size=10"

pytestmark = [pytest.mark.clusters, pytest.mark.kafka, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def pyflink() -> Flink:
    return flink(PYFLINK, python=True)


@pytest.fixture
def manager(kafka_broker: KafkaBroker, tmp_path: Path) -> Iterator[Manager]:
    """A manager of a host with two GPUs, on Kafka."""
    with serving_on(kafka_broker, tmp_path / "manager", gpus=2, cluster=kafka_broker.new_cluster()) as manager:
        yield manager


class Scene:
    """A job with two subtasks on two task managers, each of which could run both."""

    def __init__(self, cluster: FlinkCluster, manager: Manager, mode: str) -> None:
        self.cluster = cluster
        self.manager = manager
        self.uses = cluster.folder / "uses"
        self.task_managers = [cluster.start_task_manager(manager.environment) for _ in range(2)]
        cluster.wait_for_slots(4)
        options = [NUMBERS_AT_ONCE, f"-Dpython.execution-mode={mode}"]
        self.job = cluster.run_python(JOB, str(self.uses), modules=MODULES, options=options)
        self.wait_for_both()

    def wait_for_both(self) -> None:
        """Block until two subtasks say, from now on, that they use a device each."""
        before = len(uses.lines(self.uses))

        def are_used() -> bool:
            beats = [said for said in uses.lines(self.uses)[before:] if said["what"] == "beat"]
            last = {said["device"]: said for said in beats}
            return len(last) == 2 and all(self.lives(said) for said in last.values())

        self.cluster.wait_for(are_used, "two subtasks that compute")

    def lives(self, said: dict[str, object]) -> bool:
        return uses.Process(int(str(said["pid"])), int(str(said["ticks"]))).is_alive()

    def user_of(self, device: str) -> int:
        """The process that used the device last."""
        return int([said for said in uses.lines(self.uses) if said["device"] == device][-1]["pid"])

    def wait_for_another(self, device: str, than: int) -> None:
        """Block until another process than `than` uses the device."""
        self.cluster.wait_for(lambda: self.user_of(device) != than, f"another user of {device}")

    def kill_a_task_manager(self) -> None:
        """Kill the one that runs the subtask with GPU-0, and nothing that it has started."""
        user = self.user_of("GPU-0")
        victim = next(program for program in self.task_managers if program.pid == os.getsid(user))
        victim.signal(signal.SIGKILL)
        victim.wait()

    def records(self, state: str) -> list[dict[str, Any]]:
        """The records in this state."""
        return [record for record in self.manager.records() if record["state"] == state]

    def check(self) -> None:
        """Nobody has had a device that a living process still used, and in the end nobody has any."""
        self.cluster.cancel(self.job)
        self.manager.wait_for(lambda: not self.records("allocated"))
        assert uses.overlaps(self.uses) == []
        verdict = self.manager.outfitter("verify")
        assert verdict.returncode == 0, verdict.stdout


@pytest.fixture(params=["process", "thread"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scene(pyflink: Flink, manager: Manager, mode: str, tmp_path: Path) -> Iterator[Scene]:
    with FlinkCluster(pyflink, tmp_path / "cluster") as cluster:
        yield Scene(cluster, manager, mode)


class TestBothModes:
    def test_a_function_that_raises_and_a_cancelled_job_give_their_devices_to_the_next(self, scene: Scene) -> None:
        Path(f"{scene.uses}.fail").touch()
        scene.cluster.wait_for(lambda: not Path(f"{scene.uses}.fail").exists(), "a subtask that fails")
        scene.wait_for_both()
        scene.cluster.cancel(scene.job)
        # in process mode: a second job in thread mode fails in this version of PyFlink
        scene.job = scene.cluster.run_python(JOB, str(scene.uses), modules=MODULES, options=[NUMBERS_AT_ONCE])
        scene.wait_for_both()
        scene.check()

    def test_a_killed_task_manager_leaves_its_devices_to_the_next_once_its_processes_are_dead(
        self, scene: Scene
    ) -> None:
        scene.kill_a_task_manager()
        scene.wait_for_both()
        scene.check()

    def test_a_manager_that_is_killed_and_comes_back_changes_nothing(self, scene: Scene) -> None:
        begun = [said for said in uses.lines(scene.uses) if said["what"] == "begin"]
        scene.manager.kill9()
        scene.manager.start()
        scene.wait_for_both()
        assert [said for said in uses.lines(scene.uses) if said["what"] == "begin"] == begun
        scene.check()


@pytest.mark.parametrize("mode", ["process"], indirect=True)
class TestProcessMode:
    def test_a_killed_python_worker_leaves_its_device_to_its_successor(self, scene: Scene) -> None:
        worker = scene.user_of("GPU-0")
        os.kill(worker, signal.SIGKILL)
        scene.wait_for_another("GPU-0", worker)
        scene.wait_for_both()
        scene.check()

    def test_a_frozen_worker_keeps_its_device_although_its_task_manager_is_dead(self, scene: Scene) -> None:
        worker = scene.user_of("GPU-0")
        os.kill(worker, signal.SIGSTOP)
        scene.kill_a_task_manager()
        scene.cluster.wait_for(lambda: scene.records("pending"), "a subtask that starts again and must wait")
        assert scene.user_of("GPU-0") == worker
        os.kill(worker, signal.SIGCONT)
        wait_until_ended(worker)  # nobody else ends it: its task manager is gone
        scene.wait_for_both()
        scene.check()

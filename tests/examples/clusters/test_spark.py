"""examples/spark on a real standalone cluster: whose GPU is whose, whatever is killed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.clusters.programs import READY_WITHIN_S
from support.clusters.spark import EXAMPLE, SparkCluster, descendants
from support.managers.process import OUTFITTER, Manager, StartManager
from support.processes.ending import wait_until_ended
from support.processes.worker_program import WorkerProgram

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]


@pytest.fixture
def manager(start_manager: StartManager) -> Manager:
    return start_manager(gpus=2)


@pytest.fixture
def cluster(manager: Manager, tmp_path: Path) -> Iterator[SparkCluster]:
    """A cluster without workers, whose workers lease from the manager."""
    with SparkCluster(tmp_path / "spark", manager.environment) as cluster:
        yield cluster


def record_of(manager: Manager, worker: WorkerProgram) -> dict[str, Any]:
    """The record of a worker's lease."""
    (record,) = [found for found in manager.records() if found["worker"].startswith(f"gpu-{worker.pid}-")]
    return record


def executor_in(cluster: SparkCluster, java: int) -> psutil.Process:
    """The executor of the one task, a child of the worker whose process is `java`."""
    (task,) = cluster.tasks()
    (executor,) = (each for each in psutil.Process(task.pid).parents() if each.ppid() == java)
    return executor


def test_two_workers_on_one_host_give_their_tasks_different_gpus(cluster: SparkCluster) -> None:
    workers = [cluster.start_worker(), cluster.start_worker()]
    assert sorted(cluster.gpu(worker) for worker in workers) == ["0", "1"]
    job = cluster.submit(tasks=2, seconds=5)
    assert job.wait(READY_WITHIN_S) == 0
    assert sorted(re.findall(r"^task .* has gpu (\S+) ", job.output(), re.MULTILINE)) == ["0", "1"]


def test_a_killed_worker_leaves_its_gpu_to_its_replacement_where_the_task_runs_again(
    cluster: SparkCluster, manager: Manager
) -> None:
    first, second = cluster.start_worker(), cluster.start_worker()
    gpu, other = cluster.gpu(first), cluster.gpu(second)
    cluster.submit(tasks=2, seconds=600)
    cluster.wait_for(lambda: len(cluster.tasks()) == 2, "two tasks")
    left = descendants(first)
    first.signal(signal.SIGKILL)
    wait_until_ended(*left)
    assert manager.wait_for_state(record_of(manager, first)["worker"], "ended")["reason_code"] == "owner-died"
    assert cluster.gpu(cluster.start_worker()) == gpu
    cluster.wait_for(lambda: {task.gpu for task in cluster.tasks()} == {gpu, other}, "the lost task on the same gpu")


def test_neither_a_killed_executor_nor_a_cancelled_job_takes_the_gpu_from_its_worker(
    cluster: SparkCluster, manager: Manager
) -> None:
    worker = cluster.start_worker()
    gpu = cluster.gpu(worker)
    before = record_of(manager, worker)
    job = cluster.submit(tasks=1, seconds=600)
    cluster.wait_for(cluster.tasks, "a task")
    executor_in(cluster, worker.pid).kill()
    cluster.wait_for(lambda: [task.gpu for task in cluster.tasks()] == [gpu], "the task in another executor")
    job.signal(signal.SIGINT)
    cluster.wait_for(lambda: not cluster.tasks(), "the end of all tasks")
    assert record_of(manager, worker)["token"] == before["token"]
    assert cluster.submit(tasks=1, seconds=0).wait(READY_WITHIN_S) == 0


def test_a_manager_that_is_killed_takes_no_gpu_away_and_frees_one_whose_worker_died_meanwhile(
    cluster: SparkCluster, manager: Manager
) -> None:
    kept, died = cluster.start_worker(), cluster.start_worker()
    cluster.gpu(kept)
    gpu = cluster.gpu(died)
    before = record_of(manager, kept)
    manager.kill9()
    died.signal(signal.SIGKILL)
    manager.start()
    assert cluster.gpu(cluster.start_worker()) == gpu
    after = record_of(manager, kept)
    assert (after["state"], after["token"]) == ("allocated", before["token"])


def test_a_worker_for_which_there_is_no_gpu_ends_and_says_why(cluster: SparkCluster) -> None:
    for worker in (cluster.start_worker(), cluster.start_worker()):
        cluster.gpu(worker)
    third = cluster.start_worker()
    assert third.wait(READY_WITHIN_S) == 1
    assert "no gpu within 8 s: " in third.output()
    assert "waits for 1 gpu: 0 of 2 free" in third.output()
    assert "Successfully registered" not in third.output()


def test_in_a_worker_under_run_a_frozen_executor_keeps_its_gpu_although_the_worker_is_dead(
    cluster: SparkCluster, manager: Manager
) -> None:
    def start() -> WorkerProgram:
        run = [*OUTFITTER, "run", "--resource", "gpu=2", "--"]  # both, so that the next one must wait
        return cluster.start_worker(under=run, script=EXAMPLE / "granted.sh")

    worker = start()
    gpu = cluster.gpu(worker)
    cluster.submit(tasks=1, seconds=600)
    cluster.wait_for(cluster.tasks, "a task")
    (java,) = psutil.Process(worker.pid).children()
    executor = executor_in(cluster, java.pid)
    executor.suspend()
    java.kill()
    next_worker = start()
    manager.wait_for(lambda: any(record["state"] == "pending" for record in manager.records()))
    wait_until_ended(java.pid)
    assert [task.gpu for task in cluster.tasks()] == [gpu]
    assert sorted(record["state"] for record in manager.records()) == ["allocated", "pending"]
    executor.resume()
    assert cluster.gpu(next_worker) == gpu


def test_a_worker_that_starts_while_there_is_no_manager_ends_and_says_why(
    cluster: SparkCluster, manager: Manager
) -> None:
    manager.kill9()
    worker = cluster.start_worker()
    assert worker.wait(READY_WITHIN_S) == 1
    assert "outfitter-lease: no manager answers for host" in worker.output()
    assert "Successfully registered" not in worker.output()

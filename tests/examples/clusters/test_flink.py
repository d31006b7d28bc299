"""deploy/flink and `outfitter-lease` on real clusters of each Flink version: whose GPU is whose, whatever is killed.

The job is examples/flink. It knows nothing of Outfitter, and says in each task manager what it has been given.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.clusters.flink import VERSIONS, Flink, FlinkCluster, flink
from support.clusters.maven import package
from support.clusters.programs import READY_WITHIN_S
from support.documents import ROOT
from support.managers.process import Manager, StartManager
from support.processes.worker_program import WorkerProgram

ENDLESS = ("1000000000", "20")
"""Arguments of the job: so many vectors, and milliseconds for each."""
PLUGIN = {
    "driver-factory.class": "outfitter.flink.OutfitterDriverFactory",
    "param.resource": "gpu",
    "param.command": f"{sys.executable} -m outfitter_service.cli",
}
"""Settings of the plugin's driver."""

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(ROOT / "examples" / "flink", tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(ROOT / "deploy" / "flink", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Flink:
    return flink(str(request.param))


@pytest.fixture
def manager(start_manager: StartManager) -> Manager:
    return start_manager(gpus=2)


class Scene:
    """A cluster whose task managers have one slot and ask for one GPU, by a driver of `settings` in `plugins`."""

    def __init__(self, cluster: FlinkCluster, manager: Manager, plugins: Path, settings: Mapping[str, object]) -> None:
        self.cluster = cluster
        self.manager = manager
        self._variables = {**manager.environment, "FLINK_PLUGINS_DIR": str(plugins)}
        self._settings = {
            "taskmanager.numberOfTaskSlots": 1,
            "external-resources": "gpu",
            "external-resource.gpu.amount": 1,
            **{f"external-resource.gpu.{key}": value for key, value in settings.items()},
        }

    def start(self, **params: object) -> WorkerProgram:
        """Start one more task manager, with further `param.*` of the driver."""
        more = {f"external-resource.gpu.param.{key.replace('_', '-')}": value for key, value in params.items()}
        return self.cluster.start_task_manager(self._variables, {**self._settings, **more})

    def has(self, task_manager: WorkerProgram) -> str:
        """The properties of the devices that the job has found in it."""
        found = self.cluster.wait_for_output(task_manager, r"^subtask \d of process (\d+) has: ?(.*)$")
        assert int(found[1]) == task_manager.pid
        return str(found[2])

    def record_of(self, task_manager: WorkerProgram) -> dict[str, Any]:
        """The record of a task manager with the plugin, which makes its worker's name."""
        name = f"taskmanager-{task_manager.pid}-"
        (record,) = [found for found in self.manager.records() if found["worker"].startswith(name)]
        return record

    def holds(self, task_manager: WorkerProgram) -> list[psutil.Process]:
        """The plugin's child in a task manager, while it runs `outfitter hold`."""
        children = psutil.Process(task_manager.pid).children()
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE and "hold" in child.cmdline()]

    def allocated(self) -> list[dict[str, Any]]:
        """The records of those that have devices."""
        return [record for record in self.manager.records() if record["state"] == "allocated"]

    def wait_for_queue(self) -> None:
        """Block until a task manager waits for a device."""
        self.manager.wait_for(lambda: any(record["state"] == "pending" for record in self.manager.records()))


@pytest.fixture
def with_plugin(version: Flink, plugin: Path, manager: Manager, tmp_path: Path) -> Iterator[Scene]:
    folder = tmp_path / "plugins" / "outfitter"
    folder.mkdir(parents=True)
    (folder / plugin.name).symlink_to(plugin)
    with FlinkCluster(version, tmp_path / "cluster") as cluster:
        yield Scene(cluster, manager, folder.parent, PLUGIN)


@pytest.fixture
def with_script(version: Flink, manager: Manager, tmp_path: Path) -> Iterator[Scene]:
    settings: dict[str, object] = {
        "driver-factory.class": "org.apache.flink.externalresource.gpu.GPUDriverFactory",
        "param.discovery-script.path": str(Path(sys.executable).parent / "outfitter-lease"),
    }
    with FlinkCluster(version, tmp_path / "cluster") as cluster:
        yield Scene(cluster, manager, version.home / "plugins", settings)


class TestPlugin:
    def test_a_stock_job_sees_all_properties_of_two_devices_and_computes_on_both(
        self, with_plugin: Scene, job: Path
    ) -> None:
        task_managers = [with_plugin.start(), with_plugin.start()]
        with_plugin.cluster.wait_for_slots(2)
        run = with_plugin.cluster.run_jar(job, "40", "20", options=["-p", "2"])
        with_plugin.cluster.wait_for(lambda: with_plugin.cluster.state(run) == "FINISHED", "the end of the job")
        for index, has in enumerate(sorted(map(with_plugin.has, task_managers))):
            assert has == f"id=GPU-{index} index={index} local_index=0 name=gpu{index}"
        said = "".join(program.output() for program in task_managers)
        assert set(re.findall(r"vector \d+ on gpu (\d): at most", said)) == {"0", "1"}

    def test_a_killed_task_manager_leaves_its_device_to_the_one_that_waits_for_it(
        self, with_plugin: Scene, job: Path
    ) -> None:
        first, second = with_plugin.start(), with_plugin.start()
        with_plugin.cluster.wait_for_slots(2)
        with_plugin.cluster.run_jar(job, *ENDLESS, options=["-p", "2"])
        freed, kept = with_plugin.has(first), with_plugin.has(second)
        assert freed != kept
        replacement = with_plugin.start()
        with_plugin.wait_for_queue()
        died = with_plugin.record_of(first)
        first.signal(signal.SIGKILL)
        assert with_plugin.has(replacement) == freed
        assert with_plugin.manager.wait_for_state(died["worker"], "ended")["reason_code"] == "owner-died"

    def test_without_a_device_a_task_manager_ends_before_it_registers(self, with_plugin: Scene) -> None:
        with_plugin.start(), with_plugin.start()
        with_plugin.cluster.wait_for_slots(2)
        third = with_plugin.start(wait=1)
        assert third.wait(READY_WITHIN_S) != 0
        assert "NoDevicesError" in third.output()
        assert "Successful registration at resource manager" not in third.output()

    def test_without_a_device_it_goes_on_with_flinks_warning_where_that_is_wanted(
        self, with_plugin: Scene, job: Path
    ) -> None:
        with_plugin.start(), with_plugin.start()
        with_plugin.cluster.wait_for_slots(2)
        third = with_plugin.start(wait=1, on_failure="continue")
        with_plugin.cluster.wait_for_slots(3)
        assert re.search(r"WARN .*ExternalResource.*gpu", third.output())
        with_plugin.cluster.run_jar(job, *ENDLESS, options=["-p", "3"])
        assert with_plugin.has(third) == ""

    def test_only_sigterm_gives_the_device_back_and_neither_a_cancelled_job_nor_a_killed_child_or_manager(
        self, with_plugin: Scene, job: Path
    ) -> None:
        task_manager = with_plugin.start()
        with_plugin.cluster.wait_for_slots(1)
        run = with_plugin.cluster.run_jar(job, *ENDLESS)
        with_plugin.has(task_manager)
        before = with_plugin.record_of(task_manager)
        with_plugin.cluster.cancel(run)
        (hold,) = with_plugin.holds(task_manager)
        hold.kill()
        with_plugin.cluster.wait_for(lambda: with_plugin.holds(task_manager) not in ([], [hold]), "another child")
        with_plugin.manager.kill9()
        with_plugin.manager.start()
        after = with_plugin.record_of(task_manager)
        assert (after["state"], after["token"]) == ("allocated", before["token"])
        task_manager.signal(signal.SIGTERM)
        task_manager.wait(READY_WITHIN_S)
        ended = with_plugin.manager.wait_for_state(before["worker"], "ended")
        assert ended["reason_code"] in {"deregistered", "owner-died"}


class TestScript:
    def test_only_the_end_of_a_task_manager_frees_its_device_which_the_one_that_waits_gets(
        self, with_script: Scene, job: Path
    ) -> None:
        first, second = with_script.start(), with_script.start()
        with_script.cluster.wait_for_slots(2)
        with_script.cluster.run_jar(job, *ENDLESS, options=["-p", "2"])
        freed = with_script.has(first)
        assert {freed, with_script.has(second)} == {"index=0", "index=1"}
        before = with_script.manager.records()
        with_script.manager.kill9()
        with_script.manager.start()
        assert [record["state"] for record in with_script.manager.records()] == ["allocated", "allocated"]
        assert [record["token"] for record in with_script.manager.records()] == [record["token"] for record in before]
        replacement = with_script.start()
        with_script.wait_for_queue()
        first.signal(signal.SIGKILL)
        assert with_script.has(replacement) == freed
        second.signal(signal.SIGTERM)
        with_script.manager.wait_for(lambda: len(with_script.allocated()) == 1)

    def test_without_a_device_flink_warns_and_goes_on(self, with_script: Scene, job: Path) -> None:
        with_script.start(), with_script.start()
        with_script.cluster.wait_for_slots(2)
        third = with_script.start()
        with_script.cluster.wait_for_slots(3)
        assert "no gpu within 8 s: " in third.output()
        with_script.cluster.run_jar(job, *ENDLESS, options=["-p", "3"])
        assert with_script.has(third) == ""

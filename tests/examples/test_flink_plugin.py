"""deploy/flink: what Flink's task managers get, whatever ends first.

The plugin's jar is loaded as Flink loads it, into a process of its own, with the classes of each Flink version
(deploy/flink/src/test/java). Whole clusters are another test's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from support.clusters.flink import VERSIONS
from support.clusters.maven import MAVEN, package
from support.documents import ROOT
from support.managers.process import Manager, StartManager
from support.processes.tools import run_tool
from support.processes.worker_program import WorkerProgram

pytestmark = pytest.mark.examples

PLUGIN = ROOT / "deploy" / "flink"
GIVEN_BACK = {"deregistered", "owner-died"}
"""What the manager may learn first when a task manager ends: its child's word, or its death."""
OUTFITTER = f"{sys.executable} -m outfitter_service.cli"

StartTaskManager = Callable[..., WorkerProgram]


@pytest.fixture(scope="module")
def jar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin, built once against the oldest version."""
    return package(PLUGIN, tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module", params=VERSIONS)
def classpath(jar: Path, request: pytest.FixtureRequest) -> str:
    """The classes of one version of Flink."""
    path = jar.parent / f"classpath-{request.param}"
    folder = jar.parents[1]
    asked = [f"-Dflink.version={request.param}", f"-Dmdep.outputFile={path}"]
    run_tool([*MAVEN, "dependency:build-classpath", *asked], folder)
    return path.read_text()


@pytest.fixture
def manager(start_manager: StartManager) -> Manager:
    return start_manager(gpus=2)


@pytest.fixture
def start(jar: Path, classpath: str, manager: Manager, tmp_path: Path) -> Iterator[StartTaskManager]:
    """Start task managers, each with `amount` devices and settings of its own; they end with the test."""
    with ExitStack() as programs:

        def start(amount: int = 1, **settings: str) -> WorkerProgram:
            given = {"resource": "gpu", "command": OUTFITTER, "wait": "20", **settings}
            arguments = [f"{key.replace('_', '-')}={value}" for key, value in given.items()]
            source = str(PLUGIN / "src/test/java/StandInTaskManager.java")
            command = [
                "java",
                "-Xmx64m",
                "-XX:+UseSerialGC",
                "-cp",
                classpath,
                source,
                str(jar),
                str(amount),
                *arguments,
            ]
            return programs.enter_context(WorkerProgram(command, folder=tmp_path, variables=manager.environment))

        yield start


def device(program: WorkerProgram) -> str:
    """The properties of the one device that a task manager has got."""
    program.wait_for("registered")
    (line,) = program.lines("device")
    return line


def children(program: WorkerProgram) -> list[psutil.Process]:
    """The child processes of a task manager that live."""
    return [child for child in psutil.Process(program.pid).children() if child.status() != psutil.STATUS_ZOMBIE]


def worker_of(manager: Manager) -> str:
    """The one worker that has devices."""
    (record,) = [record for record in manager.records() if record.get("state") == "allocated"]
    return str(record["worker"])


@pytest.mark.timeout(300)
class TestTaskManagers:
    def test_two_on_one_host_have_different_devices_and_a_killed_one_leaves_its_device_to_the_next(
        self, start: StartTaskManager
    ) -> None:
        first, second = start(), start()
        assert {"GPU-0", "GPU-1"} == {name for name in ("GPU-0", "GPU-1") for p in (first, second) if name in device(p)}
        freed = device(first)
        third = start()
        os.kill(first.pid, signal.SIGKILL)
        assert device(third) == freed

    def test_its_orderly_end_gives_its_devices_back(self, start: StartTaskManager, manager: Manager) -> None:
        program = start()
        device(program)
        worker = worker_of(manager)
        program.signal(signal.SIGTERM)
        program.wait()
        assert manager.wait_for_state(worker, "ended")["reason_code"] in GIVEN_BACK

    def test_its_device_is_its_own_until_it_has_ended_however_long_that_takes(
        self, start: StartTaskManager, manager: Manager, tmp_path: Path
    ) -> None:
        program = start(amount=2)
        program.wait_for("registered")
        (unfinished := tmp_path / "unfinished").touch()
        program.signal(signal.SIGTERM)
        program.wait_for("ending")
        other = manager.outfitter("run", "--resource", "gpu=1", "--wait", "500ms", "--", "true")
        assert other.returncode == 124, other.stderr
        assert children(program)
        unfinished.unlink()
        program.wait()
        assert manager.outfitter("run", "--resource", "gpu=1", "--", "true").returncode == 0

    def test_a_child_that_is_killed_loses_nothing_and_is_started_again(
        self, start: StartTaskManager, manager: Manager
    ) -> None:
        program = start()
        device(program)
        before = manager.record(worker_of(manager))
        (child,) = children(program)
        child.kill()
        manager.wait_for(lambda: set(children(program)) - {child})
        program.signal(signal.SIGTERM)
        program.wait()
        assert before is not None
        after = manager.wait_for_state(before["worker"], "ended")
        assert (after["incarnation"], after["token"]) == (before["incarnation"], before["token"])
        assert after["reason_code"] in GIVEN_BACK

    def test_without_devices_it_does_not_register(self, start: StartTaskManager) -> None:
        program = start(amount=3)
        assert program.wait() == 1
        assert "NoDevicesError" in program.output()
        assert program.lines("registered") == []

    def test_without_devices_it_registers_with_a_warning_where_that_is_wanted(self, start: StartTaskManager) -> None:
        program = start(amount=3, on_failure="continue")
        program.wait_for("registered")
        (warning,) = program.lines("warning")
        assert "3" in warning
        assert program.lines("device") == []

    def test_it_ends_when_its_devices_are_lost(self, start: StartTaskManager, manager: Manager) -> None:
        program = start()
        device(program)
        assert manager.outfitter("deregister", "--worker", worker_of(manager)).returncode == 0
        assert program.wait() == 1

    def test_a_misspelt_setting_is_named_with_those_that_there_are(self, start: StartTaskManager) -> None:
        program = start(wiat="3")
        assert program.wait() == 1
        assert "param.wiat is unknown; the keys are" in program.output()

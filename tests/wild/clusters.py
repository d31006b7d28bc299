"""The integrations of the matrix on clusters of other systems: how their workers start, and what a crash is to them."""

from __future__ import annotations

import functools
import os
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from examples.clusters import test_flink, test_pyflink
from support.clusters import uses
from support.clusters.flink import PYFLINK, VERSIONS, FlinkCluster, flink
from support.clusters.maven import package
from support.clusters.programs import READY_WITHIN_S
from support.clusters.spark import EXAMPLE, LEASE, SparkCluster, descendants
from support.documents import ROOT
from support.managers.process import OUTFITTER
from wild.scene import GPUS, Integration, Scene

# --- Spark -------------------------------------------------------------------------------------------------


class Spark:
    """Spark's workers, and a job with a task for each device. `script` tells a worker which device it has, `under`
    starts it."""

    def __init__(self, scene: Scene, script: Path, under: Sequence[str] = ()) -> None:
        self.scene = scene
        variables = {**scene.manager.environment, "OUTFITTER_LEASE_PROPERTY": "id"}
        self.cluster = scene.clusters.enter_context(SparkCluster(scene.folder / "spark", variables))
        for _ in range(GPUS):
            scene.started.append(self.cluster.start_worker(under=under, script=script))
        for program in scene.started:
            self.cluster.gpu(program)
        self.submit()

    def submit(self) -> None:
        """Start the job."""
        folder = self.scene.folder
        self.heard = {device: self.scene.last_word(device) for device in self.scene.devices()}
        modules = [EXAMPLE / "job.py", folder / "uses.py"]
        self.job = self.cluster.submit(
            str(self.scene.uses), tasks=GPUS, seconds=600, job=folder / "spark_job.py", modules=modules
        )

    def cancel(self) -> None:
        """Interrupt the job, and start another one."""
        self.job.signal(signal.SIGINT)
        self.job.wait(READY_WITHIN_S)
        self.submit()

    def worker(self) -> psutil.Process:
        """The Java process of the struck worker; executors are its children."""
        (java,) = psutil.Process(self.run()).children()
        return java

    def run(self) -> int:
        """The struck worker's `outfitter run`."""
        return self.scene.program_of(self.scene.victim).pid

    def kill_idle(self) -> None:
        """Kill the struck worker, after the job has ended and nothing else uses its device.

        The job ends once both tasks compute. Then its executors are killed: some hang for minutes at their own end.
        """
        program = self.scene.program_of(self.scene.victim)

        def kill_executors() -> list[int]:
            left = descendants(program)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return left

        self.scene.wait_for(
            lambda: all(self.scene.last_word(device) > heard for device, heard in self.heard.items()),
            "both tasks of the job",
        )
        self.job.signal(signal.SIGINT)
        self.job.wait(READY_WITHIN_S)
        self.scene.wait_for(lambda: not kill_executors(), "the end of the worker's executors")
        program.signal(signal.SIGKILL)


SPARK = Integration(
    name="Spark, its worker under `outfitter run`",
    start=lambda scene: Spark(scene, EXAMPLE / "granted.sh", [*OUTFITTER, "run", "--resource", "gpu=1", "--"]),
    kept=frozenset({"exception", "cancel"}),
    crashes={
        "cancel": lambda scene: scene.workers.cancel(),
        "SIGTERM": lambda scene: scene.workers.worker().terminate(),
        "SIGKILL": lambda scene: scene.workers.worker().kill(),
        "SIGKILL of its parent": lambda scene: os.kill(scene.workers.run(), signal.SIGKILL),
    },
    end=lambda scene: scene.workers.worker().kill(),
)
_OUTLIVES = "an executor outlives its worker for a moment, in which the next one may have the device"
SPARK_LEASE = Integration(
    name="Spark, `outfitter-lease-spark`",
    start=lambda scene: Spark(scene, LEASE),
    kept=frozenset({"exception", "cancel"}),
    left_out={
        "SIGTERM": _OUTLIVES,
        "SIGKILL": _OUTLIVES,
        "SIGKILL of its parent": "nothing of Spark's is above a worker",
    },
    crashes={"cancel": lambda scene: scene.workers.cancel()},
    end=lambda scene: scene.workers.kill_idle(),
)


# --- PyFlink -----------------------------------------------------------------------------------------------


class PyFlink(test_pyflink.Scene):
    """Two task managers, and a job with two subtasks."""

    def __init__(self, scene: Scene, mode: str) -> None:
        installed = flink(PYFLINK, python=True)
        cluster = scene.clusters.enter_context(FlinkCluster(installed, scene.folder))
        super().__init__(cluster, scene.manager, mode)
        assert self.uses == scene.uses, "the judge reads another file than the job writes"

    def fail(self) -> None:
        """Have a subtask raise."""
        file = Path(f"{self.uses}.fail")
        file.touch()
        self.cluster.wait_for(lambda: not file.exists(), "a subtask that raises")

    def cancel(self) -> None:
        """Cancel the job."""
        self.cluster.cancel(self.job)


def pyflink(mode: str, left_out: Mapping[str, str]) -> Integration:
    return Integration(
        name=f"PyFlink in {mode} mode",
        start=lambda scene: PyFlink(scene, mode),
        left_out=left_out,
        crashes={
            "exception": lambda scene: scene.workers.fail(),
            "cancel": lambda scene: scene.workers.cancel(),
            "SIGKILL of its parent": lambda scene: scene.workers.kill_a_task_manager(),
        },
    )


PYFLINK_PROCESS = pyflink("process", {})
PYFLINK_THREAD = pyflink(
    "thread", {"SIGKILL of its parent": "the task manager itself uses the device, and nothing of Flink's is above it"}
)


# --- Flink's plugin ----------------------------------------------------------------------------------------


class FlinkPlugin:
    """Two task managers with the plugin, and a stock job in Java, which says in each of them what it computes on."""

    def __init__(self, scene: Scene, version: str) -> None:
        plugins = scene.folder / "plugins"
        (plugins / "outfitter").mkdir(parents=True)
        plugin = jar("deploy/flink")
        (plugins / "outfitter" / plugin.name).symlink_to(plugin)
        self.cluster = scene.clusters.enter_context(FlinkCluster(flink(version), scene.folder / "flink"))
        self._scene = scene
        flinks = test_flink.Scene(self.cluster, scene.manager, plugins, test_flink.PLUGIN)
        self._task_managers = [flinks.start() for _ in range(GPUS)]
        self._uses: dict[str, uses.Use] = {}
        self._said: dict[str, int] = {}
        self.cluster.wait_for_slots(GPUS)
        self._job = self._run(*test_flink.ENDLESS)

    def speak(self) -> None:
        """Write down what the tasks have printed since the last time: Java knows no `Use`."""
        for program in self._task_managers:
            for index in re.findall(r"vector \d+ on gpu (\d+):", text := program.output())[-1:]:
                device = f"GPU-{index}"
                if device not in self._uses:
                    self._uses[device] = uses.Use(self._scene.uses, device, pid=program.pid)
                if self._said.get(device) != len(text):
                    self._said[device] = len(text)
                    self._uses[device].beat()

    def fail(self) -> None:
        """Have the job raise, and another one compute after it."""
        self.cluster.cancel(self._job)
        fails = self._run("1000", "-1")  # nobody can sleep for -1 ms
        self.cluster.wait_for(lambda: "IllegalArgumentException" in self.cluster.why(fails), "a task that raises")
        self._job = fails
        self.cancel()

    def cancel(self) -> None:
        """Cancel the job, and have another one compute."""
        self.cluster.cancel(self._job)
        self._job = self._run(*test_flink.ENDLESS)

    def _run(self, *arguments: str) -> str:
        return self.cluster.run_jar(jar("examples/flink"), *arguments, options=["-p", str(GPUS)])


@functools.cache
def jar(project: str) -> Path:
    """The jar of a project, built once."""
    return package(ROOT / project, Path(tempfile.mkdtemp()))


def flink_plugin(version: str) -> Integration:
    return Integration(
        name=f"Flink {version}, plugin",
        start=lambda scene: FlinkPlugin(scene, version),
        speak=lambda scene: scene.workers.speak(),
        kept=frozenset({"exception", "cancel"}),
        left_out={"SIGKILL of its parent": "nothing of Flink's is above a task manager"},
        crashes={"exception": lambda scene: scene.workers.fail(), "cancel": lambda scene: scene.workers.cancel()},
    )


FLINK_PLUGINS = tuple(map(flink_plugin, VERSIONS))

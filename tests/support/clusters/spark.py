"""A Spark standalone cluster of this machine: a master, and workers with leased GPUs that a test starts and kills.

    with SparkCluster(folder, manager.environment) as cluster:
        worker = cluster.start_worker()
        cluster.gpu(worker)         # the address that the discovery script has printed
        job = cluster.submit(tasks=1, seconds=600)
        cluster.tasks()             # who computes where, as the tasks themselves say
        worker.signal(signal.SIGKILL)   # the JVM that owns the device, and nothing that it has started

It needs Java 17. Everything listens on loopback, and ends with the `with`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from support.clusters.programs import Programs, site_packages, virtual_environment
from support.documents import ROOT
from support.kafka.broker import free_port
from support.processes.ending import has_ended
from support.processes.worker_program import WorkerProgram

EXAMPLE = ROOT / "examples" / "spark"
LEASE = Path(sys.executable).parent / "outfitter-lease-spark"
"""The discovery script of the interpreter that runs the tests."""

_TASK = re.compile(r"^task (\d+) .*has gpu (\S+) in process (\d+)$", re.MULTILINE)


class Task(NamedTuple):
    """What a task of the job has said: which device it has, and the Python process that it runs in."""

    number: int
    gpu: str
    pid: int


class SparkCluster(Programs):
    """A master, and the workers and jobs that are started.

    `variables` lead to the manager: those of `Manager.environment`. A worker has one core, hence one executor.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        super().__init__(folder)
        installed = virtual_environment("spark", [], "--requirement", str(EXAMPLE / "requirements.txt"))
        self._home = site_packages(installed) / "pyspark"
        self._variables = {
            **variables,
            "SPARK_HOME": str(self._home),
            "SPARK_CONF_DIR": str(EXAMPLE / "conf"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": str(installed / "bin" / "python"),
        }
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._master = self.start(self._command("master.Master", port), self._variables)

    def start_worker(self, *, under: Sequence[str] = (), script: Path = LEASE) -> WorkerProgram:
        """Start one more worker, and do not wait for it. The program is Java itself; executors are its children.

        `under` is a command that starts it instead. `script` tells it which GPU it has.
        """
        self.wait_for_output(self._master, "elected leader")
        folder = self.folder / f"worker-{len(self._started)}"
        size = ["--cores", "1", "--memory", "512m", "--work-dir", str(folder)]
        command = [*under, *self._command("worker.Worker", 0), *size, self.url]
        lease = f"-Dspark.worker.resource.gpu.discoveryScript={script}"
        return self.start(command, {**self._variables, "SPARK_WORKER_OPTS": lease})

    def gpu(self, worker: WorkerProgram) -> str:
        """The address of a worker's GPU, once it has registered with the master."""
        self.wait_for_output(worker, "Successfully registered with master")
        return self.wait_for_output(worker, r"gpu -> \[name: gpu, addresses: (\S+)\]")[1]

    def submit(
        self, *arguments: str, tasks: int, seconds: float, job: Path = EXAMPLE / "job.py", modules: Sequence[Path] = ()
    ) -> WorkerProgram:
        """Start a job: so many tasks, each with one GPU for so many seconds. At its end it prints what they say.

        `modules` are shipped with it, `arguments` are further ones.
        """
        command = [str(self._home / "bin" / "spark-submit"), "--master", self.url, "--driver-memory", "512m"]
        for setting in ("spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1", "spark.ui.enabled=false"):
            command += ["--conf", setting]
        shipped = ["--py-files", ",".join(map(str, modules))] if modules else []
        return self.start([*command, *shipped, str(job), str(tasks), f"{seconds:g}", *arguments], self._variables)

    def tasks(self) -> list[Task]:
        """The tasks that run now, or whose Python process waits for another one."""
        # Spark sends what its Python processes print to the executor's standard error
        outputs = [path.read_text() for path in sorted(self.folder.glob("worker-*/app-*/*/stderr"))]
        said = [Task(int(each[0]), each[1], int(each[2])) for output in outputs for each in _TASK.findall(output)]
        return [task for task in said if not has_ended(task.pid)]

    def _command(self, program: str, port: int) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port())]
        return [str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{program}", *place]


def descendants(worker: WorkerProgram) -> list[int]:
    """A worker's executors and their Python processes: they use its GPU.

    Spark's start script leaves a shell behind that no one waits for. If it ends late, it is a zombie from then on.
    """
    children = psutil.Process(worker.pid).children(recursive=True)
    return [process.pid for process in children if not has_ended(process.pid)]

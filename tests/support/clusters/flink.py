"""A Flink cluster of this machine: one job manager, and task managers that a test starts and kills.

    with FlinkCluster(FLINK["2.3.0"], folder) as cluster:
        first = cluster.start_task_manager(variables)
        cluster.wait_for_slots(1)
        job = cluster.run_python(Path("job.py"), "--parallelism", "2")
        first.signal(signal.SIGKILL)

It needs Java 17. Everything listens on loopback, on ports that the kernel picks, and ends with the `with`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.clusters.programs import ProgramError, Programs, site_packages, virtual_environment
from support.kafka.broker import free_port
from support.managers.process import environment
from support.processes.worker_program import WorkerProgram

PYFLINK = "2.3.0"
"""The version whose Python side is installed, for `run_python`."""
VERSIONS = ("1.20.5", "2.3.0")

SUBMITTED_WITHIN_S = 180.0
_SUBMITTED = re.compile(r"Job has been submitted with JobID ([0-9a-f]{32})")

SETTINGS: Mapping[str, object] = {
    "jobmanager.bind-host": "127.0.0.1",
    "jobmanager.rpc.address": "127.0.0.1",
    "jobmanager.memory.process.size": "900m",
    "taskmanager.bind-host": "127.0.0.1",
    "taskmanager.host": "127.0.0.1",
    "taskmanager.memory.process.size": "1000m",
    "taskmanager.numberOfTaskSlots": 2,
    "rest.address": "127.0.0.1",
    "rest.bind-address": "127.0.0.1",
    # quick to notice a death, slow to give up: a job restarts until its devices are free
    "heartbeat.interval": 1000,
    "heartbeat.timeout": 8000,
    "slot.request.timeout": 20000,
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": 10000,
    "restart-strategy.fixed-delay.delay": "500 ms",
}


class Flink(NamedTuple):
    """An installed Flink: `home` has bin/ and lib/, `python` the interpreter for Python jobs, if there is one."""

    version: str
    home: Path
    python: Path | None


def flink(version: str, *, python: bool = False) -> Flink:
    """Flink of this version, from the Python package that has all of it; with PyFlink and Outfitter if `python`."""
    if python:
        folder = virtual_environment(f"pyflink-{version}", [f"apache-flink=={version}"], with_outfitter=True)
    else:
        packages = [f"apache-flink=={version}", f"apache-flink-libraries=={version}"]
        folder = virtual_environment(f"flink-{version}", packages, "--no-deps")
    return Flink(version, site_packages(folder) / "pyflink", folder / "bin" / "python" if python else None)


class FlinkCluster(Programs):
    """A job manager, and the task managers and jobs that are started. `settings` are Flink's, by their full names."""

    def __init__(self, flink: Flink, folder: Path, settings: Mapping[str, object] | None = None) -> None:
        super().__init__(folder)
        self.flink = flink
        self._port = free_port()
        self._settings = {
            **SETTINGS,
            "rest.port": self._port,
            "jobmanager.rpc.port": free_port(),
            "io.tmp.dirs": str(folder / "tmp"),
            **(settings or {}),
        }
        self._configure(folder / "conf", {})
        (folder / "tmp").mkdir(exist_ok=True)
        self.start([self._bin("jobmanager.sh"), "start-foreground"], self._variables(folder / "conf", {}))

    def start_task_manager(
        self, variables: Mapping[str, str], settings: Mapping[str, object] | None = None
    ) -> WorkerProgram:
        """Start one with more environment `variables` and `settings` of its own. The program is Java itself."""
        folder = self.folder / f"conf-{len(self._started)}"
        self._configure(folder, settings or {})
        command = [self._bin("taskmanager.sh"), "start-foreground"]
        return self.start(command, self._variables(folder, variables))

    # --- what the job manager says ---------------------------------------------------------------------

    def wait_for_slots(self, count: int) -> None:
        """Block until the task managers that the job manager knows have so many slots."""
        self.wait_for(lambda: (self._get("/overview") or {}).get("slots-total") == count, f"{count} slots")

    def wait_until_running(self, job: str) -> None:
        """Block until all tasks of the job run."""

        def all_run() -> bool:
            vertices = (self._get(f"/jobs/{job}") or {}).get("vertices") or [{}]
            return all(vertex.get("status") == "RUNNING" for vertex in vertices)

        self.wait_for(all_run, "a running job")

    def state(self, job: str) -> str:
        """The job's state: RUNNING, RESTARTING, FAILED, CANCELED …"""
        return str((self._get(f"/jobs/{job}") or {}).get("state"))

    def why(self, job: str) -> str:
        """The exceptions of the job, as the job manager shows them."""
        return json.dumps(self._get(f"/jobs/{job}/exceptions"))[:6000]

    # --- jobs ------------------------------------------------------------------------------------------

    def run_python(self, job: Path, *arguments: str, modules: Sequence[Path] = (), options: Sequence[str] = ()) -> str:
        """Submit a Python job with further `modules`; return its id. `options` go to `flink run`: -Dkey=value …"""
        python = str(self.flink.python)
        shipped = ["-pyfs", ",".join(map(str, modules))] if modules else []
        return self._run([*options, "-pyexec", python, "-pyclientexec", python, *shipped, "-py", str(job), *arguments])

    def run_jar(self, jar: Path, *arguments: str, options: Sequence[str] = ()) -> str:
        """Submit a job in Java; return its id. `options` go to `flink run`."""
        return self._run([*options, str(jar), *arguments])

    def cancel(self, job: str) -> None:
        """Cancel a job and block until it is cancelled."""
        self._request(f"/jobs/{job}?mode=cancel", "PATCH")
        self.wait_for(lambda: self.state(job) == "CANCELED", "a cancelled job")

    def _run(self, arguments: Sequence[str]) -> str:
        done = subprocess.run(
            [self._bin("flink"), "run", "-d", *arguments], cwd=self.folder, check=False, text=True,
            env=self._variables(self.folder / "conf", {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=SUBMITTED_WITHIN_S,
        )  # fmt: skip
        found = _SUBMITTED.search(done.stdout)
        if found is None:
            raise ProgramError(f"flink run ended with {done.returncode}:\n{done.stdout[-6000:]}")
        return found[1]

    # --- inside ----------------------------------------------------------------------------------------

    def _bin(self, script: str) -> str:
        return str(self.flink.home / "bin" / script)

    def _configure(self, folder: Path, settings: Mapping[str, object]) -> None:
        """The stock configuration with these settings: its options of the Java machine are needed as they are."""
        shutil.copytree(self.flink.home / "conf", folder, dirs_exist_ok=True)
        stock = (folder / "config.yaml").read_text()
        java = re.search(r"^ +all: (.*)$", stock, re.MULTILINE)
        if java is None:
            raise ProgramError(f"{folder}/config.yaml has no options of the Java machine")
        given = {"env.java.opts.all": java[1], **self._settings, **settings}
        (folder / "config.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items()))

    def _variables(self, conf: Path, more: Mapping[str, str]) -> dict[str, str]:
        given = {"FLINK_CONF_DIR": str(conf), "FLINK_LOG_DIR": str(self.folder), "FLINK_PID_DIR": str(self.folder)}
        path = os.environ["PATH"]
        if self.flink.python is not None:
            path = f"{self.flink.python.parent}{os.pathsep}{path}"
        return environment() | dict(more) | given | {"PATH": path}  # PyFlink's thread mode looks for `python`

    def _get(self, path: str) -> dict[str, Any] | None:
        """What the job manager answers, None while it does not."""
        try:
            return dict(json.loads(self._request(path, "GET")))
        except (OSError, ValueError, http.client.HTTPException):
            return None

    def _request(self, path: str, method: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request(method, path)
            return connection.getresponse().read()
        finally:
            connection.close()

"""A Ray cluster of this machine: nodes under `outfitter run`, which a test starts and kills.

    with RayCluster(folder, manager) as cluster:
        head, node = cluster.start_node(), cluster.start_node()
        actors = cluster.submit("ray_actors.py", "uses")
        node.signal(signal.SIGKILL)     # `outfitter run` alone

Ray listens on all addresses of the machine, so the cluster asks everybody for a token. All ends with the `with`, also
what an actor has started.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from support.clusters.programs import Programs, virtual_environment
from support.documents import ROOT
from support.kafka.broker import free_port
from support.managers.process import OUTFITTER, Manager
from support.processes.worker_program import WorkerProgram

EXAMPLE = ROOT / "examples" / "ray"


class RayCluster(Programs):
    """The nodes and the jobs that are started. The first node is the head, which must live as long as the cluster."""

    def __init__(self, folder: Path, manager: Manager) -> None:
        super().__init__(folder)
        installed = virtual_environment("ray", (EXAMPLE / "requirements.txt").read_text().split(), with_outfitter=True)
        self._manager = manager
        self._python = installed / "bin" / "python"
        self._temporary = tempfile.mkdtemp(prefix="ray-")  # `folder` may be too long for sockets, unix(7)
        self._address = f"127.0.0.1:{free_port()}"  # none of 10002 to 19999, which Ray gives its workers
        self.nodes: list[WorkerProgram] = []
        self._variables = {
            **manager.environment,
            "PATH": f"{installed / 'bin'}:{os.environ['PATH']}",
            "RAY_ADDRESS": self._address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for left in self._left():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def start_node(self) -> WorkerProgram:
        """Start one more node with one GPU, and do not wait for it. The program is `outfitter run`."""
        port = self._address.rpartition(":")[2]
        if self.nodes:
            place = ["--address", self._address]
        else:
            place = ["--head", "--port", port, "--include-dashboard=false", "--temp-dir", self._temporary]
        size = ["--num-cpus", "1", "--num-gpus", "1", "--node-ip-address", "127.0.0.1", "--block"]
        node = self.start([*OUTFITTER, "run", "--", "ray", "start", *place, *size], self._variables)
        self.nodes.append(node)
        return node

    def wait_for_node(self, node: WorkerProgram) -> None:
        """Block until Ray says that the node has started."""
        self.wait_for_output(node, "Ray runtime started")

    def submit(self, script: Path, *arguments: str) -> WorkerProgram:
        """Start a job, which runs until it is ended."""
        return self.start([str(self._python), str(script), *arguments], self._variables)

    def _left(self) -> Iterator[psutil.Process]:
        """The processes that inherited the environment of one of this cluster's."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("OUTFITTER_HOST") == self._manager.host:
                    yield process


def raylet_of(actor: int) -> psutil.Process:
    """The process of Ray that has started an actor's process, one for each node."""
    raylet = psutil.Process(actor).parent()
    assert raylet is not None
    assert raylet.name() == "raylet"
    return raylet

"""The trial of deploy/kubernetes without nodes: what its containers run, as processes of this machine.

The commands are those that the API server has. The API is that of the overlay `host`.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_proto import names, topics
from outfitter_proto.bus import Entry, connect
from outfitter_proto.partitioning import partition_of
from support import prometheus
from support.containers import answer
from support.kafka.broker import Broker, free_port
from support.kube import Cluster, rendered, start_program
from support.managers.process import OUTFITTER
from support.polling import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

NODE = "node-1"
BROKER = "kafka.outfitter-trial.svc:9092"


class PodProcesses:
    """Runs the commands of a cluster's pods on one node as processes. They end with it."""

    def __init__(self, cluster: Cluster, folder: Path, broker: str) -> None:
        self._cluster = cluster
        self._folder = folder
        self._broker = broker
        self._ends = ExitStack()
        self.ports = {9477: free_port(), 9478: free_port()}

    def __enter__(self) -> PodProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{self.ports[port]}"

    def start(self, kind: str, namespace: str, name: str, *, pod: str = "") -> subprocess.Popen[bytes]:
        """Start the container of a workload. `pod`: the pod's name; left out: the workload's."""
        template = self._cluster.get(kind, name, f"--namespace={namespace}")["spec"]["template"]["spec"]
        (container,) = template["containers"]
        fields = {"spec.nodeName": NODE, "metadata.name": pod or name}
        environment = {
            each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in container.get("env", [])
        }
        for mount in container.get("volumeMounts", []):
            if mount["name"] == "config":
                environment["OUTFITTER_CONFIG"] = str(self._config(pod or name, mount["subPath"]))
        command = [*OUTFITTER, *map(self._localized, container["args"])]
        environment = {key: self._localized(value) for key, value in environment.items()}
        log = self._folder / f"{pod or name}.log"
        return start_program(self._ends, log, command, environment | {"PATH": os.environ["PATH"]})

    def logs(self) -> str:
        """What all of them have printed."""
        return "".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self._folder.glob("*.log")))

    def _config(self, pod: str, key: str) -> Path:
        """The trial's configuration, as its ConfigMap has it: the API server knows its name with a hash."""
        maps = self._cluster.get("configmap", "--namespace=outfitter-host")["items"]
        (content,) = (each["data"][key] for each in maps if key in each["data"] and BROKER in each["data"][key])
        path = self._folder / f"{pod}-{key}"
        path.write_text(self._localized(content))
        return path

    def _localized(self, text: str) -> str:
        """A setting with this machine's addresses and files."""
        text = text.replace(BROKER, self._broker).replace("/etc/outfitter-api/token", f"{self._folder}/token")
        for port, ours in self.ports.items():
            text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{ours}")
        return text


def test_the_trial_runs_to_the_first_grant_and_the_first_alarm(
    cluster: Cluster, own_broker: Broker, tmp_path: Path
) -> None:
    for overlay in "host", "trial":
        cluster.apply(rendered(overlay))
    token = secrets.token_hex(32)
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    with PodProcesses(cluster, tmp_path, own_broker.bootstrap) as pods:

        def items(page: str) -> list[dict[str, Any]]:
            """A page's items, as the console asks for them."""
            answered = answer(f"{pods.url(9478)}/api/v1/{page}", token=token)
            return json.loads(answered.body)["items"] if answered.status == 200 else []

        def workers(state: str) -> list[str]:
            return [each["worker"] for each in items(f"workers?state={state}")]

        def two_and_one() -> tuple[list[str], list[str]] | None:
            """Who has a device, and who waits for one."""
            granted, waiting = workers("allocated"), workers("pending")
            return (granted, waiting) if (len(granted), len(waiting)) == (2, 1) else None

        topics_job = pods.start("job", "outfitter-trial", "topics")
        until(lambda: topics_job.poll() is not None, pods.logs)
        assert topics_job.returncode == 0, pods.logs()
        pods.start("daemonset", "outfitter-host", "outfitter")
        pods.start("deployment", "outfitter", "outfitter-api")
        running = {
            name: pods.start("deployment", "outfitter-trial", "worker", pod=name)
            for name in ("worker-1", "worker-2", "worker-3")
        }
        for port in pods.ports:
            until(lambda port=port: answer(f"{pods.url(port)}/readyz").status == 200, pods.logs)
        (first, _), (waiting,) = until(two_and_one, pods.logs)
        until(lambda: answer(f"{pods.url(9478)}/").status == 200, pods.logs)
        running[first].terminate()
        until(lambda: waiting in workers("allocated"), pods.logs)

        jobs = {"outfitter": pods.url(9477)}
        with prometheus.running(tmp_path / "prometheus", prometheus.rules_without_delay(tmp_path), jobs) as server:
            server.wait_for(lambda: server.query("outfitter_ready == 1"), "a scrape of the manager")
            assert "OutfitterDeadLetters" not in server.firing()
            anyio.run(send_nonsense, own_broker.url)
            server.wait_for(lambda: "OutfitterDeadLetters" in server.firing(), "the alarm")
            (letter,) = until(lambda: items("dead-letters"), pods.logs)
            assert letter["writer"] == f"host/{NODE}"


async def send_nonsense(bus: str) -> None:
    """A message to the node's manager that it cannot obey."""
    async with connect(bus) as connection:
        partitions = await topics.partition_count(connection, "outfitter")
        assert partitions is not None
        message = Entry(NODE.encode(), b"nonsense")
        await connection.publish(names.topics("outfitter").registrations, partition_of(NODE, partitions), message)

"""deploy/compose without an engine: what its services run, at their own addresses, as far as that goes.

Each service has a loopback address of its own, which stands for its container's. So commands and files are taken from
the compose file as they are; only "all addresses" becomes that one. Outfitter's services run in the image. Kafka and
Prometheus run with the files and settings of their services, from Maven's jars and Debian's package. Grafana cannot be
had here.
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from support.containers import Container, Image, Mount, answer, program
from support.documents import ROOT, shell_lines
from support.kafka.broker import Broker
from support.polling import until

FOLDER = ROOT / "deploy" / "compose"
SERVICES: dict[str, dict[str, Any]] = YAML(typ="safe").load(FOLDER / "compose.yaml")["services"]
TOOLS = {
    "/opt/kafka/bin/kafka-topics.sh": str(ROOT / "deploy" / "kafka" / "bin" / "topics"),
    "/opt/kafka/bin/kafka-console-producer.sh": str(ROOT / "deploy" / "kafka" / "bin" / "console-producer"),
}
EVERYWHERE = "0.0.0.0"  # noqa: S104  (what a container's own network makes harmless)


class Stage:
    """The services of the compose file. Those that run are ended with it."""

    def __init__(self, image: Image, folder: Path) -> None:
        self.folder = folder
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(SERVICES, 2)}
        self.hosts = folder / "hosts"
        self.hosts.write_text("".join(f"{address} {name}\n" for name, address in self.addresses.items()))
        self.compose = folder / "deploy" / "compose"
        self.managers: list[Container] = []
        self.workers: dict[tuple[str, int], Container] = {}
        self._image = image
        self._ends = ExitStack()

    def __enter__(self) -> Stage:
        for name in "compose", "prometheus":
            shutil.copytree(ROOT / "deploy" / name, self.folder / "deploy" / name)
        subprocess.run(["chmod", "-R", "a+rX", self.folder / "deploy"], check=True)  # whatever the checkout's umask was
        subprocess.run([self.compose / "new-token"], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def token(self) -> str:
        """What `new-token` has written."""
        return (self.compose / "secrets" / "api-token").read_text()

    def url(self, service: str, path: str) -> str:
        """An address of a service, at the port that it publishes or that its manager has."""
        published = SERVICES[service].get("ports", ["127.0.0.1:9477:9477"])
        return f"http://{self.addresses[service]}:{published[0].rpartition(':')[2]}{path}"

    def mounts(self, service: str) -> list[Mount]:
        """The files of this machine that a service sees, and its secrets."""
        mounts = [Mount(self.hosts, "/etc/hosts")]
        for volume in SERVICES[service].get("volumes", []):
            source, target, *mode = volume.split(":")
            if source.startswith("."):
                assert mode == ["ro"], volume
                mounts.append(Mount(self.compose / source, target))
        secret_names = SERVICES[service].get("secrets", [])
        return mounts + [Mount(self.compose / "secrets" / name, f"/run/secrets/{name}") for name in secret_names]

    def own_address(self, service: str, command: list[str]) -> list[str]:
        """`command` with the service's address for all addresses."""
        return [part.replace(EVERYWHERE, self.addresses[service]) for part in command]

    def start(self, service: str, number: int = 1, *, command: list[str] | None = None) -> Container:
        """One container of a service of ours, or `command` in one more."""
        settings = SERVICES[service]
        inside = self._image.within(
            self.own_address(service, settings["command"] if command is None else command),
            entrypoint=None if command is None else [],
            environment=settings["environment"],
            mounts=self.mounts(service),
            own_pids="pid" not in settings,
        )
        container = Container(inside, self.folder / f"{service}-{number}{'-command' if command else ''}.log")
        self._ends.callback(container.kill9)
        return container

    def restart_workers(self) -> None:
        """Start those that do not run, as compose does: each ends after a while."""
        for service in "workers-1", "workers-2":
            assert SERVICES[service]["restart"] == "always"
            for number in range(1, SERVICES[service]["deploy"]["replicas"] + 1):
                worker = self.workers.get((service, number))
                if worker is None or not worker.running:
                    self.workers[service, number] = self.start(service, number)

    def is_healthy(self, service: str) -> bool:
        """What the service's health check says."""
        kind, *command = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD"
        own = [part.replace("127.0.0.1", self.addresses[service]) for part in command]
        return self.start(service, command=own).wait() == 0

    def start_kafka(self) -> None:
        """The broker with its service's settings, in its own data folder."""
        environment = SERVICES["kafka"]["environment"]
        settings = {
            name.removeprefix("KAFKA_").replace("_", ".").lower(): value
            for name, value in environment.items()
            if name.startswith("KAFKA_") and name not in {"KAFKA_HEAP_OPTS", "KAFKA_LOG_DIRS"}
        }
        heap = environment["KAFKA_HEAP_OPTS"].removeprefix("-Xmx")
        broker = Broker(self.folder / "kafka", settings, options=["--heap", heap], within=self.on_this_machine())
        broker.bootstrap = f"{self.addresses['kafka']}:9092"
        self._ends.callback(broker.stop)
        broker.start()

    def run_kafka_tool(self, command: list[str], said: str = "") -> int:
        """Run one of Kafka's tools as in its container; return the exit code."""
        name, *arguments = command
        return subprocess.run([*self.on_this_machine(), TOOLS[name], *arguments], input=said, text=True).returncode

    def on_this_machine(self) -> list[str]:
        """What precedes a command of this machine, so that it knows the services by their names."""
        mount = Mount(self.hosts, "/etc/hosts").arguments()
        return [program("bwrap"), "--dev-bind", "/", "/", *mount, "--die-with-parent", "--"]

    def start_prometheus(self) -> Container:
        """Debian's Prometheus with the files and the command of its service."""
        (self.folder / "prometheus-data").mkdir()
        mounts = [*self.mounts("prometheus"), Mount(self.folder / "prometheus-data", "/prometheus", writable=True)]
        command = [
            program("bwrap"), "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev",
            "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
            "--ro-bind", program("prometheus"), "/opt/prometheus",
            *(argument for mount in mounts for argument in mount.arguments()), "--die-with-parent", "--",
            "/opt/prometheus", *SERVICES["prometheus"]["command"],
            f"--web.listen-address={self.addresses['prometheus']}:9090",
        ]  # fmt: skip
        container = Container(command, self.folder / "prometheus.log")
        self._ends.callback(container.kill9)
        return container


pytestmark = [pytest.mark.image, pytest.mark.timeout(400)]

NETWORK = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
"""No other run's, in all likelihood."""


@pytest.fixture(scope="module")
def stage(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """All services, started in the order that they depend on each other."""
    with Stage(image, tmp_path_factory.mktemp("compose")) as stage:
        stage.start_kafka()
        assert stage.run_kafka_tool(SERVICES["kafka"]["healthcheck"]["test"][1:]) == 0
        topics = stage.start("topics")
        assert topics.wait() == 0, topics.output()
        stage.managers = [stage.start(name) for name in ("manager-1", "manager-2")]
        for name, manager in zip(("manager-1", "manager-2"), stage.managers, strict=True):
            until(lambda name=name: stage.is_healthy(name), manager.output)
        stage.restart_workers()
        stage.api = stage.start("api")
        stage.prometheus = stage.start_prometheus()
        yield stage


def page(stage: Stage, path: str) -> Any:
    """A page of the API, asked with the token."""
    got = answer(stage.url("api", path), token=stage.token)
    return json.loads(got.body) if got.status == 200 else None


def query(stage: Stage, path: str) -> Any:
    """What Prometheus answers."""
    got = answer(stage.url("prometheus", path))
    return json.loads(got.body)["data"] if got.status == 200 else None


def records(stage: Stage, state: str) -> list[dict[str, Any]]:
    """The records of the workers in a state."""
    return (page(stage, f"/api/v1/allocations?state={state}") or {"items": []})["items"]


def test_each_gpu_is_held_and_the_others_wait(stage: Stage) -> None:
    def busy() -> bool:
        stage.restart_workers()
        held = Counter(record["host"] for record in records(stage, "allocated"))
        waiting = Counter(record["host"] for record in records(stage, "pending"))
        return held == {"gpu-1": 2, "gpu-2": 2} and waiting == {"gpu-1": 1, "gpu-2": 1}

    until(busy, stage.api.output)


def test_the_api_answers_nobody_without_the_token_and_the_console_asks_for_it(stage: Stage) -> None:
    until(lambda: page(stage, "/api/v1/status"), stage.api.output)
    for path in "/api/v1/status", "/api/v1/hosts", "/api/v1/events":
        assert answer(stage.url("api", path)).status == 401
        assert answer(stage.url("api", path), token=secrets.token_hex(32)).status == 401
    assert answer(stage.url("api", "/")).status == 200


def test_a_worker_that_is_killed_gives_its_gpu_back_at_once(stage: Stage) -> None:
    """The lease would do it, too, but for another reason: the machine's container shows the worker to its manager."""

    def holder() -> Container | None:
        stage.restart_workers()
        running = {worker.pid: worker for worker in stage.workers.values()}
        owners = [
            record["request"]["owner"]["pid"] for record in records(stage, "allocated") if record["host"] == "gpu-1"
        ]
        return next((running[pid] for pid in owners if pid in running), None)

    until(holder, stage.api.output).kill9()
    released = 'outfitter_releases_total{reason="owner-died"} 1.0'
    until(lambda: released in answer(stage.url("manager-1", "/metrics")).body, stage.managers[0].output)


def test_a_manager_that_stops_ends_with_0_and_its_workers_keep_what_they_have(stage: Stage) -> None:
    until(lambda: [r for r in records(stage, "allocated") if r["host"] == "gpu-2"] or stage.restart_workers(), str)
    assert stage.managers[1].stop() == 0, stage.managers[1].output()
    assert [record for record in records(stage, "allocated") if record["host"] == "gpu-2"] != []
    stage.managers[1] = stage.start("manager-2")
    until(lambda: stage.is_healthy("manager-2"), stage.managers[1].output)


def test_prometheus_reaches_both_managers_and_the_api_and_each_rule_has_been_evaluated(stage: Stage) -> None:
    def up() -> bool:
        active = (query(stage, "/api/v1/targets") or {"activeTargets": []})["activeTargets"]
        instances = sorted(target["labels"]["instance"] for target in active if target["health"] == "up")
        return instances == ["api:9478", "manager-1:9477", "manager-2:9477"]

    until(up, stage.prometheus.output)

    def healthy() -> bool:
        rules = [rule for group in query(stage, "/api/v1/rules")["groups"] for rule in group["rules"]]
        return all(rule["health"] == "ok" for rule in rules)

    until(healthy, stage.prometheus.output)


def alarming() -> list[str]:
    """The command on the page that sends a message which nobody can obey."""
    (line,) = (line for line in shell_lines(FOLDER / "README.md") if "nonsense" in line)
    words = shlex.split(line)
    return words[words.index("kafka") + 1 :]


def test_a_message_that_nobody_can_obey_raises_the_first_alarm(stage: Stage) -> None:
    assert stage.run_kafka_tool(alarming(), "gpu-1|nonsense\n") == 0

    def firing() -> bool:
        alerts = query(stage, "/api/v1/alerts")["alerts"]
        return any(a["labels"]["alertname"] == "OutfitterDeadLetters" and a["state"] == "firing" for a in alerts)

    until(firing, stage.prometheus.output)


def test_the_api_ends_with_0(stage: Stage) -> None:
    assert stage.api.stop() == 0, stage.api.output()
    stage.api = stage.start("api")

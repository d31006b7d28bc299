"""What the example of each Python framework must do: its parallel workers hold disjoint devices, and give them back
however they end.

A module of tests has a class that inherits `FrameworkContract`. Every worker prints `process PID has DEVICE` once, and
`scored NUMBER on DEVICE` for each number.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from support.clusters.programs import Programs, virtual_environment
from support.documents import ROOT
from support.kafka.broker import KafkaBroker
from support.managers.process import Manager, StartManager
from support.processes.ending import wait_until_ended
from support.processes.worker_program import WorkerProgram

_HAS = re.compile(r"(\d+) has (GPU-\d+)")

GPUS = 2


def environment_of(name: str) -> Path:
    """A virtual environment with what the example asks for, and with Outfitter."""
    requirements = (ROOT / "examples" / name / "requirements.txt").read_text().split()
    return virtual_environment(name, requirements, with_outfitter=True)


def numbers_topic(broker: KafkaBroker) -> Mapping[str, str]:
    """Make a topic of numbers with a partition for each worker; return the variables that lead an example to it."""
    topic = f"numbers-{broker.new_cluster()}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for made in admin.create_topics([NewTopic(topic, GPUS, 1)], operation_timeout=10).values():
        made.result(30)
    return {"KAFKA": broker.bootstrap, "NUMBERS": topic}


def publish(variables: Mapping[str, str], numbers: Iterable[object]) -> None:
    """Send numbers to the topic of `numbers_topic`, to its partitions in turn."""
    producer = Producer({"bootstrap.servers": variables["KAFKA"]})
    for place, number in enumerate(numbers):
        producer.produce(variables["NUMBERS"], str(number), partition=place % GPUS)
    assert producer.flush(30) == 0


class Workers:
    """An example at work: one program that has all workers, or one program for each of them."""

    def __init__(
        self, manager: Manager, programs: Programs, command: Sequence[str], variables: Mapping[str, str], each: bool
    ) -> None:
        self._programs = programs
        self._command = command
        self.variables = {**manager.environment, **variables}
        self.manager = manager
        self.folder = programs.folder
        self.running: list[WorkerProgram] = []
        self.each_is_a_program = each
        for _ in range(GPUS if each else 1):
            self.start()

    def start(self) -> None:
        """Start one more program."""
        self.running.append(self._programs.start(self._command, self.variables))

    def output(self) -> list[str]:
        """The lines of all programs, of each program in their order."""
        return [line for program in self.running for line in program.output().splitlines()]

    def holders(self) -> dict[str, int]:
        """The process that said last that it has the device, for each device. Two may write into one line at once."""
        said = _HAS.findall("\n".join(self.output()))
        return {device: int(process) for process, device in said}

    def ledger(self) -> list[tuple[str, int]]:
        """Each device that the ledger gives to somebody, and the process whose life it is tied to."""
        return sorted(
            (info["id"], record["request"]["owner"]["pid"])
            for record in self.manager.records()
            if record["state"] == "allocated"
            for info in record["resources"]["gpu"]
        )

    def wait_until_both_hold(self) -> dict[str, int]:
        """Block until each device has a worker, by the workers' own words and by the ledger's."""
        self.wait_for(
            lambda: len(self.holders()) == GPUS and self.ledger() == sorted(self.holders().items()),
            f"a worker of each of {GPUS} devices, of which both sides say the same",
        )
        return self.holders()

    def scored(self, device: str) -> int:
        return sum(line.rstrip().endswith(f" on {device}") and "scored " in line for line in self.output())

    def end(self) -> None:
        """Tell all programs to end as their framework does normally, and block until they have."""
        for program in self.running:
            if program.is_running():
                program.signal(signal.SIGTERM)
        for program in self.running:
            program.wait()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        self._programs.wait_for(condition, what)


@pytest.mark.timeout(600)
class FrameworkContract:
    """The promises. `name`: the folder of the example. `command`: what runs it, after the environment's `bin`."""

    name: str
    command: Sequence[str]
    each_is_a_program = True
    """Whether the test starts one program for each worker, or one that starts all of them."""

    @pytest.fixture
    def environment(self) -> Path:
        return environment_of(self.name)

    @pytest.fixture
    def variables(self) -> Mapping[str, str]:
        """Environment variables of the example."""
        return {}

    @pytest.fixture
    def workers(
        self, environment: Path, start_manager: StartManager, variables: Mapping[str, str], tmp_path: Path
    ) -> Iterator[Workers]:
        manager = start_manager(gpus=GPUS)
        program, *arguments = self.command
        folder = tmp_path / self.name
        folder.mkdir()
        (folder / "worker.py").write_bytes((ROOT / "examples" / self.name / "worker.py").read_bytes())
        with Programs(folder) as programs:
            command = [str(environment / "bin" / program), *arguments]
            found = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", **variables}
            workers = Workers(manager, programs, command, found, self.each_is_a_program)
            yield workers

    def send(self, workers: Workers, environment: Path, numbers: range) -> None:
        """Give the workers numbers to score. Here: they have some anyway."""

    def wait_until_scored(self, workers: Workers, environment: Path, device: str) -> None:
        """Block until a number that is sent from now on was scored on the device."""
        before = workers.scored(device)
        sent = itertools.count(step=20)

        def is_scored() -> bool:
            first = next(sent)
            self.send(workers, environment, range(first, first + 20))
            return workers.scored(device) > before

        workers.wait_for(is_scored, f"a number scored on {device}")

    def test_parallel_workers_compute_on_different_devices_until_their_normal_end(
        self, workers: Workers, environment: Path
    ) -> None:
        holders = workers.wait_until_both_hold()
        assert len(set(holders.values())) == GPUS
        for device in holders:
            self.wait_until_scored(workers, environment, device)
        workers.end()
        assert workers.ledger() == []
        assert {record["reason_code"] for record in workers.manager.records()} == {"deregistered"}

    def test_a_killed_worker_loses_its_device_to_its_replacement(self, workers: Workers, environment: Path) -> None:
        holders = workers.wait_until_both_hold()
        for device in holders:  # a framework may give up if a worker dies before it has begun
            self.wait_until_scored(workers, environment, device)
        killed = holders["GPU-0"]
        os.kill(killed, signal.SIGKILL)
        wait_until_ended(killed)
        if workers.each_is_a_program:
            workers.start()
        workers.wait_for(lambda: workers.holders()["GPU-0"] != killed, "a replacement")
        after = workers.wait_until_both_hold()
        assert after["GPU-1"] == holders["GPU-1"]
        ended = [record for record in workers.manager.records() if record["request"]["owner"]["pid"] == killed]
        assert [(record["state"], record["reason_code"]) for record in ended] == [("ended", "owner-died")]
        self.wait_until_scored(workers, environment, "GPU-0")

    def test_a_manager_that_is_killed_and_comes_back_changes_nothing(self, workers: Workers, environment: Path) -> None:
        holders = workers.wait_until_both_hold()
        workers.manager.kill9()
        for device in holders:
            self.wait_until_scored(workers, environment, device)
        workers.manager.start()
        assert workers.wait_until_both_hold() == holders
        for device in holders:
            self.wait_until_scored(workers, environment, device)


class PoolContract(FrameworkContract):
    """The same for a program that has all workers, as processes of its own."""

    each_is_a_program = False

    def test_the_workers_of_a_killed_parent_end_and_give_their_devices_back(
        self, workers: Workers, environment: Path
    ) -> None:
        holders = workers.wait_until_both_hold()
        for device in holders:
            self.wait_until_scored(workers, environment, device)
        (parent,) = workers.running
        assert parent.pid not in holders.values()
        parent.signal(signal.SIGKILL)
        wait_until_ended(*holders.values())
        workers.wait_for(lambda: workers.ledger() == [], "two free devices")
        assert {record["reason_code"] for record in workers.manager.records()} <= {"deregistered", "owner-died"}


@pytest.mark.kafka
class KafkaFrameworkContract(FrameworkContract):
    """The same for consumers of a topic of Kafka: each of two workers has one partition of it."""

    @pytest.fixture
    def variables(self, kafka_broker: KafkaBroker) -> Mapping[str, str]:
        return numbers_topic(kafka_broker)

    def send(self, workers: Workers, environment: Path, numbers: range) -> None:
        publish(workers.variables, numbers)

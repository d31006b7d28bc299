"""What each example of a worker in another language must do, on a real broker and with a real manager.

A module of tests has the fixture `program` and a class that inherits `WorkerContract`.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

from support.documents import ROOT
from support.kafka.broker import Broker
from support.managers.process import Manager, serving_on
from support.processes.tools import run_tool
from support.processes.worker_program import WorkerProgram

RUNNERS = Path(__file__).parent / "vectors"
"""Of the vectors, in each language."""

BUILDS = ROOT / ".cache" / "examples"


class Program(NamedTuple):
    """An example that is ready to run: `command` in `folder`, before the arguments of every example.

    `lease_s`: a lease that is long for its heartbeats, and short to wait for.
    """

    folder: Path
    command: Sequence[str]
    lease_s: float = 6.0


def built(language: str, commands: Sequence[Sequence[str]], *, also: Sequence[Path] = ()) -> Path:
    """A copy of examples/`language` in which all `commands` have run, once for each state of its files.

    `also`: further files to copy into it. If a tool is missing or a command fails, the test fails and says so.
    """
    sources = [*sorted(path for path in (ROOT / "examples" / language).iterdir() if path.is_file()), *also]
    mark = sha256(b"".join(path.name.encode() + path.read_bytes() for path in sources) + repr(commands).encode())
    folder = BUILDS / f"{language}-{mark.hexdigest()[:12]}"
    if (folder / ".built").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sources:
        shutil.copy(path, folder)
    for command in commands:
        run_tool(command, folder)
    (folder / ".built").touch()
    return folder


def vectors() -> tuple[Path, int]:
    """The folder of proto/conformance, and how many checks its words, leases and partitions make for a program that
    never registers again."""
    folder = ROOT / "proto" / "conformance"
    files = {path.stem: json.loads(path.read_text())["vectors"] for path in folder.iterdir()}
    steps = [vector["records"] for vector in files["sequences"] if "only" not in vector]
    steps += [vector["steps"] for vector in files["leases"]]
    return folder, len(files["records"]) + sum(map(len, steps)) + len(files["partitions"])


@pytest.mark.kafka
@pytest.mark.timeout(600)
class WorkerContract:
    """The promises. A subclass stands in a module with the fixture `program`."""

    def worker(
        self,
        program: Program,
        manager: Manager,
        name: str,
        *,
        resource: str = "gpu=1",
        lease_s: float | None = None,
        where: str | None = None,
    ) -> WorkerProgram:
        """The example as the worker `name` of the manager's host."""
        bootstrap = manager.bus_url.removeprefix("kafka://")
        arguments = [bootstrap, manager.host, name, resource, f"{lease_s or program.lease_s:g}"]
        variables = manager.environment | ({"WHERE": where} if where else {})
        return WorkerProgram([*program.command, *arguments], folder=program.folder, variables=variables)

    def test_it_has_a_device_that_nobody_else_has_until_it_is_told_to_end(
        self, program: Program, one_gpu: Manager
    ) -> None:
        with self.worker(program, one_gpu, "first") as first, self.worker(program, one_gpu, "second") as second:
            # whichever of the two is first
            one_gpu.wait_for(lambda: len(first.lines("yours") + second.lines("yours")) == 1)
            holder, waiter = (first, second) if first.lines("yours") else (second, first)
            (device,) = json.loads(holder.lines("yours")[0][len("yours ") :])["gpu"]
            assert device["id"] == "GPU-0"
            waiter.wait_for("waiting")
            assert waiter.lines("yours") == []
            holder.signal(signal.SIGTERM)
            assert holder.wait() == 0
            waiter.wait_for("yours")
            waiter.signal(signal.SIGINT)
            assert waiter.wait() == 0
        for name in ("first", "second"):
            assert one_gpu.wait_for_state(name, "ended")["reason_code"] == "deregistered"

    def test_killed_it_loses_its_device_at_the_end_of_its_lease(self, program: Program, one_gpu: Manager) -> None:
        with self.worker(program, one_gpu, "killed") as worker:
            worker.wait_for("yours")
            worker.kill()
        assert one_gpu.wait_for_state("killed", "ended", timeout=60)["reason_code"] == "lease-expired"

    def test_heartbeats_keep_its_device_for_longer_than_a_lease(self, program: Program, one_gpu: Manager) -> None:
        with self.worker(program, one_gpu, "talking") as talking:
            talking.wait_for("yours")
            # one that falls silent later, and waits behind it with the same lease
            with self.worker(program, one_gpu, "silent") as silent:
                silent.wait_for("waiting")
                silent.kill()
            ended = one_gpu.wait_for_state("silent", "ended", timeout=60)
            assert ended["reason_code"] in {"lease-expired", "withdrawn"}
            record = one_gpu.record("talking")
            assert record is not None
            assert record["state"] == "allocated"
            assert record["request"]["lease_s"] == program.lease_s
            talking.signal(signal.SIGTERM)
            assert talking.wait() == 0
        one_gpu.wait_for_state("talking", "ended")

    def test_whatever_it_cannot_have_it_is_told_and_ends_with_1(self, program: Program, one_gpu: Manager) -> None:
        with self.worker(program, one_gpu, "wrong", resource="fpga=1") as worker:
            assert "fpga" in worker.wait_for("failed")
            assert worker.wait() == 1

    def test_it_gets_only_devices_that_it_chooses(self, program: Program, one_gpu: Manager) -> None:
        for where, word in (('{"id": "GPU-*"}', "yours"), ('{"id": {"not": "GPU-0"}}', "failed")):
            with self.worker(program, one_gpu, "choosy", where=where) as worker:
                worker.wait_for(word)
                worker.signal(signal.SIGTERM)
                worker.wait()
            assert one_gpu.record("choosy")["request"]["choices"], "the manager knows it"

    def test_it_stops_when_its_allocation_is_over(self, program: Program, one_gpu: Manager) -> None:
        with self.worker(program, one_gpu, "sent-away", lease_s=60) as worker:
            worker.wait_for("yours")
            assert one_gpu.outfitter("deregister", "--worker", "sent-away").returncode == 0
            worker.wait_for("over")
            assert worker.wait() == 1

    def test_it_stops_when_no_heartbeat_was_acknowledged_for_a_whole_lease(
        self, program: Program, own_broker: Broker, tmp_path: Path
    ) -> None:
        with (
            serving_on(own_broker, tmp_path / "manager") as manager,
            self.worker(program, manager, "cut-off") as worker,
        ):
            worker.wait_for("yours")
            own_broker.pause()
            worker.wait_for("lost")
            assert worker.wait() == 1
            own_broker.resume()

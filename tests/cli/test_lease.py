"""`outfitter-lease` as Flink and Spark call it: a process reads one line and takes the devices for its own."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, NoReturn

import anyio
import psutil
import pytest

from outfitter_service.cli._lib.holding.leasing import LeaseRequest, Leasing, missing, seconds_running, worker_name
from outfitter_service.cli._lib.holding.owner import OwnerProcess
from outfitter_service.config import BusConnection
from outfitter_service.query.errors import OutfitterCliError
from support.api import allocation
from support.kafka.broker import KafkaBroker
from support.managers.process import OUTFITTER, Manager, StartManager, add_device, serving_on
from support.processes.owners import owner_of
from support.processes.standard_error import MUTE, mute, redirected

pytestmark = pytest.mark.slow

SCRIPT, SPARKS = (str(Path(sys.executable).parent / name) for name in ("outfitter-lease", "outfitter-lease-spark"))
PATIENCE = 90.0
PATIENT = {"OUTFITTER_LEASE_WAIT": "60s"}
"""For callers whose devices are free: on a busy machine an answer may take longer than the 8 s of the default."""
APART = (
    "unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--pid", "--fork", "--kill-child",
    "--mount-proc",
)  # fmt: skip
CALLER = """
import json, subprocess, sys
for line in sys.stdin:
    done = subprocess.run(json.loads(line), stdin=subprocess.PIPE, capture_output=True, text=True)
    print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)
"""
"""Runs a command, given as a list, for each line of its input. It ends with its input."""


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class Caller:
    """A process that calls discovery scripts."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def begin(self, *command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Answer:
        assert self.process.stdout is not None
        return Answer(*json.loads(self.process.stdout.readline()))

    def has_answered(self) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def call(self, *command: str) -> Answer:
        self.begin(*command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)


@contextlib.contextmanager
def caller(manager: Manager, *before: str, **variables: str) -> Iterator[Caller]:
    """`before` starts the process; `variables` are in its environment."""
    with subprocess.Popen(
        [*before, sys.executable, "-c", CALLER], env=manager.environment | PATIENT | variables, cwd=manager.folder,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield Caller(process)
        finally:
            process.kill()


def live(manager: Manager) -> list[str]:
    """The states of the allocations that are not over."""
    return [record["state"] for record in manager.records() if record["state"] not in ("ended", "failed")]


def free(manager: Manager) -> bool:
    return not live(manager)


def one_line(answer: Answer, words: str) -> None:
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("outfitter-lease: ")
    assert words in answer.err
    assert len(answer.err.splitlines()) == 1


class StuckScript(NamedTuple):
    """A script that has devices and cannot print them: nobody reads."""

    process: subprocess.Popen[bytes]
    reader: io.FileIO

    def give_up(self) -> None:
        """Close its standard output, so that it gives the devices back and ends."""
        self.reader.close()
        assert self.process.wait(PATIENCE) == 1


@contextlib.contextmanager
def stuck_script(manager: Manager, owner: Caller) -> Iterator[StuckScript]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, bytes(4096)):
            pass
    os.set_blocking(writer, True)
    command = [SCRIPT, "1", "--wait", "60s", "--owner-pid", str(owner.process.pid)]
    with (
        io.FileIO(reader) as output,
        subprocess.Popen(command, env=manager.environment, stdout=writer, stderr=subprocess.DEVNULL) as process,
    ):
        os.close(writer)
        try:
            manager.wait_for(lambda: live(manager) == ["allocated"])
            yield StuckScript(process, output)
        finally:
            process.kill()


def awaits_its_turn(owner: Caller) -> bool:
    """Whether a script that the owner has called holds the owner's directory open."""
    own = f"/proc/{owner.process.pid}/fd"
    with contextlib.suppress(OSError):  # a script ends, or closes a file, meanwhile
        scripts = psutil.Process(owner.process.pid).children()
        return any(own in map(os.readlink, Path(f"/proc/{script.pid}/fd").iterdir()) for script in scripts)
    return False


# --- what it prints --------------------------------------------------------------------------------------


def test_flink_reads_indexes_on_one_line(manager: Manager) -> None:
    with caller(manager) as flink:
        assert flink.call(SCRIPT, "2", "null", "--wait", "60s") == (0, "0,1\n", "")
        (record,) = manager.records()
        assert record["request"]["owner"]["pid"] == flink.process.pid
        assert record["request"]["lease_s"] == 30.0


def test_spark_reads_json_and_configures_by_the_environment(manager: Manager) -> None:
    with caller(manager, OUTFITTER_LEASE_AMOUNT="2", OUTFITTER_LEASE_PROPERTY="id") as spark:
        assert spark.call(SPARKS) == (0, '{"name":"gpu","addresses":["GPU-0","GPU-1"]}\n', "")
    with caller(manager) as spark:
        manager.wait_for(lambda: free(manager))
        assert spark.call(SPARKS).out == '{"name":"gpu","addresses":["0"]}\n'


def test_a_value_that_flink_would_take_for_two_is_refused(start_manager: StartManager) -> None:
    manager = start_manager(gpus=0)
    add_device(manager.folder / "gpus", 0, model="a,b")
    with caller(manager) as flink:
        one_line(flink.call(SCRIPT, "1", "--property", "model"), "cannot stand in a line")
        manager.wait_for(lambda: free(manager))
        assert flink.call(SCRIPT, "1", "--property", "model", "--spark").out == '{"name":"gpu","addresses":["a,b"]}\n'


# --- who has what ----------------------------------------------------------------------------------------


def test_two_callers_get_disjoint_devices_and_the_death_of_one_frees_its_own(manager: Manager) -> None:
    with caller(manager) as first, caller(manager) as second, caller(manager) as third:
        outputs = {first.call(SCRIPT, "1").out, second.call(SCRIPT, "1").out}
        assert outputs == {"0\n", "1\n"}
        third.begin(SCRIPT, "1")
        manager.wait_for(lambda: "pending" in live(manager))
        first.kill()
        assert third.answer().code == 0
        assert live(manager) == ["allocated", "allocated"]


def test_the_caller_keeps_the_devices_without_heartbeats(start_manager: StartManager) -> None:
    manager = start_manager(gpus=2, extra='lease = "1s"')
    with caller(manager) as flink:
        assert flink.call(SCRIPT, "1").code == 0
        manager.outfitter("register", "--worker", "silent")
        assert manager.wait_for_state("silent", "ended")["reason_code"] == "lease-expired"
        assert live(manager) == ["allocated"]


def test_a_caller_that_a_manager_in_another_namespace_cannot_see_keeps_its_devices(start_manager: StartManager) -> None:
    """As if the manager's container had been made anew. Sparks' script is the same program."""
    first = start_manager(gpus=1, extra='lease = "1s"\nlease-grace = "0s"')
    with caller(first) as owner:
        assert owner.call(SCRIPT, "1").code == 0
        [worker] = [record["worker"] for record in first.records()]
        first.kill9()
        apart = Manager(first.folder, first.config.read_text(), host=first.host, program=[*APART, *OUTFITTER])
        apart.start()
        try:
            assert apart.outfitter("register", "--worker", "next", "--lease", "none").returncode == 0
            for silent in ("silent", "after"):
                registered = apart.outfitter("register", "--worker", silent, "--resource", "gpu=1", "--lease", "500ms")
                assert registered.returncode == 0
                assert apart.wait_for_state(silent, "ended")["reason_code"] == "lease-expired"
            assert apart.wait_for_state(worker, "allocated")
            assert apart.wait_for_state("next", "pending")
            words = "is out of the manager's sight, and nobody sends heartbeats for it"
            assert words in apart.outfitter("status").stdout
            explained = apart.outfitter("explain", worker).stdout
            assert f"process {owner.process.pid} {words}" in explained
            [command] = re.findall("If that process has ended: `(.*)`", explained)
            apart.wait_for(lambda: "workers that send no heartbeats keep their devices" in apart.log_tail())
            assert apart.outfitter(*shlex.split(command)[1:]).returncode == 0
            assert apart.wait_for_state(worker, "ended")["reason_code"] == "deregistered"
            apart.wait_for_state("next", "allocated")
        finally:
            apart.kill9()


def test_a_repeated_call_of_one_process_prints_the_same_devices(manager: Manager) -> None:
    with caller(manager) as flink:
        assert flink.call(SCRIPT, "1") == flink.call(SCRIPT, "1")
        assert len(manager.records()) == 1


def test_a_call_that_fails_gives_back_nothing_that_an_earlier_one_got(manager: Manager) -> None:
    with caller(manager) as flink:
        assert flink.call(SCRIPT, "1").code == 0
        code, out, err = flink.call(SCRIPT, "1", "--property", "nope")
        assert (code, out) == (1, "")
        assert "has no property 'nope'; it has: id, index" in err
        manager.kill9()
        assert flink.call(SCRIPT, "1", "--wait", "1s").code == 1
        manager.start()
        assert flink.call(SCRIPT, "1").code == 0
        assert [record["state"] for record in manager.records()] == ["allocated"]


def test_a_call_whose_wait_was_too_long_leaves_nothing_and_the_next_one_gets_devices(one_gpu: Manager) -> None:
    with caller(one_gpu) as holder, caller(one_gpu) as flink:
        assert holder.call(SCRIPT, "1").code == 0
        code, out, err = flink.call(SCRIPT, "1", "--wait", "15s")
        assert (code, out) == (1, "")
        assert err.startswith("outfitter-lease: no gpu within 15 s: ")
        assert "0 of 1 free" in err
        one_gpu.wait_for(lambda: live(one_gpu) == ["allocated"])
        holder.kill()
        assert flink.call(SCRIPT, "1").out == "0\n"


def test_a_call_that_was_refused_is_decided_anew_the_next_time(one_gpu: Manager) -> None:
    with caller(one_gpu) as flink:
        one_line(flink.call(SCRIPT, "1", "--resource", "fpga"), "is not configured")
        one_gpu.kill9()
        config = one_gpu.config.read_text()
        one_gpu.config.write_text(config.replace('["gpu"]', '["fpga"]').replace("resource.gpu", "resource.fpga"))
        one_gpu.start()
        assert flink.call(SCRIPT, "1", "--resource", "fpga") == (0, "0\n", "")


def test_names_differ_by_boot_namespace_start_and_request_and_not_by_pid_alone() -> None:
    owner = owner_of(os.getpid())
    changes = [{"boot_id": "other"}, {"pid_ns": 1}, {"start_ticks": 1}]
    names = [worker_name(owner_of(os.getpid(), **change), "gpu", 1) for change in changes]
    names += [worker_name(owner, "gpu", 1), worker_name(owner, "gpu", 2), worker_name(owner, "fpga", 1)]
    assert len(set(names)) == len(names)
    assert worker_name(owner, "gpu", 1) == worker_name(owner_of(os.getpid()), "gpu", 1)


def test_a_call_that_is_given_up_takes_nothing_from_another_one_of_the_same_process(manager: Manager) -> None:
    with caller(manager) as flink, stuck_script(manager, flink) as stuck:
        flink.begin(SCRIPT, "1", "--wait", "60s")
        manager.wait_for(lambda: flink.has_answered() or awaits_its_turn(flink))
        stuck.give_up()
        manager.wait_for(lambda: "ended" in [record["state"] for record in manager.records()])
        assert flink.answer() == (0, "0\n", "")
        assert live(manager) == ["allocated"]


def test_a_call_that_had_no_turn_in_time_says_for_whom_it_waits() -> None:
    async def no_signal(_handle: object) -> NoReturn:
        await anyio.sleep_forever()

    where = BusConnection(bus="sqlite:////nowhere/bus.db", host="h", cluster="c")
    request = LeaseRequest(where, OwnerProcess(os.getpid()), "gpu", 1, seconds_running() + 0.1)
    other = os.open("/proc/self/fd", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.RaisesGroup(
            pytest.RaisesExc(OutfitterCliError, match=f"outfitter-lease for process {os.getpid()}")
        ):
            anyio.run(Leasing(request, print).run, SimpleNamespace(each=no_signal))
    finally:
        os.close(other)


def test_a_call_that_is_killed_leaves_its_turn_and_its_devices_to_the_next_one(manager: Manager) -> None:
    with caller(manager) as flink, stuck_script(manager, flink) as stuck:
        flink.begin(SCRIPT, "1", "--wait", "60s")
        stuck.process.kill()
        assert flink.answer() == (0, "0\n", "")
        assert len(manager.records()) == 1


@pytest.mark.parametrize(
    ("state", "is_kept", "words"),
    [
        ("allocated", False, "granted at the last moment, and are given back: raise --wait"),
        ("allocated", True, "the caller has them from an earlier call, but the manager does not confirm it"),
        ("pending", False, "w: pending, gpu=1: no reason"),
    ],
)
def test_what_came_too_late_is_named(state: str, is_kept: bool, words: str) -> None:
    assert words in missing(allocation("h", "w", state), is_kept=is_kept)


# --- how it ends -----------------------------------------------------------------------------------------


@pytest.fixture
def one_gpu(start_manager: StartManager) -> Manager:
    return start_manager(gpus=1)


def waiting_script(manager: Manager, *arguments: str) -> subprocess.Popen[str]:
    """A script that this process has called and that waits."""
    process = subprocess.Popen(
        [SCRIPT, "1", *arguments], env=manager.environment, cwd=manager.folder, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    manager.wait_for(lambda: "pending" in live(manager))
    return process


@pytest.mark.parametrize(("number", "state"), [(signal.SIGTERM, "ended"), (signal.SIGKILL, "failed")])
def test_killed_while_it_waits_it_leaves_nothing(one_gpu: Manager, number: signal.Signals, state: str) -> None:
    """It must still wait when it is killed, on a busy machine, too. Killed by -9, its record waits to the end."""
    with caller(one_gpu) as holder:
        assert holder.call(SCRIPT, "1").code == 0
        with waiting_script(one_gpu, "--wait", "40s") as script:
            script.send_signal(number)
            script.communicate(timeout=PATIENCE)
        one_gpu.wait_for(lambda: live(one_gpu) == ["allocated"])
        (over,) = [record for record in one_gpu.records() if record["state"] != "allocated"]
        assert over["state"] == state
        assert script.returncode == (128 + number if number == signal.SIGTERM else -number)


def test_a_caller_that_no_longer_reads_gets_nothing(one_gpu: Manager) -> None:
    read, write = os.pipe()
    os.close(read)
    patient = one_gpu.environment | PATIENT
    done = subprocess.run([SCRIPT, "1"], env=patient, stdout=write, stderr=subprocess.PIPE, timeout=PATIENCE)
    os.close(write)
    assert done.returncode == 1
    assert b"standard output takes no more" in done.stderr
    one_gpu.wait_for(lambda: free(one_gpu))
    assert len(one_gpu.records()) == 1


def test_without_a_manager_it_says_so_and_asks_for_nothing_that_a_later_manager_would_grant(one_gpu: Manager) -> None:
    one_gpu.kill9()
    with caller(one_gpu) as flink:
        code, out, err = flink.call(SCRIPT, "1")
        assert (code, out) == (1, "")
        assert "no manager answers for host" in err
        assert len(err.splitlines()) == 1
        one_gpu.start()
        one_gpu.wait_for(one_gpu.records)
        assert one_gpu.records()[0]["state"] == "ended"


# --- what it refuses -------------------------------------------------------------------------------------


def test_a_caller_in_another_pid_namespace_gets_nothing(manager: Manager) -> None:
    with caller(manager, *APART, "sh", "-c", '"$@"; true', "sh") as apart:
        one_line(apart.call(SCRIPT, "1"), "cannot watch process 2 (pid-namespace)")
        manager.wait_for(lambda: free(manager))


def test_a_caller_of_a_manager_of_many_hosts_gets_nothing(start_manager: StartManager) -> None:
    config = (
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "static"\nparam.devices = "a;b"\n'
    )
    manager = start_manager(config, arguments=["--scope", "cluster"], host="many")
    with caller(manager) as flink:
        one_line(flink.call(SCRIPT, "1"), "cannot watch process")
        manager.wait_for(lambda: free(manager))


def test_a_shell_is_no_caller_unless_it_is_replaced(shared_manager: Manager, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f"#!/bin/sh\n{SCRIPT} $1\n")
    wrapper.chmod(0o755)
    with caller(shared_manager) as flink:
        one_line(flink.call(str(wrapper), "1"), "write `exec` before the command")
        wrapper.write_text(f"#!/bin/sh\nexec {SCRIPT} $1\n")
        assert flink.call(str(wrapper), "1") == (0, "0\n", "")
        assert shared_manager.records()[-1]["request"]["owner"]["pid"] == flink.process.pid


def test_without_standard_output_nothing_is_leased(shared_manager: Manager) -> None:
    before = len(shared_manager.records())
    done = subprocess.run(
        redirected([SCRIPT, "1"], ">&-"), env=shared_manager.environment, stderr=subprocess.PIPE, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "standard output is closed" in done.stderr
    assert len(shared_manager.records()) == before


@pytest.mark.parametrize("kind", MUTE)
def test_a_refusal_that_nobody_reads_has_the_same_code(shared_manager: Manager, kind: str) -> None:
    with mute(kind, [SCRIPT, "1", "--resource", "fpga"]) as (command, stderr):
        done = subprocess.run(
            command, env=shared_manager.environment, stdout=subprocess.PIPE, stderr=stderr, timeout=PATIENCE,
            check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.parametrize(
    "arguments", [["x"], ["0"], ["1", "more"], ["1", "--nonsense"], ["1", "--wait", "none"], ["1", "--resource", "a/b"]]
)
def test_a_wrong_command_line_is_2(shared_manager: Manager, arguments: list[str]) -> None:
    with caller(shared_manager) as flink:
        code, out, err = flink.call(SCRIPT, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_what_the_manager_refuses_is_one_line(shared_manager: Manager) -> None:
    with caller(shared_manager) as flink:
        one_line(flink.call(SCRIPT, "1", "--resource", "fpga"), "resource 'fpga' is not configured")
        one_line(flink.call(SCRIPT, "1", "--bus", "sqlite:////nowhere/bus.db"), "/nowhere/bus.db")


# --- on Kafka --------------------------------------------------------------------------------------------


@pytest.mark.kafka
def test_on_kafka_two_callers_get_disjoint_devices_and_a_killed_one_makes_way(
    tmp_path: Path, kafka_broker: KafkaBroker
) -> None:
    with (
        serving_on(kafka_broker, tmp_path / "manager", gpus=2, cluster=kafka_broker.new_cluster()) as manager,
        caller(manager) as first,
        caller(manager) as second,
        caller(manager) as third,
    ):
        lines = [first.call(SCRIPT, "1").out, second.call(SCRIPT, "1").out]
        assert sorted(lines) == ["0\n", "1\n"]
        first.kill()
        assert json.loads(third.call(SPARKS).out) == {"name": "gpu", "addresses": [lines[0].strip()]}

"""`outfitter run`, from outside: a real manager, real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands.worker.conftest import PATIENCE, finish, line_of
from outfitter.testing import FakeOutfitter
from support.managers.process import OUTFITTER, Manager, environment
from support.managers.scripted import ScriptedManager
from support.processes.ending import wait_until_ended

pytestmark = pytest.mark.slow

# --- exit codes ----------------------------------------------------------------------------------------

ENDED_AND_NOT_REAPED = """
import anyio, os
from outfitter_service.cli._lib.running.child import Child

async def main():
    with Child(["true"], mask=()) as child:
        child.start(os.environ)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        print(child.stopped, child.apart, await child.wait())

anyio.run(main)
"""


def test_a_command_whose_end_comes_first_as_a_signal_has_not_stopped() -> None:
    done = subprocess.run([sys.executable, "-c", ENDED_AND_NOT_REAPED], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False True 0\n", "")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -KILL $$"], -9),
        (["sh", "-c", "kill -TERM $$"], -15),
        (["no-such-command-anywhere"], 127),
        (["/no/such/path"], 127),
        ([os.fspath(Path(__file__).parent)], 126),
        ([__file__], 126),
    ],
)
def test_the_exit_code_is_the_commands_or_says_why_it_never_ran(
    shared_manager: Manager, command: list[str], code: int
) -> None:
    done = shared_manager.outfitter("run", "--", *command)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert (f"outfitter: {command[0]}: " in done.stderr) == (code in {126, 127}), done.stderr


@pytest.mark.parametrize(
    ("command", "code", "why"),
    [
        ("no-such-command", 127, "not found in any directory of PATH"),
        ("", 127, "not found"),
        ("elsewhere/tool", 127, "not found"),
        ("bin/tool/below-a-file", 127, "not found"),
        ("bin", 127, "not found in any directory of PATH"),
        ("./bin", 126, "Is a directory"),
        ("./plain", 126, "Permission denied"),
        ("notes", 126, "Permission denied"),
        ("/" + 5000 * "x", 126, "File name too long"),
        ("./empty", 126, "it is empty"),
        ("./lost", 127, "its interpreter '/no/such/interpreter' does not exist"),
    ],
)
def test_a_command_that_cannot_be_executed_is_told_before_anybody_waits_for_devices(
    tmp_path: Path, command: str, code: int, why: str
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bin/tool", "bin/notes", "plain"):
        (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / "empty").touch()
    (tmp_path / "lost").write_text("#! /no/such/interpreter -x\n")
    for name in ("bin/tool", "empty", "lost"):
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [*OUTFITTER, "run", "--bus", f"sqlite://{tmp_path}/bus.db", "--wait-for-manager", "--", command],
        env=environment(PATH="bin"), cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert why in done.stderr
    assert not (tmp_path / "bus.db").exists(), "nobody was asked for devices"


@pytest.mark.parametrize("command", ["tool", "bin/tool", "./bin/tool", "{0}/bin/tool"])
def test_a_command_is_found_as_it_will_be_executed(shared_manager: Manager, tmp_path: Path, command: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "bin/tool").chmod(0o755)
    found = shared_manager.environment | {"PATH": f"{tmp_path}/none::bin:{os.environ['PATH']}"}
    done = subprocess.run(
        [*OUTFITTER, "run", "--", command.format(tmp_path)],
        env=found, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


@pytest.mark.parametrize("command", ["tool", "./bin/tool"])
def test_a_script_that_names_no_interpreter_is_the_shells(
    shared_manager: Manager, tmp_path: Path, command: str
) -> None:
    """As under nice(1) and env(1), by execvp(3)."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_text('echo "ran $1"\n')
    (tmp_path / "bin/tool").chmod(0o755)
    found = shared_manager.environment | {"PATH": f"bin:{os.environ['PATH']}"}
    done = subprocess.run(
        [*OUTFITTER, "run", "--", command, "once more"],
        env=found, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ran once more\n"), done.stderr


def test_a_wait_that_is_too_long_is_124(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--", "cat", stdin=subprocess.PIPE) as first:
        one_gpu.wait_for(lambda: any(record["state"] == "allocated" for record in one_gpu.records()))
        done = one_gpu.outfitter("run", "--wait", "200ms", "--", "true")
        assert first.poll() is None
        first.communicate(timeout=PATIENCE)
    assert done.returncode == 124
    assert "waited" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--resource", "gpu=99", "--", "true"],
        ["--resource", "fpga=1", "--", "true"],
        ["--resource", "gpu=none", "--", "true"],
        ["--resource", "gpu", "--", "true"],
        ["--operator", "infer:gpu=2", "--resource", "gpu=1", "--", "true"],
        ["--nonsense"],
        [],
    ],
)
def test_what_outfitter_cannot_do_is_125_with_the_reason(shared_manager: Manager, arguments: list[str]) -> None:
    done = shared_manager.outfitter("run", *arguments)
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.startswith("outfitter: ")
    assert "Traceback" not in done.stderr


def test_without_a_manager_it_says_so_and_how_to_start_one(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("run", "--host", "nobody-serves-this", "--", "true")
    assert done.returncode == 125
    assert "no manager answers for host 'nobody-serves-this'" in done.stderr


def test_a_bus_that_cannot_be_used_is_named_with_the_remedy(tmp_path: Path) -> None:
    bus = f"sqlite://{tmp_path}/missing/deeper/bus.db"
    done = subprocess.run(
        [*OUTFITTER, "run", "--bus", bus, "--", "true"], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 125
    assert f"{tmp_path}/missing/deeper" in done.stderr
    assert "--bus" in done.stderr


# --- what the command gets ------------------------------------------------------------------------------


def test_the_command_finds_its_devices_in_its_environment(shared_manager: Manager) -> None:
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    done = shared_manager.outfitter(
        "run", "--resource", "gpu=2", "--worker", "w-env", "--", sys.executable, "-c", show, env={"MINE": "kept"}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert found["MINE"] == "kept"
    assert found["OUTFITTER_BUS"] == shared_manager.bus_url
    assert (found["OUTFITTER_HOST"], found["OUTFITTER_WORKER"]) == (shared_manager.host, "w-env")
    assert found["OUTFITTER_CLUSTER"] == shared_manager.cluster
    record = shared_manager.record("w-env")
    assert record is not None
    assert found["OUTFITTER_INCARNATION"] == record["incarnation"]


def test_a_runtime_context_in_the_command_attaches_to_the_allocation(shared_manager: Manager) -> None:
    code = """
from outfitter import RuntimeContext
with RuntimeContext(operator="infer") as context:
    print(sorted(info["id"] for info in context.get_external_resource_infos("gpu")))
"""
    arguments = ["--resource", "gpu=2", "--operator", "infer:gpu=1", "--worker", "w-attached"]
    done = shared_manager.outfitter("run", *arguments, "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['GPU-0']\n"
    assert [record["worker"] for record in shared_manager.records()].count("w-attached") == 1


def test_a_forged_record_runs_no_code(tmp_path: Path) -> None:
    for folder, word in (("bin", "honest"), ("evil", "forged")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hello").write_text(f"#!/bin/sh\necho {word} $V $LD_PRELOAD\n")
        (tmp_path / folder / "hello").chmod(0o755)
    url = f"sqlite://{tmp_path}/bus/bus.db?synchronous=NORMAL"
    forged = {"PATH": f"{tmp_path}/evil", "LD_PRELOAD": f"{tmp_path}/evil.so", "V": "device"}
    with ScriptedManager(url, "h", FakeOutfitter({"gpu": [{}]}, env=forged)):
        done = subprocess.run(
            [*OUTFITTER, "run", "--bus", url, "--host", "h", "--allow-env", "V", "--", "hello"],
            env=environment(PATH=f"{tmp_path}/bin:{os.environ['PATH']}"), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "honest device\n"), done.stderr
    assert "variable 'PATH' of its record is not set" in done.stderr
    assert "variable 'LD_PRELOAD' of its record is not set" in done.stderr


def test_a_run_within_a_run_is_another_worker(shared_manager: Manager) -> None:
    inner = [*OUTFITTER, "run", "--resource", "gpu=1", "--", "printenv", "OUTFITTER_WORKER", "CUDA_VISIBLE_DEVICES"]
    done = shared_manager.outfitter("run", "--resource", "gpu=1", "--worker", "w-outer", "--", *inner)
    assert done.returncode == 0, done.stderr
    worker, devices = done.stdout.split()
    assert worker != "w-outer"
    assert devices == "GPU-1"


def test_the_registration_carries_what_the_options_say(shared_manager: Manager) -> None:
    arguments = [
        "--worker",
        "w-options",
        "--lease",
        "1m30s",
        "--wait",
        "40s",
        "--priority",
        "7",
        "--label",
        "job=mnist",
    ]
    assert shared_manager.outfitter("run", *arguments, "--", "true").returncode == 0
    record = shared_manager.record("w-options")
    assert record is not None
    request = record["request"]
    assert (request["lease_s"], request["wait_s"], request["priority"]) == (90.0, 40.0, 7)
    assert request["labels"] == {"job": "mnist"}
    assert request["amounts"] == {"gpu": 1}
    assert request["owner"]["pid"] > 0


def test_standard_input_and_passed_file_descriptors_reach_the_command(shared_manager: Manager) -> None:
    read, write = os.pipe()
    with shared_manager.popen(
        "run", "--", "sh", "-c", f"cat; echo more > /dev/fd/{write}", stdin=subprocess.PIPE, pass_fds=[write]
    ) as process:
        os.close(write)
        out, err = process.communicate("through\n", timeout=PATIENCE)
    with os.fdopen(read) as pipe:
        assert (out, pipe.read()) == ("through\n", "more\n"), err  # which may say that it waits: others leave late


def test_what_it_held_is_given_back_when_the_command_ends(shared_manager: Manager) -> None:
    shared_manager.outfitter("run", "--worker", "w-done", "--resource", "gpu=2", "--", "true")
    record = shared_manager.wait_for_state("w-done", "ended")
    assert record["reason_code"] == "deregistered"


# --- waiting ---------------------------------------------------------------------------------------------


def test_it_says_what_it_waits_for_and_then_what_it_got(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "first", "--", "cat", stdin=subprocess.PIPE) as first:
        one_gpu.wait_for_state("first", "allocated")
        with one_gpu.popen("run", "--worker", "second", "--", "true") as second:
            assert second.stderr is not None
            waits = second.stderr.readline()
            first.communicate(timeout=PATIENCE)
            code, _, err = finish(second)
    assert code == 0
    [has] = [line for line in err.splitlines() if line.startswith("outfitter: ")]
    assert "second" in waits
    assert "gpu=1" in waits
    assert "position 1 in the queue" in waits
    assert "has gpu: 0" in has


# --- sudden ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_while_it_waits_it_leaves_no_process(one_gpu: Manager, number: signal.Signals) -> None:
    with one_gpu.popen("run", "--worker", "holder", "--", "cat", stdin=subprocess.PIPE) as holder:
        one_gpu.wait_for_state("holder", "allocated")
        with one_gpu.popen("run", "--worker", "waiter", "--", "true") as waiter:
            one_gpu.wait_for_state("waiter", "pending")
            started = [int(pid) for pid in Path(f"/proc/{waiter.pid}/task/{waiter.pid}/children").read_text().split()]
            waiter.send_signal(number)
            finish(waiter)
            assert started
            wait_until_ended(*started)
        holder.communicate(timeout=PATIENCE)


def test_sigkill_ends_the_command_too_and_the_next_one_starts(one_gpu: Manager) -> None:
    command = ["sh", "-c", "echo $$; exec sleep 1000"]
    with one_gpu.popen("run", "--worker", "first", "--lease", "none", "--", *command) as first:
        child = int(line_of(first))
        look = f"grep -qs '^State:.[^XZ]' /proc/{child}/status || echo gone"
        with one_gpu.popen("run", "--worker", "second", "--", "sh", "-c", look) as second:
            one_gpu.wait_for_state("second", "pending")
            first.kill()
            code, out, _ = finish(second)
        wait_until_ended(child)
        assert (code, out) == (0, "gone\n")
        first.communicate(timeout=PATIENCE)
    record = one_gpu.wait_for_state("first", "ended")
    assert record["reason_code"] == "owner-died"


def test_a_command_whose_allocation_is_ended_by_others_is_ended(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "taken", "--", "sh", "-c", "echo ready; exec sleep 1000") as process:
        assert line_of(process) == "ready"
        assert one_gpu.outfitter("deregister", "--worker", "taken").returncode == 0
        code, _, err = finish(process)
    assert code == -signal.SIGTERM
    assert "the allocation is lost" in err


def test_a_command_that_will_not_end_is_killed_when_its_allocation_is_lost(one_gpu: Manager) -> None:
    stubborn = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    )
    with one_gpu.popen(
        "run", "--worker", "taken", "--kill-after", "100ms", "--", sys.executable, "-c", stubborn
    ) as process:
        assert line_of(process) == "ready"
        one_gpu.outfitter("deregister", "--worker", "taken")
        assert finish(process)[0] == -signal.SIGKILL


def test_a_manager_that_is_killed_and_comes_back_does_not_disturb_the_command(one_gpu: Manager) -> None:
    with one_gpu.popen("run", "--worker", "stays", "--", "cat", stdin=subprocess.PIPE) as process:
        before = one_gpu.wait_for_state("stays", "allocated")
        one_gpu.kill9()
        one_gpu.start()
        assert one_gpu.wait_for_state("stays", "allocated")["token"] == before["token"]
        out, _ = process.communicate("still here", timeout=PATIENCE)
    assert (process.returncode, out) == (0, "still here")


# --- circumstances ---------------------------------------------------------------------------------------------


def test_odd_bytes_and_an_old_locale_are_no_trouble(shared_manager: Manager) -> None:
    odd = b"caf\xe9-\xff"
    done = subprocess.run(
        [*OUTFITTER, "run", "--", "printf", "%s", odd],
        env=shared_manager.environment | {"LC_ALL": "C"}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, odd)


def test_a_registration_is_read_from_another_directory_without_a_configuration(
    shared_manager: Manager, tmp_path: Path
) -> None:
    config = tmp_path / "elsewhere.toml"
    config.write_text(f'bus = "{shared_manager.bus_url}"\nhost = "{shared_manager.host}"\n')
    done = subprocess.run(
        [*OUTFITTER, "run", "--config", str(config), "--", "printenv", "OUTFITTER_HOST"],
        env=environment(), capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == f"{shared_manager.host}\n"


def test_without_a_manager_it_names_the_option_that_waits_for_one(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("run", "--host", "unmanaged", "--", "true")
    assert done.returncode == 125
    assert "--wait-for-manager waits for one" in done.stderr
    assert "wait_for_manager=" not in done.stderr

"""`outfitter hold`, from outside: a real manager, a parent that reads lines, and every way to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands.worker.conftest import PATIENCE, finish
from cli.commands.worker.holding import DYING_PARENT, parent_of_hold, read_line
from support.bus.frozen import frozen
from support.documents import ROOT, blocks
from support.managers.process import OUTFITTER, Manager, add_device
from support.processes.ending import has_ended, wait_until_ended
from support.processes.standard_error import MUTE, mute

pytestmark = pytest.mark.slow

NAMED = ("--worker", "w", "--incarnation", "run-1")

# --- what it prints --------------------------------------------------------------------------------------


def test_the_first_line_is_the_record_as_on_the_bus_and_each_change_is_another(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", "--worker", "w", stdin=subprocess.PIPE) as process:
        first = read_line(process)
        assert first == one_gpu.record("w")
        assert (first["state"], first["request"]["owner"]["pid"]) == ("allocated", os.getpid())
        add_device(one_gpu.folder / "gpus", 0, model="X2")
        second = read_line(process)
        assert second["resources"]["gpu"][0]["model"] == "X2"
        assert second["token"] == first["token"]
        code, out, err = finish(process)
    assert (code, out, err) == (0, "", "")


def test_the_registration_carries_what_the_options_say(one_gpu: Manager) -> None:
    options = ["--lease", "1m30s", "--wait", "40s", "--priority", "7", "--label", "job=mnist", *NAMED]
    with one_gpu.popen("hold", *options, stdin=subprocess.PIPE) as process:
        record = read_line(process)
        process.communicate(timeout=PATIENCE)
    request = record["request"]
    assert (request["lease_s"], request["wait_s"], request["priority"]) == (90.0, 40.0, 7)
    assert (record["incarnation"], request["labels"]) == ("run-1", {"job": "mnist"})


def test_who_waits_reads_the_reason_on_standard_error_and_the_grant_as_the_first_line(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", "--worker", "first", stdin=subprocess.PIPE) as first:
        read_line(first)
        with one_gpu.popen("hold", "--worker", "second", stdin=subprocess.PIPE) as second:
            assert second.stderr is not None
            assert "position 1 in the queue" in second.stderr.readline()
            first.communicate(timeout=PATIENCE)
            assert read_line(second)["state"] == "allocated"
            second.communicate(timeout=PATIENCE)


def test_a_reader_that_was_slow_reads_the_newest_record_and_not_all_before_it(one_gpu: Manager) -> None:
    read, write = os.pipe()
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE, stdout=write) as process, os.fdopen(read) as pipe:
        os.close(write)
        one_gpu.wait_for_state("w", "allocated")
        count = 30
        for number in range(count):  # together more than a pipe takes
            add_device(one_gpu.folder / "gpus", 0, model=f"{number}", notes=6000 * "x")
            one_gpu.wait_for(lambda number=number: model(one_gpu.record("w")) == str(number))
        last = str(count - 1)
        models = []
        while not models or models[-1] != last:
            models.append(model(json.loads(pipe.readline())))
        assert len(models) < count
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def model(record: dict[str, object] | None) -> str | None:
    found = record["resources"]["gpu"][0].get("model") if record is not None else None  # type: ignore[index]
    assert found is None or isinstance(found, str)
    return found


def test_the_shell_script_of_the_documentation_gets_a_record_and_gives_its_devices_back(
    one_gpu: Manager, tmp_path: Path
) -> None:
    (script,) = [block.text for block in blocks(ROOT / "proto/README.md") if "outfitter hold" in block.text]
    variables = one_gpu.environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-e", "-c", f"{script}wait"], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "allocated"
    assert one_gpu.wait_for_state("tm-17", "ended")["reason_code"] == "deregistered"


# --- how it ends -----------------------------------------------------------------------------------------


def test_the_end_of_standard_input_gives_the_devices_back(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", "--worker", "w", stdin=subprocess.PIPE) as process:
        read_line(process)
        assert process.stdin is not None
        process.stdin.write("what is written there is nothing\n")
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
    record = one_gpu.wait_for_state("w", "ended")
    assert (record["reason_code"], record["reason"]) == ("deregistered", "deregistered: given back by its owner")


@pytest.mark.parametrize("told_again", [False, True])
def test_what_is_given_back_while_the_bus_is_away_is_given_back_once_it_is_there_unless_a_signal_comes(
    one_gpu: Manager, *, told_again: bool
) -> None:
    with one_gpu.popen("hold", "--worker", "w", stdin=subprocess.PIPE) as process:
        read_line(process)
        assert process.stdin is not None
        assert process.stderr is not None
        with frozen(one_gpu.bus_url):
            process.stdin.close()
            assert "could not deregister" in process.stderr.readline()
            if told_again:
                process.send_signal(signal.SIGTERM)
                assert any(f"stays with process {os.getpid()}" in line for line in process.stderr)
        assert process.wait(PATIENCE) == (125 if told_again else 0)
    if not told_again:
        assert one_gpu.wait_for_state("w", "ended")["reason"] == "deregistered: given back by its owner"


def test_a_reader_that_closes_standard_output_gives_the_devices_back(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", "--worker", "w", "--no-stdin") as process:
        read_line(process)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert one_gpu.wait_for_state("w", "ended")["reason_code"] == "deregistered"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_of_the_owner_gives_the_devices_back(one_gpu: Manager, number: signal.Signals) -> None:
    with one_gpu.popen("hold", "--worker", "w", "--no-stdin") as process:
        read_line(process)
        process.send_signal(number)
        assert finish(process)[0] == 0
    assert one_gpu.wait_for_state("w", "ended")["reason_code"] == "deregistered"


def test_anybody_elses_signal_ends_it_and_leaves_the_devices_to_the_owner(one_gpu: Manager) -> None:
    """systemd, for example, signals every process of a service, and the owner may need a while to end."""
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as process:
        before = read_line(process)
        subprocess.run(["sh", "-c", f"kill -TERM {process.pid}"], check=True)
        assert process.wait(PATIENCE) == 0  # its input is still open, so only the signal ends it
        assert process.stderr is not None
        err = process.stderr.read()
    assert f"stays with process {os.getpid()}" in err
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as again:
        assert read_line(again)["token"] == before["token"]
        again.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("how", ["signal", "end of input"])
def test_ended_while_it_waits_it_withdraws(one_gpu: Manager, how: str) -> None:
    with one_gpu.popen("hold", "--worker", "holder", stdin=subprocess.PIPE) as holder:
        read_line(holder)
        with one_gpu.popen("hold", "--worker", "w", stdin=subprocess.PIPE) as waiter:
            one_gpu.wait_for_state("w", "pending")
            if how == "signal":
                subprocess.run(["sh", "-c", f"kill -TERM {waiter.pid}"], check=True)
            code, out, _ = finish(waiter)
        assert (code, out) == (0, "")
        assert one_gpu.wait_for_state("w", "ended")["reason_code"] == "withdrawn"
        holder.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("option", [[], ["--no-stdin"]])
def test_the_death_of_the_owner_frees_the_devices_and_ends_it(one_gpu: Manager, option: list[str]) -> None:
    with parent_of_hold(one_gpu, "--worker", "w", "--lease", "none", *option) as (parent, pid):
        assert read_line(parent)["request"]["owner"]["pid"] == parent.pid
        parent.kill()
        assert one_gpu.wait_for_state("w", "ended")["reason_code"] == "owner-died"
        wait_until_ended(pid)


def test_an_input_that_ends_because_the_owner_is_dying_does_not_give_back_before_it_is_dead(one_gpu: Manager) -> None:
    """Its main thread has ended, as in a process that the kernel takes down: its files are closed before it is gone."""
    with parent_of_hold(one_gpu, "--worker", "w", program=DYING_PARENT) as (parent, pid):
        read_line(parent)
        assert parent.stdin is not None
        parent.stdin.write("close\n")
        parent.stdin.flush()
        assert parent.stdout is not None
        assert parent.stdout.readline() == "closed\n"
        assert not has_ended(pid, within=1.0)
        parent.kill()
        assert one_gpu.wait_for_state("w", "ended")["reason_code"] == "owner-died"
        wait_until_ended(pid)


def test_an_owner_that_is_not_the_parent_is_named_by_its_pid(one_gpu: Manager) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        with one_gpu.popen("hold", "--worker", "w", "--owner-pid", str(owner.pid), "--no-stdin") as process:
            assert read_line(process)["request"]["owner"]["pid"] == owner.pid
            owner.kill()
            assert process.wait(PATIENCE) == 0
            process.communicate()
        assert one_gpu.wait_for_state("w", "ended")["reason_code"] == "owner-died"


def test_an_allocation_that_somebody_ends_is_123_with_its_last_record(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", "--worker", "w", stdin=subprocess.PIPE) as process:
        read_line(process)
        assert one_gpu.outfitter("deregister", "--worker", "w").returncode == 0
        assert process.wait(PATIENCE) == 123
        assert read_line(process)["state"] in {"releasing", "ended"}
        process.communicate()


# --- its own death ---------------------------------------------------------------------------------------


def test_its_own_death_loses_nothing_and_a_restart_goes_on_with_the_same_devices(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as process:
        before = read_line(process)
        process.kill()
        process.communicate(timeout=PATIENCE)
    with one_gpu.popen("hold", "--worker", "next", stdin=subprocess.PIPE) as waiter:
        one_gpu.wait_for_state("next", "pending")
        with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as again:
            after = read_line(again)
            assert (after["token"], after["resources"]) == (before["token"], before["resources"])
            again.communicate(timeout=PATIENCE)
        assert one_gpu.wait_for_state("w", "ended")["reason_code"] == "deregistered"
        assert read_line(waiter)["state"] == "allocated"
        waiter.communicate(timeout=PATIENCE)


def test_an_owner_that_gives_back_while_it_is_started_again_has_given_back(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as process:
        read_line(process)
        process.kill()
        process.communicate(timeout=PATIENCE)
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as again:
        assert again.stdin is not None
        again.stdin.close()  # long before it has found its allocation
        assert again.wait(PATIENCE) == 0
    record = one_gpu.wait_for_state("w", "ended")
    assert (record["reason_code"], record["reason"]) == ("deregistered", "deregistered: given back by its owner")


def test_a_restart_prints_the_record_while_there_is_no_manager_and_goes_on_when_there_is(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as process:
        before = read_line(process)
        process.kill()
        process.communicate(timeout=PATIENCE)
    one_gpu.kill9()
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as again:
        assert read_line(again)["token"] == before["token"]
        one_gpu.start()
        again.communicate(timeout=PATIENCE)
    assert again.returncode == 0
    assert one_gpu.wait_for_state("w", "ended")["reason_code"] == "deregistered"


def test_a_restart_after_the_allocations_end_says_so_and_gets_nothing(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as process:
        read_line(process)
        process.communicate(timeout=PATIENCE)
    one_gpu.wait_for_state("w", "ended")
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as again:
        assert read_line(again)["state"] == "ended"
        assert finish(again)[0] == 123


def test_a_restart_with_another_request_is_refused_and_changes_nothing(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as process:
        before = read_line(process)
        process.kill()
        process.communicate(timeout=PATIENCE)
    done = one_gpu.popen("hold", *NAMED, "--priority", "5", stdin=subprocess.PIPE)
    with done:
        line = read_line(done)
        assert finish(done)[0] == 125
    assert (line["type"], line["code"]) == ("error", "failed")
    assert "was registered with other priority" in line["reason"]
    assert one_gpu.record("w") == before


def test_a_manager_that_is_killed_and_comes_back_disturbs_nobody(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", *NAMED, stdin=subprocess.PIPE) as process:
        before = read_line(process)
        one_gpu.kill9()
        one_gpu.start()
        assert one_gpu.wait_for_state("w", "allocated")["token"] == before["token"]
        assert process.poll() is None
        code, _, err = finish(process)
    assert (code, err) == (0, "")


# --- what it refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "word", "why"),
    [
        (["--resource", "gpu=99"], 125, "infeasible", "gpu"),
        (["--resource", "fpga=1"], 125, "unknown-resource", "fpga"),
        (["--resource", "gpu=none"], 125, "usage", "no amount"),
        (["--host", "nobody-serves-this"], 125, "no-manager", "no manager answers"),
        (["--owner-pid", "2147483646"], 125, "failed", "there is no process 2147483646"),
        (["--bus", "sqlite:////nowhere/deeper/bus.db"], 125, "bus-configuration", "/nowhere/deeper"),
        (["--bus", "kafka://127.0.0.1:1"], 125, "bus-unavailable", "127.0.0.1:1"),
        (["--incarnation", "run-1"], 125, None, "--worker"),
        (["--nonsense"], 125, None, "--nonsense"),
    ],
)
def test_what_cannot_be_is_one_line_with_a_code_and_a_line_for_people(
    shared_manager: Manager, arguments: list[str], code: int, word: str | None, why: str
) -> None:
    with shared_manager.popen("hold", *arguments, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == code
        assert process.stdout is not None
        lines = [json.loads(line) for line in process.stdout]
        _, err = process.communicate()
    assert err.startswith("outfitter: ")
    assert why in err
    assert "Traceback" not in err
    assert [line.get("reason_code", line.get("code")) for line in lines] == ([word] if word else [])


def test_a_wait_that_is_too_long_is_124_with_the_failed_record(one_gpu: Manager) -> None:
    with one_gpu.popen("hold", "--worker", "first", stdin=subprocess.PIPE) as first:
        read_line(first)
        with one_gpu.popen("hold", "--worker", "w", "--wait", "200ms", stdin=subprocess.PIPE) as process:
            line = read_line(process)
            assert process.wait(PATIENCE) == 124
            process.communicate()
        assert (line["state"], line["reason_code"]) == ("failed", "waited-too-long")
        first.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("stdin", ["< /dev/null", "<&-", f"< {__file__}"])
def test_an_input_whose_end_means_nothing_is_refused_unless_it_is_not_to_be_read(
    shared_manager: Manager, stdin: str, tmp_path: Path
) -> None:
    worker = tmp_path.name
    command = " ".join([*OUTFITTER, "hold", "--worker", worker])
    done = subprocess.run(
        ["sh", "-c", f"{command} {stdin}"], env=shared_manager.environment, cwd=tmp_path, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 125
    assert "--no-stdin" in done.stderr
    assert shared_manager.record(worker) is None
    with subprocess.Popen(
        ["sh", "-c", f"exec {command} --no-stdin {stdin}"], env=shared_manager.environment, cwd=tmp_path,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert read_line(process)["state"] == "allocated"
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("kind", MUTE)
def test_who_has_waited_holds_although_nobody_reads_why_it_waited(one_gpu: Manager, kind: str) -> None:
    asked = one_gpu.outfitter(
        "register", "--worker", "before", "--resource", "gpu=1", "--lease", "none", "--wait", "20"
    )
    assert asked.returncode == 0, asked.stderr
    with (
        mute(kind, [*OUTFITTER, "hold", "--worker", "w"]) as (command, stderr),
        subprocess.Popen(
            command, env=one_gpu.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        one_gpu.wait_for_state("w", "pending")
        assert one_gpu.outfitter("deregister", "--worker", "before").returncode == 0
        assert read_line(process)["state"] == "allocated"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


def test_without_standard_output_it_does_not_begin(shared_manager: Manager) -> None:
    done = subprocess.run(
        ["sh", "-c", " ".join([*OUTFITTER, "hold", "--worker", "w-mute", ">&-"])], env=shared_manager.environment,
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 125
    assert "standard output is closed" in done.stderr
    assert shared_manager.record("w-mute") is None


def test_a_thread_is_no_owner(shared_manager: Manager) -> None:
    code = (
        "import subprocess, sys, threading\n"
        "def own():\n"
        "    done = subprocess.run([*sys.argv[1:], '--owner-pid', str(threading.get_native_id())], stdin=0,\n"
        "                          capture_output=True, text=True)\n"
        "    print(done.returncode, done.stderr)\n"
        "thread = threading.Thread(target=own); thread.start(); thread.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *OUTFITTER, "hold", "--no-stdin"], env=shared_manager.environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("125 ")
    assert "is no process, but a thread of one" in done.stdout


def test_a_parent_that_has_ended_is_no_owner(shared_manager: Manager, tmp_path: Path) -> None:
    """Process 1 adopts orphans in a PID namespace of its own."""
    mine = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    orphan = f"exec {' '.join(OUTFITTER)} hold --no-stdin > out 2> err"
    script = f"sh -c '(cat gate; {orphan}) &'; echo > gate; while ! test -s err; do sleep 0.1; done"
    os.mkfifo(tmp_path / "gate")
    subprocess.run(
        ["unshare", *mine, "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script],
        env=shared_manager.environment, cwd=tmp_path, check=True, timeout=60,
    )  # fmt: skip
    assert "the parent is process 1" in (tmp_path / "err").read_text()

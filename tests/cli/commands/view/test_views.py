"""`outfitter status`, `devices`, `explain` and `watch`, from outside."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.managers.process import Manager, StartManager, add_device, files_config
from support.processes import command_line

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A host with two GPUs, of which one is ill, where one worker holds, two wait and one was refused."""
    folder = tmp_path_factory.mktemp("crowd")
    manager = Manager(folder, files_config(folder / "gpus", gpus=1))
    add_device(folder / "gpus", 1, health="unhealthy", reason="XID 79")
    manager.start()
    try:
        for worker, arguments in {
            "holder": ["--wait", "10", "--label", "team=vision", "--label", "job=train"],
            "waiter": ["--priority", "3", "--label", "team=speech"],
            "late": [],
            "refused": ["--resource", "gpu=7", "--wait", "10"],
        }.items():
            manager.outfitter("register", "--worker", worker, "--lease", "none", *arguments)
        manager.wait_for_state("late", "pending")
        yield manager
    finally:
        manager.kill9()


def by_worker(manager: Manager) -> dict[str, dict[str, Any]]:
    return {record["worker"]: record for record in manager.records()}


def test_status_prints_every_workers_record(crowd: Manager) -> None:
    found = by_worker(crowd)
    assert {name: record["state"] for name, record in found.items()} == {
        "holder": "allocated",
        "waiter": "pending",
        "late": "pending",
        "refused": "failed",
    }
    assert all(record["type"] == "allocation" for record in found.values())
    assert (found["waiter"]["queue_position"], found["late"]["queue_position"]) == (1, 2)


def test_status_for_people_has_ages_reasons_and_no_colours_in_a_pipe(crowd: Manager) -> None:
    done = crowd.outfitter("status", env={"LC_ALL": "C", "NO_COLOR": "1"})
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].split() == ["HOST", "WORKER", "STATE", "AGE", "DEVICES", "QUEUE", "LABELS", "REASON"]
    assert len(lines) == 5
    assert "waits for 1 gpu" in done.stdout
    assert "\x1b" not in done.stdout


def test_labels_are_shown_and_choose_workers_everywhere(crowd: Manager) -> None:
    assert "job=train, team=vision" in crowd.outfitter("status").stdout
    for command in (["status"], ["history", "--since", "1h"], ["devices"]):
        done = crowd.outfitter(*command, "--json", "--label", "team=vision", "--label", "job=train")
        assert "holder" in done.stdout, command
        assert "waiter" not in done.stdout, command
        assert json.loads(crowd.outfitter(*command, "--json", "--label", "team=nobody").stdout or "[]") == [], command
    assert "Its labels are team=speech." in crowd.outfitter("explain", "waiter").stdout
    assert "(job=train, team=vision)" in crowd.outfitter("history").stdout
    assert "waiter on" in (screen := crowd.outfitter("top", "--once", env={"COLUMNS": "200"}).stdout)
    assert "(team=speech)" in screen
    done = crowd.outfitter("status", "--label", "vision")
    assert (done.returncode, "'vision' is no label: write NAME=VALUE" in done.stderr) == (2, True)


def test_devices_are_chosen_by_what_they_are_and_counted_whatever_is_chosen(crowd: Manager) -> None:
    def ids(*arguments: str) -> list[str]:
        return [line["id"] for line in json.loads(crowd.outfitter("devices", "--json", *arguments).stdout)]

    assert ids("--health", "unhealthy") == ["GPU-1"]
    assert ids("--holder", "holder") == ids("--holder", f"{crowd.host}/holder") == ["GPU-0"]
    assert ids("--holder", "waiter") == ids("--free") == ids("--resource", "fpga") == ids("--host", "another") == []
    shown = crowd.outfitter("devices", "--health", "unhealthy").stdout.splitlines()
    assert [line.split()[3] for line in shown[:2]] == ["DEVICE", "GPU-1"]
    assert shown[2:] == ["gpu: 2 devices: 0 free, 1 held, 1 unhealthy, 0 unknown"]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("devices --host nope", "host 'nope' is unknown: it has no manager, and never had one; the host there: {host}"),
        ("devices --resource nope", "no device matches: host '{host}' has no resource 'nope'; the resource there: gpu"),
        ("devices --label a=b", "no device matches: no worker has the label a=b; the labels there: job=train,"),
        ("devices --holder holdr", "no device matches: there is no worker 'holdr': it never registered"),
        ("devices --holder waiter", "no device matches"),
        ("devices --resource gpu --health unknown", "no device matches"),
        ("status --host nope", "host 'nope' is unknown: it has no manager, and never had one; the host there: {host}"),
        ("status --label a=b", "no worker matches: no worker has the label a=b; the labels there: job=train,"),
        ("status --worker holdr", "no worker matches: there is no worker 'holdr': it never registered"),
        ("status --worker holder --state pending", "no worker matches"),
        ("history --host nope", "host 'nope' is unknown: it has no manager, and never had one; the host there: {host}"),
        ("history --label a=b", "no step matches"),
        ("dead-letters --host nope", "no dead letter matches"),
    ],
)
def test_what_finds_nothing_says_what_was_not_found_and_what_there_is(
    crowd: Manager, arguments: str, sentence: str, *, as_json: bool
) -> None:
    done = crowd.outfitter(*arguments.split(), *(["--json"] if as_json else []))
    assert done.returncode == 0
    assert done.stderr.startswith(f"outfitter: {sentence.format(host=crowd.host)}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    if as_json:
        assert json.loads(done.stdout or "[]") == []


def test_what_explains_an_unknown_host_names_it(crowd: Manager) -> None:
    done = crowd.outfitter("explain", "holder", "--host", "nope")
    assert (done.returncode, done.stdout) == (1, "")
    assert "host 'nope' is unknown" in done.stderr


def test_watch_of_an_unknown_host_says_so_and_waits_for_it(crowd: Manager) -> None:
    with crowd.popen("watch", "--host", "nope") as process:
        try:
            assert process.stderr is not None
            assert "host 'nope' is unknown" in process.stderr.readline()
            assert process.poll() is None
        finally:
            process.kill()


def test_status_is_narrowed_by_host_alone(crowd: Manager) -> None:
    assert json.loads(crowd.outfitter("status", "--host", "another", "--json").stdout) == []
    environment = {"OUTFITTER_HOST": "another"}  # where this machine's workers register, not what to look at
    assert len(json.loads(crowd.outfitter("status", "--json", env=environment).stdout)) == 4


def test_a_worker_may_be_named_in_every_form_that_commands_print(crowd: Manager) -> None:
    record = by_worker(crowd)["waiter"]
    host, incarnation = record["host"], record["incarnation"]
    for form in ("waiter", f"{host}/waiter", f"{host}/waiter/{incarnation}"):
        done = crowd.outfitter("explain", form, "--json")
        assert [each["incarnation"] for each in json.loads(done.stdout)] == [incarnation], done.stderr
        done = crowd.outfitter("status", "--worker", form, "--json")
        assert [each["worker"] for each in json.loads(done.stdout)] == ["waiter"], done.stderr
        done = crowd.outfitter("history", "--worker", form, "--json")
        assert {json.loads(line)["record"]["worker"] for line in done.stdout.splitlines()} == {"waiter"}, done.stderr
    for form in ("another/waiter", f"{host}/waiter/another", f"another/waiter/{incarnation}"):
        done = crowd.outfitter("explain", form)
        assert done.returncode == 1
        assert f"there is no worker '{form}'" in done.stderr
        assert json.loads(crowd.outfitter("status", "--worker", form, "--json").stdout) == []
        assert crowd.outfitter("history", "--worker", form, "--json").stdout == ""


@pytest.mark.parametrize("command", ["explain", "watch", "status --worker", "history --worker", "deregister --worker"])
def test_what_is_no_form_of_a_worker_is_refused_with_the_forms(crowd: Manager, command: str) -> None:
    for wrong in ("a/b/c/d", "/waiter", "a//b", "waiter/"):
        done = crowd.outfitter(*command.split(), wrong)
        assert done.returncode == 2
        assert f"'{wrong}' is no worker: write WORKER, HOST/WORKER or HOST/WORKER/INCARNATION" in done.stderr
    done = crowd.outfitter(*command.split(), "one/waiter", "--host", "two")
    assert done.returncode == 2
    assert "--host is two, but the worker is one/waiter" in done.stderr


def test_watch_shows_the_run_that_is_named(crowd: Manager) -> None:
    key = next(f"{each['host']}/late/{each['incarnation']}" for each in crowd.records() if each["worker"] == "late")
    with crowd.popen("watch", key, "--json") as watching:
        assert json.loads(watching.stdout.readline())["key"] == key
        watching.terminate()


@pytest.mark.parametrize(
    ("command", "words"), [("devices", "GPU-0"), ("history", "late"), ("replay", "late"), ("explain late", "late")]
)
def test_what_looks_on_shows_all_hosts_wherever_workers_of_this_machine_register(
    crowd: Manager, command: str, words: str
) -> None:
    done = crowd.outfitter(*command.split(), "--json", env={"OUTFITTER_HOST": "another"})
    assert done.returncode == 0, done.stderr
    assert f'"{words}"' in done.stdout


def test_status_is_narrowed_by_worker_state_and_number(crowd: Manager) -> None:
    def workers(*arguments: str) -> list[str]:
        lines = crowd.outfitter("status", *arguments).stdout.splitlines()
        return [line.split()[1] for line in lines[1:]]

    assert workers() == ["holder", "waiter", "late", "refused"]
    assert workers("--state", "pending") == ["waiter", "late"]
    assert workers("--state", "failed", "--state", "allocated") == ["holder", "refused"]
    assert workers("--worker", "late") == ["late"]
    assert workers("--limit", "2") == ["holder", "waiter"]
    assert "and 2 more" in crowd.outfitter("status", "--limit", "2").stderr
    assert [
        record["worker"] for record in json.loads(crowd.outfitter("status", "--worker", "late", "--json").stdout)
    ] == ["late"]
    assert "no worker matches" in crowd.outfitter("status", "--worker", "nobody").stderr
    assert "host 'other' is unknown" in crowd.outfitter("status", "--host", "other").stderr


def test_status_shows_live_ones_first_and_of_those_that_are_over_the_last(manager: Manager) -> None:
    for number in range(22):
        manager.outfitter("register", "--worker", f"w{number}", "--resource", "gpu=9", "--wait", "10")
    manager.outfitter("register", "--worker", "live", "--wait", "10", "--lease", "none")
    done = manager.outfitter("status")
    workers = [line.split()[1] for line in done.stdout.splitlines()[1:]]
    assert workers == ["live", *(f"w{number}" for number in range(21, 1, -1))]
    assert "and 2 more that ended or failed: --all shows them" in done.stderr
    assert len(manager.outfitter("status", "--all").stdout.splitlines()) == 24
    assert len(json.loads(manager.outfitter("status", "--json").stdout)) == 23


@pytest.mark.parametrize("command", ["status", "devices", "watch", "history", "replay", "explain", "dead-letters"])
def test_the_help_of_what_looks_on_says_what_host_does(tmp_path: Path, command: str) -> None:
    told = " ".join(command_line.outfitter(command, "--help", cwd=tmp_path).stdout.split())
    assert "Only this host. Default: all hosts (OUTFITTER_HOST counts only for registrations)" in told
    assert "env var: OUTFITTER_HOST" not in told


def test_a_reader_that_has_seen_enough_ends_it_without_a_word(crowd: Manager) -> None:
    process = crowd.popen("status", "--json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(60) in {0, 128 + signal.SIGPIPE}


def test_devices_say_their_health_and_who_holds_them(crowd: Manager) -> None:
    done = crowd.outfitter("devices", "--json")
    assert done.returncode == 0, done.stderr
    well, ill = json.loads(done.stdout)
    assert (well["resource"], well["id"], well["health"], well["sharing"]) == ("gpu", "GPU-0", "healthy", "exclusive")
    assert [(holder["worker"], holder["state"]) for holder in well["holders"]] == [("holder", "allocated")]
    assert (ill["id"], ill["health"], ill["reason"], ill["holders"]) == ("GPU-1", "unhealthy", "XID 79", [])
    table = crowd.outfitter("devices").stdout
    assert "unhealthy (XID 79)" in table
    assert "holder" in table


def test_explain_says_why_one_waits_behind_whom_and_who_has_it(crowd: Manager) -> None:
    done = crowd.outfitter("explain", "late")
    assert done.returncode == 0, done.stderr
    for words in (
        "has waited for 1 gpu",
        "position 2",
        "waiter",
        "GPU-0 is held by holder",
        "GPU-1 is unhealthy (XID 79)",
    ):
        assert words in done.stdout
    (told,) = json.loads(crowd.outfitter("explain", "late", "--json").stdout)
    assert (told["state"], told["queue_position"], told["managed"]) == ("pending", 2, True)
    assert [ahead["worker"] for ahead in told["ahead"]] == ["waiter"]


def test_explain_says_what_is_held_and_why_one_was_refused(crowd: Manager) -> None:
    assert "It holds gpu GPU-0." in crowd.outfitter("explain", "holder").stdout
    assert "7 gpu requested, 2 discovered" in crowd.outfitter("explain", "refused").stdout


def test_explain_of_an_unknown_worker_names_a_near_one(crowd: Manager) -> None:
    done = crowd.outfitter("explain", "holdr")
    assert (done.returncode, done.stdout) == (1, "")
    assert "did you mean holder?" in done.stderr


def lines_until(process: subprocess.Popen[str], words: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if words in line:
            return lines
    raise AssertionError(lines)


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    return process.returncode


def test_watch_shows_what_there_is_and_then_what_changes(manager: Manager) -> None:
    assert manager.outfitter("register", "--worker", "early", "--wait", "10").returncode == 0
    process = manager.popen(
        "watch",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    begun = lines_until(process, "early")
    assert any("gpu: 2 devices, 2 healthy" in line for line in begun)
    assert "allocated" in begun[-1]
    manager.outfitter("deregister", "--worker", "early")
    assert "allocated -> ended" in lines_until(process, "ended")[-1]
    assert stop(process) == 130


def test_watch_prints_records_as_json_lines_of_one_worker(manager: Manager) -> None:
    process = manager.popen(
        "watch", "mine", "--json", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    manager.outfitter("register", "--worker", "other", "--wait", "10")
    manager.outfitter("register", "--worker", "mine", "--wait", "10")
    printed = lines_until(process, '"allocated"')
    manager.outfitter("deregister", "--worker", "mine")
    lines = [json.loads(line) for line in (*printed, *lines_until(process, '"ended"'))]
    assert [line["record"]["state"] for line in lines] == ["allocated", "ended"]
    assert {line["record"]["worker"] for line in lines} == {"mine"}
    assert lines[0].keys() == {"partition", "offset", "key", "record"}
    assert stop(process) == 130


def test_watch_ends_without_a_word_when_nobody_reads_on(manager: Manager) -> None:
    process = manager.popen("watch")
    lines_until(process, "gpu")
    assert process.stdout is not None
    process.stdout.close()
    manager.outfitter("register", "--worker", "w", "--wait", "10")
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""


def test_devices_that_are_held_and_reported_no_more_are_still_shown(manager: Manager, tmp_path: Path) -> None:
    manager.outfitter("register", "--worker", "w", "--resource", "gpu=2", "--lease", "none", "--wait", "10")
    for file in (manager.folder / "gpus").iterdir():
        file.unlink()

    def gone() -> bool:
        found = json.loads(manager.outfitter("devices", "--json").stdout)
        return [(line["health"], len(line["holders"])) for line in found] == [("unknown", 1)] * 2

    manager.wait_for(gone)


def test_a_device_that_was_renamed_while_lent_is_one_line_which_is_held_in_every_view(manager: Manager) -> None:
    gpus = manager.folder / "gpus"
    (gpus / "gpu1").unlink()
    manager.outfitter("register", "--worker", "holder", "--lease", "none", "--wait", "10")
    manager.outfitter("register", "--worker", "waiter", "--lease", "none")
    add_device(gpus, 0, id="GPU-new", aliases="GPU-0")

    def lines() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(manager.outfitter("devices", "--json").stdout)
        return found

    manager.wait_for(lambda: [line["id"] for line in lines()] == ["GPU-new"])
    (line,) = lines()
    assert ([holder["worker"] for holder in line["holders"]], line["aliases"]) == (["holder"], ["GPU-0"])
    explained = manager.outfitter("explain", "waiter").stdout
    assert "It wants 1 gpu; 0 of 1 are free." in explained
    assert "GPU-new is held by holder" in explained
    assert "It holds gpu GPU-new." in manager.outfitter("explain", "holder").stdout
    assert manager.metric("outfitter_devices", resource="gpu", state="free") == 0


def test_a_shared_device_that_is_held_and_reported_no_more_is_counted_as_held(
    start_manager: StartManager, tmp_path: Path
) -> None:
    manager = start_manager(files_config(tmp_path / "gpus", gpus=2, amount=2) + 'sharing = "shared"\n')
    manager.outfitter("register", "--worker", "w", "--lease", "none", "--wait", "10")
    assert "gpu: 2 devices: 2 free, 0 held, 0 unhealthy, 0 unknown\n" in manager.outfitter("devices").stdout
    add_device(tmp_path / "gpus", 0, health="unhealthy", reason="XID 79")
    (tmp_path / "gpus/gpu1").unlink()
    told = "gpu: 2 devices: 0 free, 2 held, 1 unhealthy (1 of them held), 1 unknown (1 of them held)\n"
    manager.wait_for(lambda: told in manager.outfitter("devices").stdout)

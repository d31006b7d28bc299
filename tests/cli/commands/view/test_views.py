"""`outfitter status`, `devices`, `explain` and `watch`, from outside: views.txt has what they print of a crowd."""

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
from support.transcripts import Scene, scenes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A host with two GPUs, of which one is ill, where one worker holds, two wait and one was refused."""
    folder = tmp_path_factory.mktemp("crowd")
    manager = Manager(folder, files_config(folder / "gpus", gpus=1))
    add_device(folder / "gpus", 0, model="A100", **{"memory.total_bytes": str(80 * 1024**3)})
    add_device(folder / "gpus", 1, model="H100", health="unhealthy", reason="XID 79")
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


@pytest.mark.parametrize("scene", scenes(Path(__file__).with_name("views.txt")), ids=str)
def test_views(crowd: Manager, scene: Scene, tmp_path: Path) -> None:
    scene.play(tmp_path, crowd.environment, HOST=crowd.host)


def test_watch_of_an_unknown_host_says_so_and_waits_for_it(crowd: Manager) -> None:
    with crowd.popen("watch", "--host", "nope") as process:
        try:
            assert process.stderr is not None
            assert "host 'nope' is unknown" in process.stderr.readline()
            assert process.poll() is None
        finally:
            process.kill()


def test_watch_shows_the_run_that_is_named(crowd: Manager) -> None:
    key = next(f"{each['host']}/late/{each['incarnation']}" for each in crowd.records() if each["worker"] == "late")
    with crowd.popen("watch", key, "--json") as watching:
        assert json.loads(watching.stdout.readline())["key"] == key
        watching.terminate()


def test_status_shows_live_ones_first_and_of_those_that_are_over_the_last(manager: Manager) -> None:
    for number in range(22):
        manager.outfitter("register", "--worker", f"w{number}", "--resource", "gpu=9", "--wait", "10")
    manager.outfitter("register", "--worker", "live", "--wait", "10", "--lease", "none")
    done = manager.outfitter("status")
    workers = [line.split()[1] for line in done.stdout.splitlines()[1:-1]]
    assert workers == ["live", *(f"w{number}" for number in range(21, 1, -1))]
    assert "and 2 more that ended or failed: --all shows them" in done.stderr
    assert len(manager.outfitter("status", "--all").stdout.splitlines()) == 25
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
    assert "gpu: 2 of 2 free, 0 held\n" in manager.outfitter("devices").stdout
    add_device(tmp_path / "gpus", 0, health="unhealthy", reason="XID 79")
    (tmp_path / "gpus/gpu1").unlink()
    told = "gpu: 0 of 2 free, 0 healthy, 2 held (2 of them ill), 1 unhealthy, 1 unknown\n"
    manager.wait_for(lambda: told in manager.outfitter("devices").stdout)

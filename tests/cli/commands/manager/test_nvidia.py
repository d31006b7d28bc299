"""`outfitter nvidia release`: while its command runs, no manager has NVML open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from outfitter_drivers.nvidia import process, release
from outfitter_drivers.nvidia.driver import NvmlDriver
from outfitter_drivers.nvidia.testing import FakeGpu, FakeMachine
from outfitter_proto.records import Health
from outfitter_service.cli.commands.manager import nvidia
from support.polling import until
from support.processes import command_line

LONG_S = 60.0
LAUNCH = """
import sys
from outfitter_drivers.nvidia import release
from outfitter_service.cli import main
release.MODULE = {!r}
main(sys.argv[1:])
"""


def releasing(machine: FakeMachine, *command: str) -> list[str]:
    """The command, which takes no NVML process but that of this machine for one: other tests have some, too."""
    return [sys.executable, "-c", LAUNCH.format(str(machine.path)), "nvidia", "release", *command]


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path, [FakeGpu(0), FakeGpu(1)])


@asynccontextmanager
async def driving(machine: FakeMachine) -> AsyncIterator[NvmlDriver]:
    driver = machine.driver(timeout=LONG_S, poll_interval=0.2)
    try:
        yield driver
    finally:
        await driver.aclose()


async def health_becomes(driver: NvmlDriver, health: Health) -> None:
    """Look as a manager does, until the GPUs are of that health."""
    with anyio.fail_after(LONG_S):
        while {device.health for device in await driver.look()} != {health}:
            await driver.until_next_look()


async def until_there(file: Path) -> None:
    with anyio.fail_after(LONG_S):
        while not file.exists():  # noqa: ASYNC110  another process makes it
            await anyio.sleep(0.01)


async def test_a_manager_lets_go_while_the_command_runs_and_looks_anew_afterwards(machine: FakeMachine) -> None:
    async with driving(machine) as driver:
        await driver.look()
        hold = machine.folder / "hold"
        hold.mkdir()
        wait = f"touch {hold}/runs; while ! [ -e {hold}/end ]; do sleep 0.05; done; exit 7"
        command = await anyio.open_process(releasing(machine, "--", "sh", "-c", wait))
        await health_becomes(driver, Health.UNKNOWN)
        (device, *_) = await driver.look()
        assert device.reason == f"the GPUs were let go of for process {command.pid} (outfitter nvidia release)"
        assert driver.nvml.pid is None
        await until_there(hold / "runs")
        (hold / "end").touch()
        assert await command.wait() == 7
        await command.aclose()
        await health_becomes(driver, Health.HEALTHY)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_is_the_commands_and_managers_wait_for_its_end(machine: FakeMachine, number: int) -> None:
    async with driving(machine) as driver:
        await driver.look()
        hold = machine.folder / "hold"
        hold.mkdir()
        told = f"trap 'touch {hold}/told' TERM HUP; touch {hold}/runs; "
        wait = f"{told} while ! [ -e {hold}/end ]; do sleep 0.05; done; exit 7"
        command = await anyio.open_process(releasing(machine, "--", "sh", "-c", wait))
        await until_there(hold / "runs")
        command.send_signal(number)
        await until_there(hold / "told")
        await driver.look()
        assert driver.nvml.pid is None
        (hold / "end").touch()
        assert await command.wait() == 7
        await command.aclose()


def test_a_signal_that_comes_while_the_command_starts_is_the_commands_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = subprocess.Popen

    def popen(command: tuple[str, ...]) -> subprocess.Popen[bytes]:
        process = started(command)
        until((tmp_path / "runs").exists, lambda: "the command does not run")
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(nvidia.subprocess, "Popen", popen)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        wait = f"trap 'exit 9' TERM; touch {tmp_path}/runs; while :; do sleep 0.05; done"
        assert nvidia._run(("sh", "-c", wait)) == 9
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def test_a_release_that_is_killed_leaves_nothing_behind(machine: FakeMachine) -> None:
    async with driving(machine) as driver:
        await driver.look()
        command = await anyio.open_process(releasing(machine, "sleep", "1000"), start_new_session=True)
        await health_becomes(driver, Health.UNKNOWN)
        command.kill()
        await command.wait()
        await command.aclose()
        await health_becomes(driver, Health.HEALTHY)


def test_a_manager_that_starts_meanwhile_and_cannot_be_asked_is_warned_of_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the command of `outfitter` ended, all managers would look anew at what its command still resets."""
    asked: list[int] = []

    def refuse(pid: int) -> None:
        asked.append(pid)
        if len(asked) > 1:
            (tmp_path / "end").touch()
        raise release.RefusedError(f"process {pid} is another user's")

    numbers = iter(range(1, 1000))
    monkeypatch.setattr(release, "ask", refuse)
    monkeypatch.setattr(release, "nvml_processes", lambda: [4711, 4711 + next(numbers)])
    monkeypatch.setattr(nvidia, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process's are pytest's
    wait = f"while ! [ -e {tmp_path}/end ]; do sleep 0.01; done; exit 7"
    assert nvidia._run(("sh", "-c", wait)) == 7
    assert asked.count(4711) == 1
    assert "process 4711 is another user's" in capsys.readouterr().err


def test_a_command_that_does_not_exist_lets_nobody_go(tmp_path: Path) -> None:
    ended = command_line.outfitter("nvidia", "release", "/no/such/program", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (127, "")
    assert "/no/such/program: not found" in ended.stderr


def test_only_nvml_processes_are_asked() -> None:
    other = [sys.executable, "-c", "print(flush=True); input()", "-m", "outfitter_drivers.nvidia.children"]
    with (
        subprocess.Popen(process.COMMAND, stdin=subprocess.PIPE) as ours,
        subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as theirs,
    ):
        assert theirs.stdout is not None
        theirs.stdout.readline()
        # a process has no command line yet when Popen returns
        until(lambda: ours.pid in release.nvml_processes(), lambda: f"{ours.pid} is not found")
        assert theirs.pid not in release.nvml_processes()
        for each in (ours, theirs):
            each.kill()


def test_who_has_a_node_open_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "nvidia0"
    node.touch()
    monkeypatch.setattr(release, "NODES", f"{tmp_path}/nvidia")
    with (
        node.open(),
        subprocess.Popen(
            [sys.executable, "-c", f"f = open({str(node)!r}); print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as reader,
    ):
        assert reader.stdout is not None
        reader.stdout.readline()
        assert release.Holder(reader.pid, Path(sys.executable).name) in release.holders()
        reader.kill()

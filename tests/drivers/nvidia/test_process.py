"""The NVML process is asked within a deadline, abandoned, replaced and let go of. It is a real process here."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from outfitter_drivers.api import TemporaryDriverError
from outfitter_drivers.nvidia import process
from outfitter_drivers.nvidia.process import NvmlProcess, ReleasedError, UnusableError
from outfitter_drivers.nvidia.testing import FakeGpu, FakeMachine
from outfitter_drivers.script import HangingError

LONG_S = 60.0
BEYOND_SELECT = 1024
"""The first descriptor that select(2) does not take."""


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path, [FakeGpu(0), FakeGpu(1)])


@asynccontextmanager
async def asking(command: FakeMachine | tuple[str, ...]) -> AsyncIterator[NvmlProcess]:
    nvml = NvmlProcess(command.command if isinstance(command, FakeMachine) else command, timeout=LONG_S)
    try:
        yield nvml
    finally:
        await nvml.aclose()


def python(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", program


async def test_one_process_answers_all_looks(machine: FakeMachine) -> None:
    async with asking(machine) as nvml:
        for _ in range(3):
            assert len((await nvml.look()).gpus) == 2
        assert nvml.starts == 1


async def test_a_process_that_hangs_is_killed_and_the_next_request_starts_another_one(machine: FakeMachine) -> None:
    async with asking(machine) as nvml:
        await nvml.look()
        machine.change(hangs=True)
        nvml.timeout = 0.05
        with pytest.raises(TemporaryDriverError, match=r"NVML did not answer within 0\.05 s; its process was killed"):
            await nvml.look()
        machine.change(hangs=False)
        nvml.timeout = LONG_S
        assert len((await nvml.look()).gpus) == 2
        assert nvml.starts == 2


async def test_while_a_killed_process_hangs_in_the_kernel_no_other_one_is_started(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(machine) as nvml:
        await nvml.look()
        machine.change(hangs=True)
        monkeypatch.setattr(process, "kill", lambda _process: None)  # as in the kernel's state D
        monkeypatch.setattr(process, "_END_S", 0.05)
        nvml.timeout = 0.05
        with pytest.raises(TemporaryDriverError, match="did not answer"):
            await nvml.look()
        for _ in range(3):
            with pytest.raises(HangingError, match=r"the NVML process \d+ has hung since .*: it was killed, but"):
                await nvml.look()
        assert nvml.starts == 1
        machine.change(hangs=False)  # its input has ended, so that it ends now
        nvml.timeout = LONG_S
        with anyio.fail_after(LONG_S):
            while True:
                try:
                    await nvml.look()
                    break
                except HangingError:
                    await anyio.sleep(0.01)
        assert nvml.starts == 2
        monkeypatch.undo()


@pytest.mark.parametrize("code", [9, 18])
async def test_only_a_new_process_can_load_another_driver(machine: FakeMachine, code: int) -> None:
    async with asking(machine) as nvml:
        await nvml.look()
        machine.change(codes={"nvmlDeviceGetCount_v2": code})
        with pytest.raises(TemporaryDriverError, match=rf"^NVML: .* \(NVML code {code}\)$"):
            await nvml.look()
        machine.change(codes={})
        await nvml.look()
        assert nvml.starts == 2


async def test_an_unknown_error_after_a_good_start_needs_a_new_process_and_before_it_none(machine: FakeMachine) -> None:
    async with asking(machine) as nvml:
        machine.change(init=999)
        for _ in range(2):
            with pytest.raises(TemporaryDriverError, match="unknown error"):
                await nvml.look()
        assert nvml.starts == 1
        machine.change(init=0)
        await nvml.look()
        assert nvml.starts == 1
        machine.change(codes={"nvmlDeviceGetCount_v2": 999})
        with pytest.raises(TemporaryDriverError, match="unknown error"):
            await nvml.look()
        machine.change(codes={})
        await nvml.look()
        assert nvml.starts == 2


async def test_without_nvidias_library_nvml_is_unusable(machine: FakeMachine) -> None:
    machine.change(init=12)
    async with asking(machine) as nvml:
        with pytest.raises(UnusableError, match=r"there is no NVML library \(libnvidia-ml\.so\.1\)"):
            await nvml.look()


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("def nvmlInit(): pass", "is not that of nvidia-ml-py 12.560 or newer, but of another or an older package"),
        ("raise ImportError('no')", r"the package nvidia-ml-py is not there \(no\); install outfitter\[nvidia\]"),
    ],
)
async def test_another_package_of_that_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, says: str
) -> None:
    (tmp_path / "pynvml.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    async with asking(process.COMMAND) as nvml:
        with pytest.raises(UnusableError, match=says):
            await nvml.look()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import sys; sys.exit(3)", "the NVML process ended with code 3"),
        ("import os; os.kill(os.getpid(), 11)", "the NVML process was killed by signal 11"),
        ("print('hello', flush=True); input(); input()", "the NVML process wrote no answer"),
        ("print('{\"id\": 1}', flush=True); input(); input()", "the NVML process wrote no answer"),
        ("print('x' * 9_000_000, flush=True); input(); input()", "the NVML process wrote no answer"),
    ],
)
async def test_a_process_that_ends_or_babbles_is_an_error_and_is_replaced(program: str, says: str) -> None:
    async with asking(python(program)) as nvml:
        for _ in range(2):
            with pytest.raises(TemporaryDriverError, match=says):
                await nvml.look()
        assert nvml.starts == 2


async def test_a_process_that_cannot_be_started_is_an_error() -> None:
    async with asking(("/no/such/program",)) as nvml:
        with pytest.raises(TemporaryDriverError, match="cannot start the NVML process: No such file"):
            await nvml.look()


async def test_the_answer_to_a_cancelled_request_is_passed_over(machine: FakeMachine) -> None:
    async with asking(machine) as nvml:
        await nvml.look()
        machine.change(answer_s=0.1)
        with anyio.move_on_after(0.01) as scope:
            await nvml.look()
        machine.change(answer_s=0.0, driver_version="580.65.06")
        assert (await nvml.look()).driver_version == "580.65.06"
        assert scope.cancelled_caught
        assert nvml.starts == 1


async def test_events_are_told_as_they_come_with_the_gpu_that_they_are_about(machine: FakeMachine) -> None:
    async with asking(machine) as nvml:
        await nvml.look()
        assert await nvml.wait(0) == ()
        machine.xid(79, 1)
        machine.xid(13, 0, gpu_instance=2, compute_instance=0)
        first, second = await nvml.wait(1)
        assert (first.uuid, first.xid, first.gpu_instance) == (machine.state.gpus[1].uuid, 79, None)
        assert (second.uuid, second.xid, second.gpu_instance) == (machine.state.gpus[0].uuid, 13, 2)


# --- letting go ---


@pytest.fixture
def somebody() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sends its signal to the processes that it reads the numbers of, and stays."""
    program = "import os, signal, sys\nfor line in sys.stdin: os.kill(int(line), signal.SIGUSR1)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as sender:
        yield sender
        sender.kill()


async def waiting_for_ever(nvml: NvmlProcess) -> None:
    while True:
        await nvml.wait(0.1)


async def test_on_a_signal_the_gpus_are_let_go_of_until_its_sender_has_ended(
    machine: FakeMachine, somebody: subprocess.Popen[bytes]
) -> None:
    async with asking(machine) as nvml:
        await nvml.look()
        pid = nvml.pid
        assert pid is not None
        assert somebody.stdin is not None
        somebody.stdin.write(f"{pid}\n".encode())
        somebody.stdin.flush()

        with anyio.fail_after(LONG_S), pytest.raises(ReleasedError, match=f"for process {somebody.pid}"):
            await waiting_for_ever(nvml)
        assert nvml.pid is None
        for _ in range(2):
            with pytest.raises(ReleasedError):
                await nvml.look()
        assert (nvml.starts, nvml.releases) == (1, 1)
        somebody.send_signal(signal.SIGKILL)
        somebody.wait()
        await nvml.look()
        assert nvml.starts == 2


async def test_a_manager_with_many_files_open_lets_go_as_well_and_leaves_none_open(
    machine: FakeMachine, somebody: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * BEYOND_SELECT), limits[1]))
    opened, pidfds = os.pidfd_open, []

    def high(pid: int) -> int:
        low = opened(pid)
        pidfds.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, BEYOND_SELECT))
        os.close(low)
        return pidfds[-1]

    monkeypatch.setattr(process.os, "pidfd_open", high)
    try:
        async with asking(machine) as nvml:
            await nvml.look()
            assert somebody.stdin is not None
            somebody.stdin.write(f"{nvml.pid}\n".encode())
            somebody.stdin.flush()
            with anyio.fail_after(LONG_S), pytest.raises(ReleasedError):
                await waiting_for_ever(nvml)
            with pytest.raises(ReleasedError):
                await nvml.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for pidfd in pidfds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pidfd)


async def test_the_process_ends_with_its_manager(machine: FakeMachine) -> None:
    with subprocess.Popen(machine.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait() == 0

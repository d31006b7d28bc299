"""Who uses a GPU, as each look says: processes, nobody, or nobody can tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_drivers.api import (
    CannotTell,
    DeviceUser,
    DriverParams,
    ExternalResourceDriver,
    Grant,
    Users,
    Worker,
)
from outfitter_drivers.gpu.compute_processes import CheckingNvidiaDriver
from outfitter_drivers.gpu.factory import GPUDriverFactory
from outfitter_drivers.gpu.users import LONGEST_NAME, MOST_USERS, device_users
from outfitter_drivers.polling import PollingDriver
from outfitter_proto.records import Health
from outfitter_proto.support import processes
from support.drivers.gpu_machine import executable

Smi = Callable[..., None]

A, B = "GPU-aaaaaaaa-1111-2222-3333-444444444444", "GPU-bbbbbbbb-1111-2222-3333-444444444444"
ROWS = f"0, {A}, 1024, 00000000:19:00.0, NVIDIA H200\n1, {B}, 1024, 00000000:3B:00.0, NVIDIA H200\n"
SCRIPT = """
case "$*" in
*--query-gpu=*) cat "{folder}/gpus" ;;
*--query-compute-apps=*) echo asked >> "{folder}/asked"; cat "{folder}/processes"; exit $(cat "{folder}/code") ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """A machine with two GPUs whose nvidia-smi says this of processes."""
    executable(tmp_path / "bin/nvidia-smi", SCRIPT.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def says(processes: str, code: int = 0, gpus: str = ROWS) -> None:
        (tmp_path / "gpus").write_text(gpus)
        (tmp_path / "processes").write_text(processes)
        (tmp_path / "code").write_text(str(code))

    return says


def made(**params: str) -> ExternalResourceDriver:
    return GPUDriverFactory().create_external_resource_driver(DriverParams(params))


async def seen(driver: ExternalResourceDriver | None = None) -> list[Users | None]:
    """Who uses each device, by a look."""
    driver = driver or made()
    assert isinstance(driver, PollingDriver)
    return [device.users for device in await driver.look()]


async def test_a_look_names_the_processes_of_each_gpu(smi: Smi) -> None:
    smi(f"{A}, 4711, /opt/my, strange/python3\n{A}, 17, /usr/bin/nvidia-cuda-mps-server\n{A}, 99, julia\n")
    assert await seen() == [
        (DeviceUser(pid=99, program="julia"), DeviceUser(pid=4711, program="python3")),
        (),
    ]


async def test_two_looks_at_the_same_processes_are_equal_whatever_their_order(smi: Smi) -> None:
    rows = [f"{A}, {pid}, python{pid}\n" for pid in (30, 10, 20, 10)]
    smi("".join(rows))
    first = await seen()
    smi("".join(reversed(rows)))
    assert await seen() == first


@pytest.mark.parametrize("pid", ["[Insufficient Permissions]", "[Not Found]", "0", "-1", "9" * 30])
async def test_a_process_that_has_no_pid_is_somebody_without_a_name(smi: Smi, pid: str) -> None:
    smi(f"{A}, {pid}, [Insufficient Permissions]\n{A}, 5, python3\n")
    assert await seen() == [
        (DeviceUser(pid=5, program="python3"), DeviceUser(program="[Insufficient Permissions]")), (),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "code", "why"),
    [
        ("Not Supported\n", 3, "nvidia-smi knows no processes here: Not Supported"),
        ("Failed to initialize NVML: Unknown Error\n", 255, "nvidia-smi ended with exit code 255"),
        ("Segmentation fault\n", 139, "nvidia-smi ended with exit code 139"),
        ("", 1, "nvidia-smi ended with exit code 1"),
        ("MIG-aaaaaaaa-1111-2222-3333-444444444444, 5, python3\n", 0, "nvidia-smi ended with exit code 0"),
    ],
)
async def test_an_answer_that_is_not_whole_leaves_it_open_who_uses_a_gpu_and_the_gpu_well(
    smi: Smi, processes: str, code: int, why: str
) -> None:
    smi(processes, code)
    driver = made()
    assert isinstance(driver, CheckingNvidiaDriver)
    for device in await driver.look():
        assert device.health is Health.HEALTHY
        assert isinstance(device.users, CannotTell)
        assert device.users.reason.startswith(why)


async def test_a_process_with_a_row_counts_whatever_else_is_printed(smi: Smi) -> None:
    smi(f"{A}, 4711, python3\nSegmentation fault\n", 139)
    first, second = await seen()
    assert first == (DeviceUser(pid=4711, program="python3"),)
    assert isinstance(second, CannotTell)


async def test_a_call_that_takes_too_long_leaves_it_open_who_uses_a_gpu(tmp_path: Path, smi: Smi) -> None:
    smi("")
    executable(
        tmp_path / "bin/nvidia-smi",
        f'case "$*" in *--query-gpu=*) cat {tmp_path}/gpus ;; *) exec sleep 1000 ;; esac',
    )
    driver = made(**{"discovery-script.timeout": "300ms"})
    for users in await seen(driver):
        assert isinstance(users, CannotTell)
        assert "did not end within 0.3 s" in users.reason


async def test_a_gpu_without_a_uuid_cannot_be_asked_about(smi: Smi) -> None:
    smi("", gpus="0, [N/A], [N/A], [N/A], Orin (nvgpu)\n")
    (users,) = await seen()
    assert isinstance(users, CannotTell)
    assert "no UUID" in users.reason


async def test_in_a_pid_namespace_of_its_own_an_empty_answer_says_nothing(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "INITIAL_PID_NAMESPACE", 1)
    smi(f"{A}, 4711, python3\n")
    first, second = await seen()
    assert first == (DeviceUser(pid=4711, program="python3"),)
    assert isinstance(second, CannotTell)
    assert "PID namespace of its own" in second.reason
    smi("")
    driver = made()
    assert isinstance(driver, CheckingNvidiaDriver)
    worker = Worker(host="h", resource="gpu", worker="w", incarnation="1")
    grant = Grant(allocation="h/w/1", token=1, worker=worker, device_ids=(A,), devices=({"index": "0", "uuid": A},))
    assert await driver.in_use(grant) == second


async def test_without_the_check_no_look_asks_for_processes(tmp_path: Path, smi: Smi) -> None:
    smi(f"{A}, 4711, python3\n")
    assert await seen(made(**{"in-use-check": "false"})) == [None, None]
    assert not (tmp_path / "asked").exists()


async def test_gpus_that_are_chosen_by_index_have_users_too(smi: Smi) -> None:
    smi(f"{B}, 4711, python3\n")
    assert await seen(made(**{"visible-devices": "index"})) == [(), (DeviceUser(pid=4711, program="python3"),)]


PROCESSES = st.lists(st.tuples(st.one_of(st.none(), st.integers(-2, 300)), st.one_of(st.none(), st.text(max_size=99))))


@given(PROCESSES)
def test_the_users_of_a_device_are_few_printable_and_in_one_order(
    listed: list[tuple[int | None, str | None]],
) -> None:
    users = device_users(listed)
    assert isinstance(users, tuple)
    assert len(users) <= MOST_USERS + 1
    pids = [user.pid for user in users if user.pid is not None]
    assert pids == sorted(set(pids))
    for user in users:
        assert user.program is None or (user.program.isprintable() and 0 < len(user.program) <= LONGEST_NAME)
    named = {pid for pid, path in listed if pid and pid > 0}
    assert set(pids) <= named
    assert len(pids) == min(len(named), MOST_USERS)


def test_that_nobody_can_tell_stays_so() -> None:
    said = CannotTell("NVML: Insufficient Permissions")
    assert device_users(said) is said

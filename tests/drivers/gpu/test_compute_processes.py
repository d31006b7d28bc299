"""A GPU on which a process still computes is not lent again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from outfitter_drivers.api import (
    CannotTell,
    DriverParams,
    Grant,
    InUseCheck,
    PermanentDriverError,
    TemporaryDriverError,
    Worker,
)
from outfitter_drivers.gpu.factory import GPUDriverFactory
from outfitter_proto.support.processes import sees_all_processes
from outfitter_service.runtime.drivers.running_processes import user_name
from support.drivers.gpu_machine import executable, nvidia_smi
from support.managers.process import StartManager
from support.processes.families import families

Smi = Callable[..., None]

A, B = "GPU-aaaaaaaa-1111-2222-3333-444444444444", "GPU-bbbbbbbb-1111-2222-3333-444444444444"
GRANT = Grant(
    allocation="h/w/1",
    token=1,
    worker=Worker(host="h", resource="gpu", worker="w", incarnation="1", owner_pid=42),
    device_ids=(A,),
    devices=({"index": "0", "uuid": A, "pci.bus_id": "0000:19:00.0"},),
    is_given_back=True,
)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    def install(output: str, exit_code: int = 0) -> None:
        monkeypatch.setenv("PATH", f"{nvidia_smi(tmp_path, output, exit_code=exit_code)}:{os.environ['PATH']}")

    return install


async def user(grant: Grant = GRANT) -> str | CannotTell | None:
    driver = GPUDriverFactory().create_external_resource_driver(DriverParams({}))
    assert isinstance(driver, InUseCheck)
    return await driver.in_use(grant)


async def untold(grant: Grant = GRANT) -> str:
    """Why nobody can tell."""
    answer = await user(grant)
    assert isinstance(answer, CannotTell), answer
    return answer.reason


async def test_a_process_on_a_device_of_the_grant_is_named_and_others_do_not_count(smi: Smi) -> None:
    smi(f"{B}, 99, /usr/bin/other\n{A}, 4711, /opt/my, strange/python3\n{A}, 4711, /opt/my, strange/python3\n")
    assert await user() == f"process 4711 (python3) on {A}"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        f"{A}, 17, /usr/bin/nvidia-cuda-mps-server\n",
        f"{A}\n",
        "No running processes found\n",
        f"{A}, [N/A], [N/A]\n",
        f"{A}, 42, /usr/bin/python3\n",
    ],
)
async def test_a_device_without_a_compute_process_is_free(smi: Smi, answer: str) -> None:
    smi(answer)
    assert await user() is None


async def test_the_owner_counts_unless_it_has_given_the_devices_back(smi: Smi) -> None:
    """A lease may end while the owner computes."""
    smi(f"{A}, 42, /usr/bin/python3\n")
    assert await user(structs.replace(GRANT, is_given_back=False)) == f"process 42 (python3) on {A}"


async def test_only_the_first_of_many_processes_are_named_without_signs_that_a_terminal_obeys(smi: Smi) -> None:
    smi("".join(f"{A}, {pid}, /bin/\x1b[2J{'x' * 500}\n" for pid in range(1000, 2000)))
    said = await user()
    assert said is not None
    assert said.endswith(" and 996 more")
    assert said.isprintable()
    assert len(said) < 600


@pytest.mark.parametrize(
    "answer",
    ['Field "gpu_uuid" is not a valid field to query.\n', "Not Supported\n", "No devices were found\n"],
)
async def test_a_device_is_not_held_for_ever_where_nvidia_smi_cannot_know(smi: Smi, answer: str) -> None:
    smi(answer, exit_code=2)
    assert await untold() == f"nvidia-smi knows no processes here: {answer.strip()}"


async def test_on_a_lost_gpu_nobody_computes(smi: Smi) -> None:
    smi("Unable to determine the device handle for GPU0000:19:00.0: GPU is lost.\n", exit_code=2)
    assert await user() is None


async def test_a_lost_gpu_hides_no_process_on_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "Unable to determine the device handle for GPU0000:19:00.0: GPU is lost."
    executable(
        tmp_path / "bin/nvidia-smi",
        f'case "$*" in *{A}*) echo "{lost}"; exit 15 ;; *) echo "{B}, 4711, python3" ;; esac',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    other = {"index": "1", "uuid": B, "pci.bus_id": "0000:3b:00.0"}
    assert await user(structs.replace(GRANT, devices=(*GRANT.devices, other))) == f"process 4711 (python3) on {B}"


async def test_a_lost_gpu_of_others_leaves_it_unknown_who_uses_this_one(smi: Smi) -> None:
    smi("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\n", exit_code=15)
    with pytest.raises(TemporaryDriverError, match="GPU is lost"):
        await user()


async def test_a_failing_nvidia_smi_says_nothing_about_a_device_so_it_stays_held(smi: Smi) -> None:
    smi("Failed to initialize NVML: Driver/library version mismatch\n", exit_code=18)
    with pytest.raises(TemporaryDriverError, match="version mismatch"):
        await user()


async def test_a_machine_without_nvidia_smi_says_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PermanentDriverError, match="nvidia-smi"):
        await user()


async def test_a_device_without_a_uuid_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    by_index = structs.replace(GRANT, devices=({"index": "0"},))
    assert "a GPU has no UUID" in await untold(by_index)


async def test_a_device_without_a_uuid_leaves_it_open_who_uses_the_grant(smi: Smi) -> None:
    smi("")
    both = structs.replace(GRANT, devices=(*GRANT.devices, {"index": "1"}))
    assert "a GPU has no UUID" in await untold(both)
    smi(f"{A}, 4711, python3\n")
    assert await user(both) == f"process 4711 (python3) on {A}"


# --- answers that do not tell for sure ---

WARNING = "WARNING: infoROM is corrupted at gpu 0000:19:00.0"
LOST_A = "Unable to determine the device handle for GPU 0000:19:00.0: GPU is lost. Reboot the system."
ON_B = structs.replace(GRANT, device_ids=(B,), devices=({"index": "1", "uuid": B, "pci.bus_id": "0000:3b:00.0"},))
BOTH = structs.replace(GRANT, device_ids=(A, B), devices=(*GRANT.devices, *ON_B.devices))


@pytest.fixture
def ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """An nvidia-smi that prints a text without a line's end, and ends by these words of a shell."""

    def install(output: str, end: str) -> None:
        (tmp_path / "answer").write_text(output)
        executable(tmp_path / "bin/nvidia-smi", f"cat {tmp_path}/answer\n{end}")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return install


@pytest.mark.parametrize("output", ["", WARNING, f"{WARNING}\n", f"{B}, 99, other\n", "Not Supported\n"])
@pytest.mark.parametrize("end", ["kill -SEGV $$", "kill -KILL $$", "exit 1", "exit 137", "exit 139", "exit 15"])
@pytest.mark.parametrize("grant", [GRANT, BOTH])
async def test_an_nvidia_smi_that_did_not_end_well_has_not_told_of_all_processes(
    ending: Smi, output: str, end: str, grant: Grant
) -> None:
    ending(output, end)
    if grant is BOTH and B in output:
        assert await user(grant) == f"process 99 (other) on {B}"
        return
    with pytest.raises(TemporaryDriverError, match="nvidia-smi"):
        await user(grant)


@pytest.mark.parametrize(
    "words",
    [
        "Insufficient Permissions",
        "Segmentation fault",
        "Segmentation fault (core dumped)",
        "Killed",
        "something new",
        "0, 4711, python3",
        "gpu_uuid, pid",
        f"{WARNING} Segmentation fault",
        "Failed to initialize NVML: Not Supported",
        "Insufficient Permissions: Not Supported",
        "MIG-aaaaaaaa-1111-2222-3333-444444444444, 5, python3",
        f"{B}, 99, other\nNot Supported",
        "GPU 0000:19:00.0: Insufficient Permissions",
        "Unable to query the processes of GPU 0000:19:00.0: Timeout",
        "Unable to determine the device handle for GPU 0000:19:00.0: Insufficient Permissions",
    ],
)
@pytest.mark.parametrize("place", ["", ">&2"])
async def test_words_that_nobody_knows_do_not_say_that_nobody_computes(ending: Smi, words: str, place: str) -> None:
    for code in (0, 14):
        ending(f"{words}\n", f"cat $(dirname $0)/../answer {place}; exit {code}")
        with pytest.raises(TemporaryDriverError, match="nvidia-smi ended with exit code"):
            await user()


@pytest.mark.parametrize(
    "output",
    [
        f"{WARNING} {A}, 777, /opt/leftover",
        f"{WARNING}{A}, 777, /opt/leftover\n",
        f"{B}, 99, /opt/other{A}, 777, /opt/leftover\n",
        f"{B}, 99, /opt/other {A}, 777, /opt/leftover\n",
        f"No running processes found{A}, 777, /opt/leftover",
        f"\ufeff{A}, 777, /opt/leftover",
        f"{A}\t777\t/opt/leftover\n",
        f'"{A}", "777", "/opt/leftover"\n',
        f'"{A}","777","/opt/leftover"\n',
        f"{A};777;/opt/leftover\n",
        f"{A} 777 /opt/leftover\n",
        f"{WARNING} {A} 777 /opt/leftover\n",
        f"{A.upper()}, 777, /opt/leftover\n",
        f"{A.lower()}, 777, /opt/leftover\n",
    ],
)
async def test_a_row_counts_wherever_and_however_it_is_printed(ending: Smi, output: str) -> None:
    for end in ("exit 0", "exit 14", "exit 139", "kill -SEGV $$"):
        ending(output, end)
        assert await user() == f"process 777 (leftover) on {A}"


@pytest.mark.parametrize("row", [f"{A}, 777", f"{A}\t777\n", f'"{A}","777"\n', f"{A.upper()},777,\n"])
async def test_a_process_without_a_name_counts(ending: Smi, row: str) -> None:
    ending(row, "exit 0")
    assert await user() == f"process 777 on {A}"


@pytest.mark.parametrize(
    ("output", "code"),
    [
        (f"{LOST_A}\n", 0),
        (f"{LOST_A}\n", 14),
        (f"{LOST_A}\nNo devices were found\n", 6),
        (f"No devices were found\n{LOST_A}\n", 0),
        (f"{WARNING}\n{LOST_A}\n", 14),
        (f"{A}: GPU requires reset\n", 0),
    ],
)
async def test_what_is_said_of_one_gpu_tells_nothing_of_another(ending: Smi, output: str, code: int) -> None:
    ending(output, f"exit {code}")
    assert await user() is None
    for grant in (ON_B, BOTH):
        with pytest.raises(TemporaryDriverError, match=f"nvidia-smi ended with exit code {code}"):
            await user(grant)


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("Unable to determine the device handle for GPU 0000:19:00.0: Not Supported", 15),
        ("GPU 0000:19:00.0: Not Supported", 3),
    ],
)
async def test_that_processes_are_not_known_on_one_gpu_tells_nothing_of_another(
    ending: Smi, output: str, code: int
) -> None:
    ending(output, f"exit {code}")
    assert await untold() == f"nvidia-smi knows no processes on it: {output}"
    for grant in (ON_B, BOTH):
        with pytest.raises(TemporaryDriverError, match=f"nvidia-smi ended with exit code {code}"):
            await user(grant)


@pytest.mark.parametrize("code", [0, 2, 3, 6, 13])
@pytest.mark.parametrize("output", ["Not Supported\n", "No devices were found\n", f"{WARNING}\nNot Supported\n"])
async def test_an_nvidia_smi_that_knows_no_processes_holds_nothing(ending: Smi, output: str, code: int) -> None:
    ending(output, f"exit {code}")
    assert (await untold(BOTH)).startswith("nvidia-smi knows no processes here: ")


def test_the_check_can_be_turned_off() -> None:
    factory = GPUDriverFactory()
    assert not isinstance(factory.create_external_resource_driver(DriverParams({"in-use-check": "false"})), InUseCheck)
    with pytest.raises(ValueError, match="in-use-check"):
        factory.create_external_resource_driver(DriverParams({"in-use-check": "perhaps"}))


SMI = """
case "$*" in
*--query-gpu=*) echo "0, {uuid}, 1024, 00000000:19:00.0, NVIDIA H200" ;;
*--query-compute-apps=*) cat "{folder}/processes" ;;
esac
"""


def test_who_still_computes_keeps_the_gpu_from_the_next_worker_and_is_named(
    start_manager: StartManager, tmp_path: Path
) -> None:
    processes = tmp_path / "processes"
    processes.write_text(f"{A}, 4711, /usr/bin/python3\n")
    executable(tmp_path / "bin/nvidia-smi", SMI.format(uuid=A, folder=tmp_path))
    config = 'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver-factory.class = "gpu"\n'
    manager = start_manager(config, variables={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    assert manager.outfitter("run", "--worker", "first", "--", "true").returncode == 0
    manager.outfitter("register", "--worker", "next", "--lease", "none")
    manager.wait_for(lambda: "delayed_by" in (manager.record("first") or {}))
    assert f"still in use by process 4711 (python3) on {A}" in manager.outfitter("explain", "next").stdout
    processes.write_text("")
    manager.wait_for_state("next", "allocated")


@pytest.mark.skipif(not sees_all_processes(), reason="a manager in a container cannot tell whose process it is")
def test_a_gpu_on_which_a_stranger_computes_is_lent_to_nobody_and_people_read_who_it_is(
    start_manager: StartManager, tmp_path: Path
) -> None:
    processes = tmp_path / "processes"
    executable(tmp_path / "bin/nvidia-smi", SMI.format(uuid=A, folder=tmp_path))
    config = (
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver-factory.class = "gpu"\n'
        'param.poll-interval = "200ms"\n'
    )
    with families(1) as (family,):
        processes.write_text(f"{A}, {family.child}, /usr/bin/python3\n")
        manager = start_manager(config, variables={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
        manager.outfitter("register", "--worker", "w", "--lease", "none")
        manager.wait_for(lambda: (manager.record("w") or {}).get("reason_code") == "used-by-stranger")
        words = f"used by process {family.child} (python3) of {user_name(os.getuid())}, which Outfitter did not lend to"
        for command in (["explain", "w"], ["devices"], ["status"]):
            assert words in manager.outfitter(*command).stdout
        processes.write_text("")
        manager.wait_for_state("w", "allocated")
        assert words not in manager.outfitter("devices").stdout

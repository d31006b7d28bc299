"""What nvidia-smi says beside its rows costs the GPU that it names, and no other."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_drivers.api import (
    Device,
    DriverParams,
    ExternalResourceDriver,
    Grant,
    InUseCheck,
    TemporaryDriverError,
    Worker,
)
from outfitter_drivers.gpu.factory import GPUDriverFactory
from outfitter_drivers.gpu.nvidia import NvidiaDriver
from outfitter_drivers.script import ScriptOutcome
from outfitter_proto.records import Health
from support.drivers.gpu_machine import answer, discovery, executable
from support.managers.process import StartManager

A, B, C = (f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "abc")
ROW_A = f"0, {A}, 81559, 00000000:1A:00.0, NVIDIA H100\n"
ROW_B = f"1, {B}, 81559, 00000000:40:00.0, NVIDIA H100\n"
WARNING = "WARNING: infoROM is corrupted at gpu 0000:40:00.0\n"
LOST_B = "Unable to determine the device handle for GPU1: 0000:40:00.0: Unknown Error\n"

Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """An nvidia-smi that answers each question with these two outputs and this exit code."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def install(stdout: str, stderr: str = "", code: int = 0) -> None:
        write_smi(tmp_path, stdout, stderr, code)

    return install


def write_smi(folder: Path, stdout: str, stderr: str = "", code: int = 0) -> None:
    (folder / "out").write_text(stdout)
    (folder / "err").write_text(stderr)
    (folder / "code").write_text(f"{code}\n")
    lines = f"cat {folder}/out; cat {folder}/err >&2; read code < {folder}/code; exit $code"
    if not (folder / "bin/nvidia-smi").exists():
        executable(folder / "bin/nvidia-smi", lines)


def driver() -> ExternalResourceDriver:
    return GPUDriverFactory().create_external_resource_driver(DriverParams({}))


async def look(asked: ExternalResourceDriver | None = None) -> dict[str, Device]:
    """The devices by their bus id."""
    asked = asked or driver()
    assert isinstance(asked, NvidiaDriver)
    return {device.properties["pci.bus_id"]: device for device in await asked.look()}


def health(devices: dict[str, Device]) -> dict[str, str]:
    return {bus_id: str(device.health) for bus_id, device in devices.items()}


GOOD = {"0000:1a:00.0": "healthy", "0000:40:00.0": "healthy"}
B_ILL = {"0000:1a:00.0": "healthy", "0000:40:00.0": "unhealthy"}


@pytest.mark.parametrize("code", [0, 14, 255])
@pytest.mark.parametrize(
    "outputs",
    [
        (ROW_A + ROW_B + WARNING, ""),
        (WARNING + ROW_A + ROW_B, ""),
        (ROW_A + WARNING + ROW_B, ""),
        (ROW_A + ROW_B, WARNING),
        (ROW_A + ROW_B, "warning: infoROM is corrupted at GPU 1\n"),
        (ROW_A + ROW_B, f"WARNING: infoROM is corrupted at {B}\n"),
        (ROW_A + ROW_B, "something else about gpu 0000:40:00.0 is odd\n"),
        (ROW_A + ROW_B, ""),
    ],
)
async def test_a_warning_costs_nothing_and_is_logged_once(
    smi: Smi, code: int, outputs: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    smi(*outputs, code)
    asked = driver()
    for _ in range(3):
        assert health(await look(asked)) == GOOD
    said = [record.getMessage() for record in caplog.records if "nvidia-smi says besides: " in record.getMessage()]
    assert len(said) == "".join(outputs).count("\n") - 2


LOSSES = [
    LOST_B,
    "Unable to determine the device handle for GPU0000:40:00.0: GPU is lost.  Reboot the system to recover this GPU\n",
    "Unable to determine the device handle for GPU 00000000:40:00.0: Unknown Error\n",
    "GPU 00000000:40:00.0 has fallen off the bus.\n",
    "NVRM: GPU at PCI:0000:40:00: the GPU is lost\n",
    "WARNING: GPU 0000:40:00.0 is lost\n",
    f"{B}: GPU requires reset\n",
    "GPU1: GPU is lost\n",
    "GPU 1: Unknown Error\n",
    f"[GPU is lost], {B}, 81559, 00000000:40:00.0, NVIDIA H100\n",
]


PLACES = list(itertools.product(("before", "after", "stderr"), ("one", "both", "none"), (0, 15)))


@pytest.mark.parametrize(
    ("loss", "place", "rows", "code"),
    [(LOST_B, *place) for place in PLACES]
    + [(loss, *place) for loss, place in zip(LOSSES[1:], itertools.cycle(PLACES))],
)
async def test_a_lost_gpu_is_unhealthy_alone_whatever_else_was_printed(
    smi: Smi, loss: str, place: str, rows: str, code: int
) -> None:
    printed = {"one": ROW_A, "both": ROW_A + ROW_B, "none": ""}[rows]
    outputs = {"before": (loss + printed, ""), "after": (printed + loss, ""), "stderr": (printed, loss)}[place]
    smi(ROW_A + ROW_B)
    asked = driver()
    assert health(await look(asked)) == GOOD
    smi(*outputs, code)
    seen = await look(asked)
    assert health(seen) == B_ILL
    assert loss.strip()[:40] in (seen["0000:40:00.0"].reason or "")
    assert seen["0000:40:00.0"].id == B
    smi(ROW_A + ROW_B + WARNING, "", 14)
    assert health(await look(asked)) == GOOD


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_lost_gpu_is_known_from_its_complaint_alone_at_the_first_look(smi: Smi, loss: str) -> None:
    smi(ROW_A, loss, 15)
    asked = driver()
    assert isinstance(asked, NvidiaDriver)
    good, ill = await asked.look()
    assert (good.id, good.health, ill.health) == (A, Health.HEALTHY, Health.UNHEALTHY)
    names = {ill.id, *ill.aliases, f"index {ill.properties.get('index')}"}
    assert names & {B, "pci:0000:40:00.0", "index 1"}
    smi(ROW_A + ROW_B)
    assert health(await look(asked)) == GOOD
    smi("", loss, 15)
    (only,) = await NvidiaDriver().look()
    assert only.health is Health.UNHEALTHY


async def test_complaints_split_over_lines_and_outputs_are_about_one_gpu(smi: Smi) -> None:
    smi(ROW_A + LOST_B + LOST_B, LOST_B + "GPU 0000:40:00.0 is lost\nReboot the system to recover this GPU\n", 15)
    assert health(await look()) == B_ILL


async def test_a_gpu_that_neither_a_row_nor_a_complaint_names_is_as_last_seen_or_unknown(smi: Smi) -> None:
    row_c = ROW_B.replace("1, ", "2, ", 1).replace(B, C).replace(":40:", ":5E:")
    smi(ROW_A + ROW_B + row_c)
    asked = driver()
    await look(asked)
    smi(ROW_A + LOST_B, code=15)
    assert health(await look(asked)) == {**B_ILL, "0000:5e:00.0": "healthy"}
    smi(ROW_A, code=9)
    seen = await look(asked)
    assert health(seen) == {"0000:1a:00.0": "healthy", "0000:40:00.0": "unknown", "0000:5e:00.0": "unknown"}
    assert "does not name it any more; it ended with exit code 9" in (seen["0000:40:00.0"].reason or "")
    smi(ROW_A)
    assert health(await look(asked)) == {"0000:1a:00.0": "healthy"}


async def test_an_answer_without_any_gpu_is_a_failure_that_shows_it(smi: Smi) -> None:
    for outputs in (("", "Failed to initialize NVML: Unknown Error\n"), ("Failed to initialize NVML\n", "")):
        for code in (0, 255):
            smi(*outputs, code)
            with pytest.raises(TemporaryDriverError, match="Failed to initialize NVML"):
                await look()


async def test_an_old_nvidia_smi_that_warns_is_asked_for_the_index_alone(smi: Smi, tmp_path: Path) -> None:
    smi(ROW_A + ROW_B)
    asked = driver()
    await look(asked)
    executable(
        tmp_path / "bin/nvidia-smi",
        f'case "$*" in *uuid*) echo "{WARNING.strip()}"; exit 14 ;; *) printf "0\\n1\\n"; exit 0 ;; esac',
    )
    assert isinstance(asked, NvidiaDriver)
    assert [(device.id, device.health) for device in await asked.look()] == [(A, "healthy"), (B, "healthy")]


@pytest.mark.parametrize(
    "value", ["[GPU is lost]", "[Unknown Error]", "ERR!", "[Timeout]", "Timeout", "Unknown Error", "GPU is lost"]
)
@pytest.mark.parametrize("field", ["81559", "NVIDIA H100"])
async def test_a_field_that_has_an_error_makes_its_gpu_unhealthy_also_beside_a_warning(
    smi: Smi, value: str, field: str
) -> None:
    smi(ROW_A + WARNING.replace("40", "1A") + ROW_B.replace(field, value), code=14)
    seen = await look()
    assert health(seen) == B_ILL
    assert value in (seen["0000:40:00.0"].reason or "")


# --- who computes ---


def grant(*uuids: str) -> Grant:
    known = {A: {"index": "0", "pci.bus_id": "0000:1a:00.0"}, B: {"index": "1", "pci.bus_id": "0000:40:00.0"}}
    return Grant(
        allocation="h/w/1",
        token=1,
        worker=Worker(host="h", resource="gpu", worker="w", incarnation="1", owner_pid=42),
        device_ids=uuids,
        devices=tuple({"uuid": uuid, **known[uuid]} for uuid in uuids),
        is_given_back=True,
    )


async def user(*uuids: str) -> str | None:
    asked = driver()
    assert isinstance(asked, InUseCheck)
    return await asked.in_use(grant(*uuids))


ABOUT_A = WARNING.replace("40:00", "1A:00")


@pytest.mark.parametrize("code", [14, 255])
@pytest.mark.parametrize("complaint", [ABOUT_A, WARNING, LOST_B, LOST_B.replace("GPU1: 0000:40", "GPU0: 0000:1A")])
@pytest.mark.parametrize("place", ["before", "after", "stderr"])
async def test_a_process_with_a_row_is_named_whatever_nvidia_smi_complains_of(
    smi: Smi, code: int, complaint: str, place: str
) -> None:
    row = f"{A}, 4711, python\n"
    smi(*{"before": (complaint + row, ""), "after": (row + complaint, ""), "stderr": (row, complaint)}[place], code)
    assert await user(A) == f"process 4711 (python) on {A}"
    assert await user(A, B) == f"process 4711 (python) on {A}"


@pytest.mark.parametrize("code", [0, 14])
@pytest.mark.parametrize("outputs", [(ABOUT_A, ""), (WARNING, ""), ("", WARNING), (f"{B}, 99, other\n{WARNING}", "")])
async def test_a_warning_does_not_hold_a_gpu_on_which_nobody_computes(
    smi: Smi, code: int, outputs: tuple[str, str]
) -> None:
    smi(*outputs, code)
    assert await user(A) is None


@pytest.mark.parametrize("code", [0, 255])
async def test_where_nvidia_smi_fails_nobody_knows_who_computes(smi: Smi, code: int) -> None:
    smi("", "Failed to initialize NVML: Unknown Error\n", code)
    with pytest.raises(TemporaryDriverError, match="Failed to initialize NVML"):
        await user(A)


@pytest.mark.parametrize("words", ["[Insufficient Permissions]", "[Not Found]", "[Unknown Error]", "-"])
async def test_a_process_counts_although_nvidia_smi_does_not_tell_its_pid(smi: Smi, words: str) -> None:
    smi(f"{B}, 99, other\n{A}, {words}, {words}\n")
    assert await user(A) == f"a process that nvidia-smi does not name ({words}, {words}) on {A}"
    smi(f"{A}, [N/A], python3\n")
    assert await user(A) == f"a process that nvidia-smi does not name ([N/A], python3) on {A}"
    smi(f"{A}, [GPU is lost], [GPU is lost]\n", code=15)
    assert await user(A) is None


# --- outfitter-gpu-discovery ---


@pytest.mark.parametrize(
    ("stdout", "stderr", "code", "gpus"),
    [
        ("0\n1\n" + WARNING, "", 14, "0,1"),
        (WARNING + "0\n1\n", "", 14, "0,1"),
        ("0\n1\n", WARNING, 255, "0,1"),
        ("0\n" + LOST_B, "", 15, "0"),
        (LOST_B + "0\n", "", 0, "0"),
        ("0\n1\n", LOST_B, 15, "0"),
        ("0\n[Unknown Error]\n", "", 0, "0"),
        ("0\nERR!\n2\n", "", 0, "0,2"),
    ],
)
def test_the_discovery_program_names_the_gpus_that_have_a_row(
    smi: Smi, tmp_path: Path, stdout: str, stderr: str, code: int, gpus: str
) -> None:
    smi(stdout, stderr, code)
    amount = gpus.count(",") + 1
    assert answer(discovery([str(amount)], tmp_path / "bin"))[:2] == (f"{gpus}\n", 0)
    printed, ended, said = answer(discovery(["3"], tmp_path / "bin"))
    assert (printed, ended) == ("", 1)
    assert f"3 GPUs wanted, but nvidia-smi names {amount}, and says: " in said


# --- with a manager ---

CONFIG = """
external-resources = ["gpu"]
[external-resource.gpu]
amount = 1
driver-factory.class = "gpu"
param.poll-interval = "100ms"
"""


def test_a_worn_gpu_is_lent_and_a_lost_one_is_not_by_a_manager_that_starts_with_it_or_runs(
    start_manager: StartManager, tmp_path: Path
) -> None:
    executable(
        tmp_path / "bin/nvidia-smi",
        f'case "$*" in *compute-apps*) exit 0 ;; esac; cat {tmp_path}/out; read code < {tmp_path}/code; exit $code',
    )
    write_smi(tmp_path, ROW_A + ROW_B + WARNING, code=14)
    manager = start_manager(CONFIG, variables={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    done = manager.outfitter("run", "--resource", "gpu=2", "--", "sh", "-c", "echo got $CUDA_VISIBLE_DEVICES")
    assert (done.returncode, done.stdout) == (0, f"got {A},{B}\n")

    def healths() -> dict[str, str]:
        listed = json.loads(manager.outfitter("devices", "--json").stdout)
        return {device["id"]: device["health"] for device in listed}

    write_smi(tmp_path, ROW_A + LOST_B, code=15)
    manager.wait_for(lambda: healths() == {A: "healthy", B: "unhealthy"})
    done = manager.outfitter("run", "--resource", "gpu=1", "--", "sh", "-c", "echo got $CUDA_VISIBLE_DEVICES")
    assert (done.returncode, done.stdout) == (0, f"got {A}\n")


# --- any answer ---

LINES = [ROW_A, ROW_B, WARNING, ABOUT_A, LOST_B, "Reboot the system\n", "\n", *LOSSES]


@given(st.lists(st.sampled_from(LINES), max_size=6), st.lists(st.sampled_from(LINES[2:]), max_size=3), st.booleans())
def test_whatever_is_printed_a_gpu_with_a_good_row_is_ill_only_if_a_loss_names_it(
    stdout: list[str], stderr: list[str], fails: bool
) -> None:
    outcome = ScriptOutcome(14 if fails else 0, "".join(stdout).encode(), "".join(stderr).encode())
    devices = NvidiaDriver().read(outcome)
    lost = any(line in LOSSES for line in (*stdout, *stderr))
    found = {device.id: device for device in devices}
    if ROW_A in stdout:
        assert found[A].health is Health.HEALTHY
    if ROW_B in stdout:
        assert found[B].health is (Health.UNHEALTHY if lost else Health.HEALTHY)
    for device in devices:
        assert device.health is Health.HEALTHY or lost

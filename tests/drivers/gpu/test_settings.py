"""The gpu driver's settings, and what they select."""

import math
import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_drivers.api import (
    Device,
    DriverParams,
    ExternalResourceDriver,
    ExternalResourceInfo,
    Grant,
    Inventory,
    NotEnoughDevicesError,
    PermanentDriverError,
    TemporaryDriverError,
    Worker,
)
from outfitter_drivers.gpu.discovery_script import AllocateReleaseDriver, ScriptDriver
from outfitter_drivers.gpu.factory import FLINK_DEFAULT_PATH, GPUDriverFactory
from outfitter_drivers.gpu.nvidia import NvidiaDriver, parse_gpus
from outfitter_proto.records import Health
from support.drivers.gpu_machine import executable, nvidia_smi

NOBODY = Worker(host="h", resource="gpu")
WORKER = Worker(host="h", resource="gpu", worker="w", incarnation="w-1", owner_pid=4711)
TWO = "0, GPU-a, 1024, 00000000:19:00.0, NVIDIA H200\n1, GPU-b, 1024, 00000000:3B:00.0, NVIDIA H200\n"


def gpu(directory: Path | None = None, **settings: str) -> ExternalResourceDriver:
    """A driver by its settings: `path` stands for `discovery-script.path`, and so on."""
    params = {f"discovery-script.{key.replace('_', '-')}": value for key, value in settings.items()}
    return GPUDriverFactory().create_external_resource_driver(DriverParams(params, directory=directory))


async def indexes(driver: ExternalResourceDriver, amount: int, worker: Worker = WORKER) -> list[str]:
    return [info["index"] for info in await driver.retrieve_resource_info(amount, worker)]


async def first_set(driver: ExternalResourceDriver) -> list[Device]:
    assert isinstance(driver, Inventory)
    async for devices in driver.inventory("h"):
        return list(devices)
    raise AssertionError("no devices at all")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(output: str, **more: Any) -> None:
        bin_folder = nvidia_smi(tmp_path, output, **more)
        if str(bin_folder) not in os.environ["PATH"]:
            monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")

    return install


# --- which driver ---


@pytest.mark.parametrize("path", [None, FLINK_DEFAULT_PATH, f"./{FLINK_DEFAULT_PATH}", "  "])
def test_without_a_script_or_with_flinks_own_default_path_nvidia_smi_is_asked(path: str | None) -> None:
    assert isinstance(gpu(**({} if path is None else {"path": path})), NvidiaDriver)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"interface": "nvm"}, "interface is 'nvm'; valid is auto, nvml, nvidia-smi"),
        ({"xid.fatal": "79"}, r"xid\.fatal names no class of Xids; valid are application, ignore"),
        ({"xid.reset": "79;x"}, r"xid\.reset has 'x'; valid are codes and ranges split on ;"),
        ({"interface": "nvml", "discovery-script.path": "/bin/true"}, "interface is for the built-in discovery"),
        ({"xid.reset": "79", "discovery-script.path": "/bin/true"}, r"xid\.reset is for the built-in discovery"),
    ],
)
def test_a_wrong_setting_of_nvml_is_an_error_that_names_it(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GPUDriverFactory().create_external_resource_driver(DriverParams(settings))


def test_flinks_default_path_means_the_file_there_when_builtin_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"discovery-script\.path is .*nvidia-gpu-discovery\.sh"):
        gpu(builtin="false")
    executable(tmp_path / FLINK_DEFAULT_PATH, "echo 0")
    assert type(gpu(builtin="false")) is ScriptDriver


async def test_a_relative_path_is_sought_in_flink_home_then_here_then_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("flink", "here", "config"):
        (tmp_path / place).mkdir()
    monkeypatch.setenv("FLINK_HOME", str(tmp_path / "flink"))
    monkeypatch.chdir(tmp_path / "here")
    for place in ("config", "here", "flink"):
        executable(tmp_path / place / "bin/find.sh", f"echo {place}-0")
        assert await indexes(gpu(tmp_path / "config", path="bin/find.sh"), 1) == [f"{place}-0"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"path": "no/such"}, "this file does not exist; looked for /"),
        ({"path": "folder"}, "is no file"),
        ({"path": "plain"}, "is not executable"),
        ({"path": "/no/such"}, "looked for /no/such$"),
        ({"path": "script", "args": "'open"}, r"discovery-script\.args is \"'open\": No closing quotation"),
        ({"path": "script", "timeout": "0"}, r"discovery-script\.timeout"),
        ({"path": "script", "timeout": "soon"}, r"discovery-script\.timeout"),
        ({"path": "script", "inventory_amount": "0"}, r"discovery-script\.inventory-amount is '0'"),
        ({"path": "script", "contract": "both"}, r"discovery-script\.contract is 'both'"),
        ({"path": "script", "contract": "allocate-release", "inventory_amount": "4"}, "exclude each other"),
        ({"builtin": "perhaps"}, r"discovery-script\.builtin is 'perhaps'; valid is true or false"),
        ({"args": "--foo"}, r"discovery-script\.args is refused: unknown argument '--foo'"),
        ({"inventory_amount": "4"}, "is for a script of yours"),
        ({"pth": "x"}, r"did you mean 'discovery-script\.path'"),
    ],
)
def test_a_wrong_setting_is_an_error_at_construction_that_names_it(
    settings: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLINK_HOME", raising=False)
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    executable(tmp_path / "script", "echo 0")
    with pytest.raises(ValueError, match=says):
        gpu(**settings)


# --- scripts of the user's ---


async def test_arguments_follow_the_amount_split_as_a_shell_splits_words(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", 'for a in "$@"; do printf "%s|" "$a"; done | tr " " _')
    assert await indexes(gpu(path=str(script), args="-v 'two words' \"\""), 1) == ["1|-v|two_words||"]
    assert await indexes(gpu(path=str(script)), 1) == ["1|"]


async def test_coordination_options_are_dropped_with_a_warning(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", 'echo "$*" | tr " " +')
    args = "-v --enable-coordination-mode --coordination-file /tmp/f --assign-file=/tmp/g --check-dead last"
    params = DriverParams({"discovery-script.path": str(script), "discovery-script.args": args})
    assert await indexes(GPUDriverFactory().create_external_resource_driver(params), 1) == ["1+-v+last"]
    dropped = "--enable-coordination-mode --coordination-file /tmp/f --assign-file=/tmp/g --check-dead"
    assert params.warnings == [f"discovery-script.args: {dropped} is ignored, since the ledger coordinates"]


async def test_inventory_amount_is_what_the_manager_asks_for_but_not_flinks_own_call(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", '[ "$1" = 4 ] && echo 0,1,2,3 || echo "asked-$1"')
    driver = gpu(path=str(script), inventory_amount="4")
    assert await indexes(driver, 1) == ["0", "1", "2", "3"]
    assert await indexes(driver, 1, NOBODY) == ["asked-1"]
    with pytest.raises(NotEnoughDevicesError, match=r"5 devices wanted, but .* 4 names 4"):
        await driver.retrieve_resource_info(5, WORKER)


async def test_a_script_that_cannot_list_all_there_are_is_asked_again_later(tmp_path: Path) -> None:
    driver = gpu(path=str(executable(tmp_path / "s", "exit 1")), inventory_amount="4")
    with pytest.raises(TemporaryDriverError, match="exit code 1"):
        await driver.retrieve_resource_info(2, WORKER)


def test_numbers_and_uuids_of_a_script_reach_cuda_and_other_words_show_it_no_gpu() -> None:
    driver = ScriptDriver("unused")
    infos = {word: driver.device(ExternalResourceInfo({"index": word})) for word in ("3", "GPU-8a56", "card-a")}
    assert infos["3"].id is None
    assert infos["3"].env == {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert infos["GPU-8a56"].id == "GPU-8a56"
    assert infos["GPU-8a56"].cdi == ("nvidia.com/gpu=GPU-8a56",)
    assert infos["card-a"].env == {"CUDA_VISIBLE_DEVICES": "-1"}


# --- nvidia-smi ---


async def test_the_default_driver_tells_all_there_is_to_tell_of_a_gpu(smi: Any, tmp_path: Path) -> None:
    (tmp_path / "pci/0000:19:00.0").mkdir(parents=True)
    (tmp_path / "pci/0000:19:00.0/numa_node").write_text("1\n")
    smi(TWO)
    first, second = await first_set(NvidiaDriver(sysfs=tmp_path / "pci"))
    assert first == Device(
        properties={
            "index": "0",
            "uuid": "GPU-a",
            "model": "NVIDIA H200",
            "memory.total_bytes": str(1024**3),
            "pci.bus_id": "0000:19:00.0",
            "numa_node": "1",
        },
        id="GPU-a",
        aliases=("pci:0000:19:00.0",),
        env={"CUDA_VISIBLE_DEVICES": "GPU-a", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        cdi=("nvidia.com/gpu=GPU-a",),
    )
    assert "numa_node" not in second.properties


async def test_an_nvidia_smi_that_knows_indexes_alone_is_enough(smi: Any) -> None:
    smi("0\n1\n2\n3\n")
    assert [device.properties for device in await first_set(gpu())] == [{"index": str(i)} for i in range(4)]
    assert await indexes(gpu(), 2, NOBODY) == ["0", "1"]


async def test_an_nvidia_smi_that_answers_nothing_but_flinks_question_is_enough(smi: Any, tmp_path: Path) -> None:
    smi("0\n1\n")
    executable(tmp_path / "bin/nvidia-smi", '[ "$*" = "--query-gpu=index --format=csv,noheader" ] && printf "0\\n1\\n"')
    assert await indexes(gpu(), 2, NOBODY) == ["0", "1"]


@pytest.mark.parametrize("value", ["[GPU is lost]", "[Unknown Error]", "ERR!", "[GPU requires reset]"])
def test_a_gpu_that_nvidia_smi_reports_an_error_for_is_unhealthy(value: str) -> None:
    good, ill = parse_gpus(TWO.replace("1, GPU-b, 1024", f"1, GPU-b, {value}").encode())
    assert good.health is Health.HEALTHY
    assert ill.health is Health.UNHEALTHY
    assert ill.reason == f"nvidia-smi reports memory.total: {value}"
    assert "memory.total_bytes" not in ill.properties


def test_a_value_that_the_hardware_does_not_have_is_left_out(tmp_path: Path) -> None:
    (device,) = parse_gpus(b"0, GPU-a, [N/A], [Not Supported], Orin, 8 GB\n", sysfs=tmp_path)
    assert device.properties == {"index": "0", "uuid": "GPU-a", "model": "Orin, 8 GB"}
    assert device.health is Health.HEALTHY


async def test_a_lost_gpu_costs_itself_only_and_heals(smi: Any) -> None:
    smi(TWO)
    driver = NvidiaDriver(poll_interval=0.01)
    seen = driver.inventory("h")
    with anyio.fail_after(30):
        assert [d.health for d in await anext(seen)] == [Health.HEALTHY, Health.HEALTHY]
        smi("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\n", exit_code=15)
        first, second = await anext(seen)
        assert (first.health, second.health) == (Health.HEALTHY, Health.UNHEALTHY)
        assert "GPU is lost" in (second.reason or "")
        with pytest.raises(NotEnoughDevicesError, match="2 GPUs wanted, but nvidia-smi names 2, of which 1 are"):
            await driver.retrieve_resource_info(2, WORKER)
        smi(TWO)
        assert [d.health for d in await anext(seen)] == [Health.HEALTHY, Health.HEALTHY]
    await seen.aclose()  # type: ignore[attr-defined]  # an async generator


@pytest.mark.parametrize(
    ("answer", "ids"),
    [
        ("0\n1\n", ["GPU-a", "GPU-b"]),
        ("0\n", [None]),
        ("0, [N/A], 1024, 00000000:3B:00.0, NVIDIA H200\n", ["GPU-b"]),
        ("0, [N/A], 1024, 00000000:5E:00.0, NVIDIA H200\n1, [N/A]\n", [None, "GPU-b"]),
    ],
    ids=["all indexes", "an index fewer", "the other one's bus id", "a new bus id"],
)
async def test_a_gpu_without_its_uuid_keeps_its_id_if_it_is_surely_the_same(
    smi: Any, answer: str, ids: list[str | None]
) -> None:
    smi(TWO)
    driver = NvidiaDriver(poll_interval=0.01)
    seen = driver.inventory("h")
    with anyio.fail_after(30):
        assert [device.id for device in await anext(seen)] == ["GPU-a", "GPU-b"]
        smi(answer)
        assert [device.id for device in await anext(seen)] == ids
    await seen.aclose()  # type: ignore[attr-defined]  # an async generator


async def test_no_devices_is_an_empty_inventory_and_not_a_failure(smi: Any) -> None:
    smi("No devices were found\n", exit_code=6)
    assert await first_set(gpu()) == []
    with pytest.raises(NotEnoughDevicesError):
        await gpu().retrieve_resource_info(1, WORKER)


async def test_a_failing_nvidia_smi_may_work_later(smi: Any) -> None:
    smi("NVIDIA-SMI has failed\n", exit_code=9)
    with pytest.raises(TemporaryDriverError, match="nvidia-smi ended with exit code 9; stdout: NVIDIA-SMI has failed"):
        await gpu().retrieve_resource_info(1, WORKER)
    smi("what is this\n")
    with pytest.raises(TemporaryDriverError, match="printed no GPUs but what is this"):
        await gpu().retrieve_resource_info(1, WORKER)


async def test_a_machine_without_nvidia_smi_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PermanentDriverError, match="needs nvidia-smi on PATH, or a discovery script"):
        await gpu().retrieve_resource_info(1, WORKER)


# --- allocate and release ---


def grant(token: int, *words: str, worker: Worker = WORKER) -> Grant:
    return Grant(
        allocation="h/w/w-1",
        token=token,
        worker=worker,
        device_ids=tuple(f"gpu:{word}" for word in words),
        devices=tuple({"index": word} for word in words),
    )


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[AllocateReleaseDriver, Path]:
    """A script that writes down how it was called, and prints or does what `answer` says."""
    log = tmp_path / "log"
    (tmp_path / "answer").write_text("echo 4,5")
    env = "$OUTFITTER_WORKER $OUTFITTER_INCARNATION $OUTFITTER_OWNER_PID t=$OUTFITTER_TOKEN d=$OUTFITTER_DEVICES"
    script = executable(tmp_path / "s", f'echo "$* {env}" >> {log}\n[ "$1" = release ] || . {tmp_path}/answer\n')
    driver = gpu(path=str(script), contract="allocate-release", args="--privilege")
    assert isinstance(driver, AllocateReleaseDriver)
    return driver, log


async def test_a_worker_gets_what_the_script_allocates_and_the_script_gets_it_back(
    recorded: tuple[AllocateReleaseDriver, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTFITTER_TOKEN", "not this one")
    driver, log = recorded
    for _ in range(2):
        assert await indexes(driver, 2) == ["4", "5"]
    for act in (driver.prepare, driver.prepare, driver.unprepare, driver.unprepare):
        await act(grant(7, "4", "5"))
    assert log.read_text().splitlines() == [
        "allocate 2 --privilege w w-1 4711 t= d=",
        "release 2 --privilege w w-1 4711 t=7 d=4,5",
    ]


async def test_after_a_restart_prepare_allocates_again_and_insists_on_the_granted_devices(
    recorded: tuple[AllocateReleaseDriver, Path],
) -> None:
    driver, log = recorded
    await driver.prepare(grant(7, "5", "4"))
    assert log.read_text() == "allocate 2 --privilege w w-1 4711 t=7 d=\n"
    other = Worker(host="h", resource="gpu", worker="v", incarnation="v-1")
    with pytest.raises(TemporaryDriverError, match="allocated 4, 5 where 0, 1 were granted"):
        await driver.prepare(grant(8, "0", "1", worker=other))
    await driver.unprepare(grant(8, "0", "1", worker=other))
    assert log.read_text().splitlines()[-1] == "release 2 --privilege v v-1  t=8 d=4,5"


async def test_a_release_that_fails_is_an_error_and_can_be_repeated(
    recorded: tuple[AllocateReleaseDriver, Path], tmp_path: Path
) -> None:
    driver, _ = recorded
    await driver.prepare(grant(7, "4", "5"))
    working = (tmp_path / "s").read_text()
    (tmp_path / "s").write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    with pytest.raises(TemporaryDriverError, match=r"release 2 ended with exit code 1; .* broken"):
        await driver.unprepare(grant(7, "4", "5"))
    (tmp_path / "s").write_text(working)
    await driver.unprepare(grant(7, "4", "5"))


async def test_what_was_just_offered_to_one_worker_is_not_taken_back_for_another(
    recorded: tuple[AllocateReleaseDriver, Path], tmp_path: Path
) -> None:
    """Its grant may be under way; whoever asked in vain asks again soon."""
    driver, log = recorded
    driver.offer_stands = math.inf
    taken = tmp_path / "taken"
    (tmp_path / "answer").write_text(f"[ ! -e {taken} ] || exit 1; touch {taken}; echo 4,5")
    assert await indexes(driver, 2) == ["4", "5"]
    other = Worker(host="h", resource="gpu", worker="v", incarnation="v-1")
    with pytest.raises(TemporaryDriverError, match="worker w is about to get some"):
        await indexes(driver, 2, other)
    await driver.prepare(grant(7, "4", "5"))
    with pytest.raises(NotEnoughDevicesError):
        await indexes(driver, 2, other)
    assert "release" not in log.read_text()


async def test_what_was_allocated_but_never_granted_is_taken_back_when_others_ask_in_vain(
    recorded: tuple[AllocateReleaseDriver, Path], tmp_path: Path
) -> None:
    driver, log = recorded
    driver.offer_stands = 0.0
    taken = tmp_path / "taken"
    (tmp_path / "answer").write_text(f"[ ! -e {taken} ] || {{ rm {taken}; exit 1; }}; touch {taken}; echo 4,5")
    other = Worker(host="h", resource="gpu", worker="v", incarnation="v-1")
    assert await indexes(driver, 2, other) == ["4", "5"]
    assert await indexes(driver, 2) == ["4", "5"]
    assert [line.split()[:1] + line.split()[3:4] for line in log.read_text().splitlines()] == [
        ["allocate", "v"],
        ["allocate", "w"],
        ["release", "v"],
        ["allocate", "w"],
    ]
    await driver.aclose()
    assert "release 2 --privilege w" in log.read_text()


async def test_what_was_offered_to_one_worker_and_granted_to_another_is_allocated_anew(tmp_path: Path) -> None:
    """Somebody before it in the queue waits for the same."""
    taken = tmp_path / "taken"
    held = f"[ -e {taken} ] && [ $(cat {taken}) != $OUTFITTER_WORKER ]"
    lines = f"[ $1 = release ] && exec rm -f {taken}; {held} && exit 1; echo $OUTFITTER_WORKER > {taken}; echo 4"
    driver = gpu(path=str(executable(tmp_path / "s", lines)), contract="allocate-release")
    other = Worker(host="h", resource="gpu", worker="v", incarnation="v-1")
    assert await indexes(driver, 1, other) == ["4"]
    await driver.prepare(grant(7, "4"))
    assert taken.read_text() == "w\n"
    with pytest.raises(NotEnoughDevicesError):
        await indexes(driver, 1, other)
    await driver.unprepare(grant(7, "4"))
    assert await indexes(driver, 1, other) == ["4"]


async def test_discovering_for_nobody_keeps_nothing(recorded: tuple[AllocateReleaseDriver, Path]) -> None:
    driver, log = recorded
    assert await indexes(driver, 2, NOBODY) == ["4", "5"]
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["allocate", "release"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "piece", ["[GPU ", "[", "]", "[GPU is lost", "ERR", "[Unknown Error", "00000000:01:", "0", "-", "N/A"]
)
def test_whatever_a_mebibyte_from_nvidia_smi_repeats_it_is_read_in_the_time_that_it_has(
    tmp_path: Path, piece: str
) -> None:
    """A limit a hundred times above what it takes, and a hundredth of what a quadratic reading did."""
    output = "0, " + piece * (1024 * 1024 // len(piece))
    assert [device.properties["index"] for device in parse_gpus(output.encode(), sysfs=tmp_path)] == ["0"]

"""`param.health-script` with a manager and real programs: any driver's devices, any way to fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from outfitter_drivers import program
from outfitter_drivers.api import Device, TemporaryDriverError
from outfitter_drivers.settings import SettingError
from outfitter_proto.records import Health
from outfitter_service.config import ResourceConfig
from outfitter_service.core.model import KnownDevice
from outfitter_service.runtime.drivers.building import build, build_served
from outfitter_service.runtime.drivers.health_script import WELL, HealthScript, read
from runtime.conftest import Serve
from support.drivers.gpu_machine import executable
from support.drivers.reporting import SOURCES, Source, reporting
from support.managers.in_process import register
from support.processes.ending import wait_until_ended

FAST = 'min-healthy-time = "0s"\nparam.health-script-interval = "50ms"\nparam.health-script-timeout = "5s"\n'


def static(script: Path, extra: str = FAST) -> str:
    return (
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "static"\n'
        'param.devices = "a;b"\nparam.device.a.id = "GPU-a"\nparam.device.b.id = "GPU-b"\n'
        'param.device.a.env.CUDA_VISIBLE_DEVICES = "GPU-a"\nparam.device.a.memory\\.total_bytes = "5"\n'.replace(
            "\\.", "."
        )
        + f'param.health-script = "{script}"\n{extra}'
    )


def healths(records: dict[str, dict[str, object]]) -> dict[str, tuple[str, str | None]]:
    """The health of each device in the host's record."""
    resource = records["@host/h"]["resources"]["gpu"]  # type: ignore[index]
    return {each["id"]: (each["health"], each.get("reason")) for each in resource["devices"]}


async def test_a_script_adds_its_word_to_any_driver_and_an_ill_device_is_lent_to_nobody(
    serve: Serve, tmp_path: Path
) -> None:
    ill = tmp_path / "ill"
    ill.write_text("GPU-a")
    script = executable(tmp_path / "check", f'[ "$1" = "$(cat {ill})" ] && echo "91 degrees" && exit 1; exit 0')
    async with serve(static(script)) as manager:
        await manager.until(lambda records: "@host/h" in records and len(healths(records)) == 2)
        assert healths(await manager.records()) == {
            "GPU-a": ("unhealthy", "health script: 91 degrees"),
            "GPU-b": ("healthy", None),
        }
        await manager.say(register("w", gpu=1))
        granted = await manager.state("w", "allocated")
        assert [info["id"] for info in granted["resources"]["gpu"]] == ["GPU-b"]
        await manager.say(register("waiter", gpu=1))
        await manager.state("waiter", "pending")
        (tmp_path / "new").write_text("GPU-b")  # the worker's device falls ill, the other one heals
        (tmp_path / "new").rename(ill)
        held = await manager.until(
            lambda records: records["h/w/1"]["resources"]["gpu"][0].get("health") == "unhealthy" and records["h/w/1"]
        )
        assert held["resources"]["gpu"][0]["health.reason"] == "health script: 91 degrees"
        assert held["state"] == "allocated"
        granted = await manager.state("waiter", "allocated")
        assert [info["id"] for info in granted["resources"]["gpu"]] == ["GPU-a"]
        assert manager.metric("outfitter_driver_runs_total", resource="gpu", call="health-script") > 1
        assert manager.metric("outfitter_driver_failures_total", resource="gpu", call="health-script") == 0


BROKEN = {
    "ends with an error": ("exit 7", "ended with exit code 7"),
    "says why it cannot tell": ("echo no DCGM; exit 2", "exit code 2: no DCGM"),
    "breaks as a Python script does": ("echo Traceback >&2; exit 1", "without a reason on standard output"),
    "is killed": ("kill -KILL $$", "killed by SIGKILL"),
    "hangs": ("sleep 600", "did not end within 0.3 s"),
    "prints too much": ("yes 0123456789 | head -c 3000000", "printed more than"),
    "prints garbage": ("printf '\\377\\376\\000\\n'; exit 1", "without a reason"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_script_that_breaks_calls_nothing_healthy_is_counted_and_costs_its_own_resource_only(
    serve: Serve, tmp_path: Path, case: str
) -> None:
    lines, said = BROKEN[case]
    script = executable(tmp_path / "check", lines)
    quick = 'param.health-script-interval = "50ms"\nparam.health-script-timeout = "300ms"\n'
    other = '[external-resource.good]\namount = 1\ndriver = "static"\nparam.count = 1\n'
    config = static(script, quick).replace('["gpu"]', '["gpu", "good"]') + other
    async with serve(config) as manager:
        await manager.say(register("w", gpu=1), register("g", good=1))
        await manager.state("g", "allocated")
        await manager.until(lambda records: len(healths(records)) == 2)
        for health, reason in healths(await manager.records()).values():
            assert health == "unknown"
            assert said in (reason or "")
            assert (reason or "").isprintable()
        assert (await manager.records())["h/w/1"]["state"] == "pending"
        assert manager.metric("outfitter_driver_failures_total", resource="gpu", call="health-script") > 0


async def test_a_run_has_the_device_with_its_properties_and_its_workers_variables(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    out = tmp_path / "out"
    out.mkdir()
    script = executable(
        tmp_path / "check", f'env > {out}/"$1".part; echo "$@" >> {out}/"$1".part; mv {out}/"$1".part {out}/"$1"'
    )
    async with serve(static(script, "param.health-script-args = \"--max '8 5'\"\n")) as manager:
        await manager.until(lambda records: "@host/h" in records and len(healths(records)) == 2)
    lines = (out / "GPU-a").read_text().splitlines()
    assert {
        "OUTFITTER_HOST=h",
        "OUTFITTER_RESOURCE=gpu",
        "OUTFITTER_DEVICE=GPU-a",
        "OUTFITTER_DEVICE_INDEX=0",
        "OUTFITTER_DEVICE_MEMORY_TOTAL_BYTES=5",
        "CUDA_VISIBLE_DEVICES=GPU-a",
        "GPU-a --max 8 5",
    } <= set(lines)
    assert not [line for line in lines if "hidden" in line]
    assert not [line for line in (out / "GPU-b").read_text().splitlines() if line.startswith("CUDA_VISIBLE")]


async def test_a_script_goes_with_a_users_own_driver_which_never_sees_its_settings(
    serve: Serve, tmp_path: Path
) -> None:
    SOURCES["gpu"] = Source()
    SOURCES["gpu"].report(Device(id="a", properties={"index": "0"}, health=Health.UNHEALTHY, reason="ECC"))
    script = executable(tmp_path / "check", "echo hot; exit 1")
    extra = f'param.health-script = "{script}"\n{FAST}'
    async with serve(reporting("gpu", extra=extra)) as manager:
        await manager.until(lambda records: "@host/h" in records and len(healths(records)) == 1)
        assert healths(await manager.records()) == {"a": ("unhealthy", "ECC; health script: hot")}


async def test_a_run_that_hangs_in_the_kernel_keeps_only_its_own_device_from_being_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "kill_group", lambda _group: None)
    monkeypatch.setattr(program, "_END_SECONDS", 0.05)
    pids = tmp_path / "pids"
    path = executable(tmp_path / "check", f'if [ "$1" = a ]; then echo $$ >> {pids}; exec sleep 1000; fi')
    script = HealthScript(path=str(path), timeout_s=1)
    a, b = (KnownDevice(id=name, properties={"index": name}) for name in "ab")
    for _ in range(3):
        with pytest.raises(TemporaryDriverError, match="hung since"):
            await script.ask("h", "gpu", a)
        assert await HealthScript(path=str(path), timeout_s=10).ask("h", "gpu", b) == WELL
    (pid,) = map(int, pids.read_text().split())
    os.kill(pid, signal.SIGKILL)
    wait_until_ended(pid)


# --- settings -----------------------------------------------------------------------------------------------


def resource(tmp_path: Path, driver: str = "static", **params: str) -> ResourceConfig:
    given = {name.replace("_", "-"): value for name, value in params.items()}
    return ResourceConfig(name="gpu", amount=1, driver=driver, params=given, directory=tmp_path)


def test_a_script_is_found_from_the_configurations_folder_and_the_driver_is_built_without_it(tmp_path: Path) -> None:
    executable(tmp_path / "check", "exit 0")
    config = resource(tmp_path, count="1", health_script="check")
    served = build_served(config, "host", lambda _: None)
    assert served.health_script == HealthScript(path=str(tmp_path / "check"))
    build(config, lambda _: None)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"health_scrip": "check"}, "health-scrip"),
        ({"health_script_intervall": "1s", "health_script": "check"}, "did you mean 'health-script-interval'"),
        ({"health_script_interval": "1s"}, "is for a health script"),
        ({"health_script": " "}, "is for a health script"),
        ({"health_script": "none"}, "does not exist"),
        ({"health_script": "folder"}, "is no file"),
        ({"health_script": "plain"}, "chmod"),
        ({"health_script": "check", "health_script_interval": "0s"}, "above 0"),
        ({"health_script": "check", "health_script_timeout": "x"}, "health-script-timeout cannot be read"),
        ({"health_script": "check", "health_script_args": "'"}, "words as in a shell"),
    ],
)
def test_a_wrong_setting_of_a_script_is_named_with_what_is_valid(
    tmp_path: Path, params: dict[str, str], said: str
) -> None:
    executable(tmp_path / "check", "exit 0")
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").write_text("")
    with pytest.raises(ValueError, match=said):
        build_served(resource(tmp_path, count="1", **params), "host", lambda _: None)


def test_a_driver_without_a_list_of_devices_has_no_health_script(tmp_path: Path) -> None:
    executable(tmp_path / "check", "exit 0")
    params = {"discovery-script.path": str(tmp_path / "check"), "health-script": "check"}
    config = ResourceConfig(name="gpu", amount=1, driver="gpu", params=params, directory=tmp_path)
    with pytest.raises(SettingError, match="asked for each worker") as refused:
        build_served(config, "host", lambda _: None)
    assert refused.value.key == "health-script"


def test_a_manager_of_cluster_scope_has_no_health_script(tmp_path: Path) -> None:
    executable(tmp_path / "check", "exit 0")
    with pytest.raises(SettingError, match="cluster scope"):
        build_served(resource(tmp_path, count="1", health_script="check"), "cluster", lambda _: None)


def test_a_script_that_others_can_change_is_warned_of(tmp_path: Path) -> None:
    script = executable(tmp_path / "check", "exit 0")
    script.chmod(0o777)
    warnings: list[str] = []
    assert read({"health-script": "check"}, tmp_path, warnings.append) is not None
    assert len(warnings) == 1
    assert warnings[0].startswith("health-script: everybody may write")

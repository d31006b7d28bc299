"""No command of `outfitter run` sees every device because its own ones set no variable."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from cli.commands.worker.conftest import PATIENCE
from outfitter_service.cli._lib.running.no_devices import NONE_VISIBLE
from support.managers.process import OUTFITTER, Manager, StartManager

MESSAGE = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54\n"


def config(folder: Path, printed: str) -> str:
    """`gpu` found by a script that prints this; `licence` without any variable; `disk` with one of its own; `npu` that
    nobody finds."""
    (folder / "printed").write_text(printed)
    script = folder / "discover.sh"
    script.write_text(f'#!/bin/sh\ncat "{folder}/printed"\n')
    script.chmod(0o755)
    return f"""
external-resources = ["gpu", "licence", "disk", "npu"]
[external-resource.gpu]
amount = 1
driver = "gpu"
param.discovery-script.path = "{script}"
[external-resource.licence]
amount = 1
driver = "static"
param.count = 9
[external-resource.disk]
amount = 1
driver = "static"
param.devices = "a"
param.device.a.env.SCRATCH = "/scratch"
[external-resource.npu]
amount = 1
on-failure = "no-info"
"""


def seen(manager: Manager, *resources: str, **inherited: str) -> dict[str, str]:
    """The variables with which a command sees devices."""
    asked = [word for resource in resources for word in ("--resource", resource)]
    outside = {name: value for name, value in manager.environment.items() if name not in NONE_VISIBLE}
    outside["OUTFITTER_ALLOW_ENV"] = "SCRATCH"
    done = subprocess.run(
        [*OUTFITTER, "run", *asked, "--", "env"], env=outside | inherited, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {name: found[name] for name in (*NONE_VISIBLE, "SCRATCH") if name in found}


def test_a_command_whose_devices_set_no_variable_sees_no_device_of_any_vendor(
    start_manager: StartManager, tmp_path: Path
) -> None:
    manager = start_manager(config(tmp_path, "card-0,card-7\n"))
    assert seen(manager, "licence=1") == NONE_VISIBLE
    # what the caller chose itself is no more than the caller has
    assert seen(manager, "licence=1", CUDA_VISIBLE_DEVICES="3") == NONE_VISIBLE | {"CUDA_VISIBLE_DEVICES": "3"}
    assert seen(manager, "disk=1") == {"SCRATCH": "/scratch"}
    # a name that only the script knows, and a resource without devices beside another one
    assert seen(manager, "gpu=1", "disk=1", CUDA_VISIBLE_DEVICES="0,1,2") == {
        "CUDA_VISIBLE_DEVICES": "-1",
        "SCRATCH": "/scratch",
    }
    assert seen(manager, "npu=1", "disk=1") == NONE_VISIBLE | {"SCRATCH": "/scratch"}


def test_a_message_of_a_script_is_no_device_and_the_command_waits_until_it_is_gone(
    start_manager: StartManager, tmp_path: Path
) -> None:
    manager = start_manager(config(tmp_path, MESSAGE))
    run = manager.popen(
        "run", "--resource", "gpu=1", "--worker", "w", "--", "printenv", "CUDA_VISIBLE_DEVICES", stdout=subprocess.PIPE
    )
    try:
        manager.wait_for(lambda: "named no device but" in ((manager.record("w") or {}).get("reason") or ""))
        record = manager.record("w") or {}
        assert record["state"] == "pending"
        assert "Driver/library version mismatch" in record["reason"]
        listed = json.loads(manager.outfitter("devices", "--json").stdout)
        assert [device for device in listed if device["resource"] == "gpu"] == []
        (tmp_path / "printed").write_text("7\n")
        assert run.communicate(timeout=PATIENCE)[0] == "7\n"
    finally:
        run.kill()
        run.communicate()

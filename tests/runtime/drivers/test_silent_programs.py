"""A program of a driver that hangs, or fails, again and again, from outside: each view says so until it answers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.drivers.gpu_machine import executable
from support.managers.api import running
from support.managers.process import Manager, StartManager

pytestmark = pytest.mark.slow

ROWS = "0, GPU-a, 81559, 00000000:1A:00.0, NVIDIA H100\n1, GPU-b, 81559, 00000000:40:00.0, NVIDIA H100\n"
CONFIG = (
    'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "gpu"\nparam.poll-interval = "100ms"\n'
)


def devices(manager: Manager) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(manager.outfitter("devices", "--json").stdout)
    return found


def healths(manager: Manager) -> list[str]:
    return [device["health"] for device in devices(manager)]


@pytest.mark.parametrize(
    ("ill", "limit", "said"),
    [
        ("exec sleep 1000", "3s", "did not end within 3 s and was killed"),
        ("echo no driver >&2; exit 9", "60s", "no driver"),
    ],
)
def test_each_view_shows_devices_of_a_silent_driver_as_unknown_until_it_answers(
    start_manager: StartManager, tmp_path: Path, ill: str, limit: str, said: str
) -> None:
    broken = tmp_path / "broken"
    (tmp_path / "rows").write_text(ROWS)
    look = f"if [ -e {broken} ]; then {ill}; fi; cat {tmp_path}/rows"
    executable(tmp_path / "bin/nvidia-smi", f'case "$*" in *compute-apps*) exit 0 ;; esac\n{look}')
    config = f'{CONFIG}param.discovery-script.timeout = "{limit}"\n'
    manager = start_manager(config, variables={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    manager.wait_for(lambda: healths(manager) == ["healthy", "healthy"])
    holder = manager.popen("run", "--worker", "holder", "--resource", "gpu=1", "--", "cat", stdin=subprocess.PIPE)
    token = manager.wait_for_state("holder", "allocated")["token"]
    broken.touch()
    manager.wait_for(lambda: healths(manager) == ["unknown", "unknown"])
    (reason,) = {device["reason"] for device in devices(manager)}
    assert reason.startswith("its driver has not answered since 2")
    assert said in reason
    manager.wait_for(lambda: manager.metric("outfitter_devices", resource="gpu", state="unknown") == 1)
    assert manager.metric("outfitter_devices", resource="gpu", state="free") == 0
    assert manager.metric("outfitter_devices", resource="gpu", state="held") == 1
    table = manager.outfitter("devices")
    assert "0 of 2 free, 0 healthy, 1 held (1 of them ill), 2 unknown" in table.stdout
    assert f"the driver of gpu on {manager.host} fails now: " in table.stderr
    assert said in manager.outfitter("explain", "holder").stdout
    with running(tmp_path, manager.bus_url) as api:
        manager.wait_for(lambda: api.is_ready)
        status, page = api.get("/api/v1/devices")
    assert status == 200
    assert {(item["health"], item["reason"]) for item in page["items"]} == {("unknown", reason)}
    record = manager.record("holder")
    assert record is not None
    assert (record["state"], record["token"]) == ("allocated", token)
    waiter = manager.popen("run", "--worker", "waiter", "--resource", "gpu=1", "--", "echo", "got")
    assert "the driver of gpu failed: " in manager.wait_for_state("waiter", "pending")["reason"]
    assert said in manager.outfitter("explain", "waiter").stdout
    broken.unlink()
    assert waiter.communicate()[0] == "got\n"
    assert waiter.returncode == 0
    manager.wait_for(lambda: healths(manager) == ["healthy", "healthy"])
    manager.wait_for(lambda: "fails now" not in manager.outfitter("devices").stderr)
    holder.communicate()
    assert holder.returncode == 0

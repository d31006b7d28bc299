"""`config check`, `discover` and `doctor` say which variables of devices a worker must allow, with the line to add."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from outfitter_proto import environment as variables
from support.managers.process import OUTFITTER, environment

LICENCE = """
external-resources = ["licence", "gpu"]
[external-resource.gpu]
amount = 1
driver = "static"
param.device.a.env.CUDA_VISIBLE_DEVICES = "0"
param.device.a.env.CUDA_DEVICE_ORDER = "PCI_BUS_ID"
[external-resource.licence]
amount = 1
driver = "static"
param.device.a.env.LICENCE_FILE = "/etc/licences/a"
param.device.b.env.LICENCE_HOST = "b"
param.device.b.env.EXTERNAL_RESOURCE_LICENCE = "b"
"""
LINE = (
    "devices of licence set LICENCE_FILE, LICENCE_HOST, which a worker must allow: set "
    "OUTFITTER_ALLOW_ENV=LICENCE_FILE,LICENCE_HOST in its environment "
    "(`outfitter run` and `hold` also have --allow-env LICENCE_FILE --allow-env LICENCE_HOST)"
)
FACTORY = """
from outfitter_drivers.api import Device, ExternalResourceDriver, ExternalResourceDriverFactory, ExternalResourceInfo


class Driver(ExternalResourceDriver):
    async def retrieve_resource_info(self, amount, worker):
        return [ExternalResourceInfo({"index": str(index)}) for index in range(amount)]

    def device(self, info):
        return Device(properties=dict(info), env={"DONGLE": info["index"]})


class Factory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config):
        return Driver()
"""


def outfitter(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OUTFITTER, *arguments, "--config", str(folder / "outfitter.toml")], cwd=folder,
        env=environment(PYTHONPATH=str(folder), **more), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outfitter.toml").write_text(LICENCE)
    return tmp_path


def test_config_check_names_them_in_one_line_and_is_content(folder: Path) -> None:
    done = outfitter(folder, "config", "check")
    (line,) = done.stdout.splitlines()
    assert line.startswith("warning: ")
    assert line.endswith(LINE)
    assert done.returncode == 0
    told = json.loads(outfitter(folder, "config", "check", "--json").stdout)
    assert (told["ok"], [problem["problem"] for problem in told["problems"]]) == (True, [LINE])


def test_the_line_as_it_stands_allows_them(folder: Path) -> None:
    line = outfitter(folder, "config", "check").stdout
    name, _, value = shlex.split(line.split("set ")[-1])[0].partition("=")
    assert (name, variables.allowed_by(value)) == (variables.ALLOWING, {"LICENCE_FILE", "LICENCE_HOST"})
    assert outfitter(folder, "config", "check", **{name: value}).stdout == "ok\n"


def test_what_is_allowed_here_already_stands_in_the_line_too(folder: Path) -> None:
    done = outfitter(folder, "config", "check", OUTFITTER_ALLOW_ENV="LICENCE_HOST OTHER")
    assert "devices of licence set LICENCE_FILE, which" in done.stdout
    assert "OUTFITTER_ALLOW_ENV=LICENCE_FILE,LICENCE_HOST,OTHER in" in done.stdout


def test_devices_of_all_resources_and_hosts_are_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "outfitter.toml").write_text(
        'external-resources = ["a", "b"]\n[external-resource.a]\namount = 1\n'
        f'driver = "files"\nparam.path = "{tmp_path}/d"\n'
        '[external-resource.b]\namount = 1\ndriver = "static"\nparam.hosts.h.example.device.x.env.ROOM = "7"\n'
    )
    (tmp_path / "d").mkdir()
    (tmp_path / "d/one").write_text("env.DONGLE=1\n")
    done = outfitter(tmp_path, "config", "check")
    (line,) = done.stdout.splitlines()
    assert "devices of a set DONGLE, devices of b set ROOM, which" in line
    assert "OUTFITTER_ALLOW_ENV=DONGLE,ROOM in" in line


def test_discover_warns_of_a_resources_own(folder: Path) -> None:
    done = outfitter(folder, "discover", "licence", "--json")
    assert LINE in done.stderr
    assert (done.returncode, len(json.loads(done.stdout))) == (0, 2)
    assert outfitter(folder, "discover", "gpu").stderr == ""


def test_discover_warns_of_what_a_driver_without_a_list_sets(tmp_path: Path) -> None:
    (tmp_path / "dongles.py").write_text(FACTORY)
    (tmp_path / "outfitter.toml").write_text(
        'external-resources = ["dongle"]\n[external-resource.dongle]\namount = 1\ndriver = "dongles:Factory"\n'
    )
    done = outfitter(tmp_path, "discover", "dongle")
    assert "OUTFITTER_ALLOW_ENV=DONGLE in" in done.stderr
    assert done.returncode == 0


def test_doctor_warns_too(folder: Path) -> None:
    assert LINE in outfitter(folder, "doctor", "--bus", f"sqlite://{folder}/bus.db").stdout

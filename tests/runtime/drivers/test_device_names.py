"""One device under several names, as drivers, manager, ledger and checker see it together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread

from outfitter_drivers.api import Device
from outfitter_service.runtime.drivers.translation import known_device
from outfitter_verify import verify
from runtime.conftest import Serve
from support.managers.in_process import HOST, deregister, register

RESOURCES = """
lease-grace = "0s"
external-resources = ["a", "b", "c"]
[external-resource.a]
amount = 1
driver = "static"
param.devices = "x"
param.device.x.id = "/dev/x0"
[external-resource.b]
amount = 1
driver = "static"
param.devices = "y"
param.device.y.id = "PCI-0"
[external-resource.c]
amount = 1
driver = "files"
param.path = "{folder}"
param.poll-interval = "20ms"
"""


def connecting(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    hidden = folder / ".u"
    hidden.write_text("id=UUID-0\naliases=/dev/x0;PCI-0\n")
    return hidden.rename(folder / "u")


def resource(records: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = records.get(f"@host/{HOST}", {}).get("resources", {}).get(name, {})
    return found


def reported(records: dict[str, dict[str, Any]]) -> bool:
    return all(resource(records, name).get("state") == "reported" for name in "abc")


@pytest.mark.parametrize(
    ("device", "canonical"),
    [
        (Device(properties={"index": "0"}, name="a", id="LIC-1"), "LIC-1"),
        (Device(properties={"index": "0"}, name="a"), "licence:a"),
        (Device(properties={}, name="a"), "licence:a"),
        (Device(properties={"index": "0"}, name="1"), "licence:name:1"),
        (Device(properties={"index": "1"}), "licence:1"),
    ],
)
def test_a_device_without_an_id_has_one_of_its_name_that_is_no_index(device: Device, canonical: str) -> None:
    assert known_device("licence", device).id == canonical


async def test_a_device_stays_lent_when_the_driver_that_knows_its_names_no_longer_does(
    serve: Serve, tmp_path: Path, url: str
) -> None:
    config = RESOURCES.format(folder=tmp_path / "c")
    file = connecting(tmp_path / "c")
    async with serve(config) as manager:
        await manager.until(lambda records: resource(records, "c").get("total") == 1 and reported(records))
        assert resource(await manager.records(), "c")["names"] == [["UUID-0", "/dev/x0", "PCI-0"]]
        await manager.say(register("w1", lease_s=None, a=1), register("w2", lease_s=None, b=1))
        assert (await manager.state("w1", "allocated"))["aliases"] == {"/dev/x0": ["PCI-0", "UUID-0"]}
        await manager.state("w2", "pending")
        file.unlink()
        await manager.until(lambda records: resource(records, "c").get("total") == 0)
        await manager.say(register("w3", lease_s=None, b=1))
        await manager.state("w3", "pending")
        await manager.stop()
    async with serve(config) as manager:
        await manager.until(
            lambda records: reported(records) and records[f"@host/{HOST}"]["manager"]["stopped_at"] is None
        )
        await manager.say(register("w4", lease_s=None, b=1))
        await manager.state("w4", "pending")
        await manager.say(deregister("w1"))
        await manager.state("w2", "allocated")
        report = await to_thread.run_sync(verify, url, "outfitter")
        assert report.violations == ()


TWO = """
lease-grace = "0s"
external-resources = ["gpu", "port"]
[external-resource.gpu]
amount = 1
driver = "static"
param.count = 1
[external-resource.port]
amount = 1
driver = "files"
param.path = "{folder}"
param.poll-interval = "20ms"
"""


def named(folder: Path, count: int) -> None:
    """60 files of devices with so many aliases of 200 characters each."""
    folder.mkdir(exist_ok=True)
    for number in range(60):
        names = [f"{number}-{each}-".ljust(200, "n") for each in range(count)]
        hidden = folder / f".{number}"
        hidden.write_text(f"id=port-{number}\naliases={';'.join(names)}\n")
        hidden.rename(folder / f"{number:02}")


async def test_a_report_with_more_names_than_the_record_has_room_for_is_refused_and_what_was_lent_stays(
    serve: Serve, tmp_path: Path, url: str
) -> None:
    config = TWO.format(folder=tmp_path / "ports")
    named(tmp_path / "ports", 1)
    async with serve(config) as manager:
        await manager.until(lambda records: resource(records, "port").get("state") == "reported")
        await manager.say(register("w1", lease_s=None, port=1))
        lent = (await manager.state("w1", "allocated"))["resources"]["port"][0]["id"]
        named(tmp_path / "ports", 64)
        await manager.until(lambda records: resource(records, "port").get("state") == "driver-failed")
        await manager.stop()
    async with serve(config) as manager:
        await manager.until(lambda records: resource(records, "gpu").get("state") == "reported")
        await manager.until(lambda records: resource(records, "port").get("state") == "driver-failed")
        await manager.say(register("w2", lease_s=None, port=1), register("w3", lease_s=None, gpu=1))
        reason = (await manager.state("w2", "failed"))["reason"]
        assert "names of its devices take" in reason
        await manager.state("w3", "allocated")
        named(tmp_path / "ports", 1)
        await manager.until(lambda records: resource(records, "port").get("state") == "reported")
        await manager.say(register("w4", lease_s=None, port=60), register("w5", lease_s=None, port=59))
        assert lent in [info["id"] for info in (await manager.state("w1", "allocated"))["resources"]["port"]]
        assert (await manager.state("w4", "pending"))["reason"] == "waits for 60 port: 59 of 60 free"
        report = await to_thread.run_sync(verify, url, "outfitter")
        assert report.violations == ()


async def test_a_shared_device_that_is_called_otherwise_now_is_lent_to_nobody_alone_when_its_resource_is_exclusive(
    serve: Serve, tmp_path: Path
) -> None:
    folder = tmp_path / "gpus"
    folder.mkdir()
    config = (
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "files"\n'
        f'param.path = "{folder}"\nparam.poll-interval = "20ms"\n'
    )

    def call_it(name: str) -> None:
        (folder / ".gpu").write_text(f"id={name}\n")
        (folder / ".gpu").rename(folder / "gpu")

    def is_called(records: dict[str, dict[str, Any]], name: str) -> bool:
        return [device["id"] for device in resource(records, "gpu").get("devices", [])] == [name]

    call_it("GPU-0")
    async with serve(config + 'sharing = "shared"\n') as manager:
        await manager.say(register("w1", lease_s=None, gpu=1))
        await manager.state("w1", "allocated")
        call_it("GPU-8a56")
        await manager.until(lambda records: is_called(records, "GPU-8a56"))
        await manager.stop()
    async with serve(config + 'sharing = "exclusive"\n') as manager:
        await manager.say(register("w2", lease_s=None, gpu=1))
        waiting = await manager.until(
            lambda records: "held back" in records.get(f"{HOST}/w2/1", {}).get("reason", "") and records
        )
        assert waiting[f"{HOST}/w2/1"]["state"] == "pending"
        await manager.say(deregister("w1"))
        infos = (await manager.state("w2", "allocated"))["resources"]["gpu"]
        assert [info["id"] for info in infos] == ["GPU-8a56"]
        await manager.stop()

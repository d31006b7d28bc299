"""What an administrator reads while a device is being given back, and somebody still uses it."""

from __future__ import annotations

import json
from pathlib import Path

from support.managers.process import StartManager

DRIVER = """
from pathlib import Path
import anyio
from outfitter.drivers import Device, ExternalResourceDriver, ExternalResourceDriverFactory
from outfitter.drivers import InUseCheck, Inventory, Preparation

class Serial(ExternalResourceDriver, Inventory, Preparation, InUseCheck):
    def __init__(self, folder): self.folder = Path(folder)
    async def retrieve_resource_info(self, amount, worker): raise NotImplementedError
    async def inventory(self, host):
        yield [Device(id="port-0", properties={"index": "0"})]
        await anyio.sleep_forever()
    async def prepare(self, grant):
        while (self.folder / "cold").exists(): await anyio.sleep(0.01)
    async def unprepare(self, grant): pass
    async def in_use(self, grant):
        user = self.folder / "user"
        return user.read_text() if user.exists() else None

class Factory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config): return Serial(config["folder"])
"""


def test_the_drivers_words_are_in_status_and_in_the_explain_of_holder_and_waiter(
    start_manager: StartManager, tmp_path: Path
) -> None:
    (tmp_path / "serial_driver.py").write_text(DRIVER)
    (tmp_path / "cold").touch()
    config = (
        'external-resources = ["serial"]\n[external-resource.serial]\namount = 1\n'
        f'driver-factory.class = "serial_driver:Factory"\nparam.folder = "{tmp_path}"\n'
    )
    manager = start_manager(config, variables={"PYTHONPATH": str(tmp_path)})
    with manager.popen("run", "--worker", "holder", "--", "sleep", "1000") as holder:
        manager.wait_for_state("holder", "preparing")
        told = manager.outfitter("explain", "holder").stdout
        assert "has been preparing with 1 serial" in told
        assert ": its driver prepares the devices." in told
        (tmp_path / "cold").unlink()
        manager.wait_for_state("holder", "allocated")
        (tmp_path / "user").write_text("process 5578")
        holder.terminate()
        _, err = holder.communicate(timeout=60)
    assert "no reason" not in err
    assert "its driver prepares the devices" in err
    manager.outfitter("register", "--worker", "waiter", "--lease", "none")
    manager.wait_for(lambda: "delayed_by" in (manager.record("holder") or {}))
    words = "the driver of serial says: still in use by process 5578"
    assert words in manager.outfitter("status").stdout
    told = manager.outfitter("explain", "holder").stdout
    assert " ended " not in told
    assert "has been releasing 1 serial" in told
    assert words in told
    told = manager.outfitter("explain", "waiter").stdout
    assert "port-0 is held by holder (releasing for " in told
    assert words in told
    (device,) = json.loads(manager.outfitter("devices", "--json").stdout)
    assert device["holders"][0]["delayed_by"] == words
    (tmp_path / "user").unlink()
    manager.wait_for_state("waiter", "allocated")
    assert words not in manager.outfitter("explain", "holder").stdout

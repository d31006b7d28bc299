"""An orderly end: within its deadline whatever hangs, with the ledger saying that nobody manages the host."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import anyio
import pytest

from outfitter_drivers.api import Grant
from outfitter_proto.bus import BusUnavailableError
from outfitter_verify.buses import embedded
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.drivers.preparing import BENCHES, Bench
from support.managers.in_process import another, preparing, register, static
from support.managers.process import OUTFITTER, Manager, ManagerError, StartManager, files_config

pytestmark = pytest.mark.slow

DRIVERS = '''"""Drivers that do not close."""
import threading

import anyio
import anyio.to_thread

from outfitter.drivers import Device, ExternalResourceDriver, ExternalResourceDriverFactory, Inventory


class Hanging(ExternalResourceDriver, Inventory):
    def __init__(self, how):
        self.how = how

    async def retrieve_resource_info(self, amount, worker):
        return []

    async def inventory(self, host):
        yield [Device(properties={"index": "0"})]
        if self.how == "thread":
            await anyio.to_thread.run_sync(threading.Event().wait)
        elif self.how == "shielded":
            with anyio.CancelScope(shield=True):
                await anyio.sleep_forever()
        await anyio.sleep_forever()

    async def aclose(self):
        if self.how == "closing":
            await anyio.sleep_forever()


class Factory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config):
        return Hanging(config["how"])
'''


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_the_ledger_says_since_when(start_manager: StartManager, number: int) -> None:
    manager = start_manager()
    assert manager.outfitter("register", "--worker", "w", "--resource", "gpu=1", "--wait", "20").returncode == 0
    manager.signal(number)
    assert manager.wait() == 0
    [host] = [json.loads(line) for line in _ledger(manager) if b'"type":"host"' in line][-1:]
    assert host["manager"]["stopped_at"] is not None
    manager.start()
    assert manager.records()[-1]["state"] == "allocated"
    [host] = [json.loads(line) for line in _ledger(manager) if b'"type":"host"' in line][-1:]
    assert host["manager"]["stopped_at"] is None


def _ledger(manager: Manager) -> list[bytes]:
    [partition] = embedded.reading(manager.bus_url, manager.cluster).logs
    return [record.value or b"" for record in partition.allocations.records]


@pytest.mark.parametrize("how", ["thread", "shielded", "closing"])
def test_a_driver_that_does_not_close_delays_the_end_no_longer_than_the_deadline(
    start_manager: StartManager, tmp_path: Path, how: str
) -> None:
    (tmp_path / "letting_go.py").write_text(DRIVERS)
    limit = "15s" if how == "closing" else "6s"
    config = (
        f'shutdown-timeout = "{limit}"\nexternal-resources = ["odd"]\n[external-resource.odd]\namount = 1\n'
        f'driver = "letting_go:Factory"\nparam.how = "{how}"\n'
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    manager = start_manager(config, variables={"PYTHONPATH": path})
    assert manager.outfitter("register", "--worker", "w", "--resource", "odd=1", "--wait", "20").returncode == 0
    manager.signal(signal.SIGTERM)
    code = manager.wait(20)
    assert code == (0 if how == "closing" else 1)
    assert ("did not close in time" if how == "closing" else "ending as it stands") in manager.log_tail()
    [host] = [json.loads(line) for line in _ledger(manager) if b'"type":"host"' in line][-1:]
    assert host["manager"]["stopped_at"] is not None  # the last commit came before


async def test_a_stop_during_a_commit_still_says_so_in_the_ledger(bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(1)) as in_process:
        await in_process.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"])

        async def stop(point: str) -> None:
            if point == "commit:before" and not in_process.processor._stop.requested:
                in_process.processor.stop()

        bus.script = stop
        await in_process.say(register("w", gpu=1))
        with anyio.fail_after(20):
            await in_process.ended.wait()
        assert in_process.failure is None
        records = await in_process.records()
        assert records["h/w/1"]["state"] == "allocated"
        assert records["@host/h"]["manager"]["stopped_at"] is not None
    assert (await verdict(in_process.bus.url)).violations == ()


async def test_a_stop_while_the_bus_is_away_does_not_wait_for_it(bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(1)) as in_process:

        async def away(point: str) -> None:
            if not point.startswith("publish"):
                raise BusUnavailableError("away")

        await in_process.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"])
        bus.script = away
        await in_process.say(register("w", gpu=1))
        with anyio.fail_after(20):
            while in_process.processor.ready:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        await in_process.stop()
        assert in_process.failure is None


async def test_a_stop_while_a_device_is_prepared_leaves_it_to_the_next_manager(serve: Serve, tmp_path: Path) -> None:
    bench = BENCHES[str(tmp_path)] = Bench(str(tmp_path), 1)
    reached = anyio.Event()

    async def hang(_: Grant) -> None:
        reached.set()
        await anyio.sleep_forever()

    bench.preparing = hang
    async with serve(preparing(bench.name)) as in_process:
        await in_process.say(register("w", gpu=1))
        await reached.wait()
        await in_process.stop()
    bench.preparing = Bench("other").preparing
    async with serve(preparing(bench.name), identity=another()) as in_process:
        await in_process.state("w", "allocated")
    assert bench.violations == []


def test_a_manager_that_waits_for_its_bus_ends_when_it_is_told_to(start_manager: StartManager) -> None:
    manager = start_manager(bus="kafka://127.0.0.1:1", ready=False)
    manager.wait_for(lambda: "the bus is away, trying" in manager.log_tail())
    manager.signal(signal.SIGTERM)
    assert manager.wait(20) == 0


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "outfitter.toml").write_text(files_config(tmp_path / "gpus"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*OUTFITTER, "serve", "--config", str(tmp_path / "outfitter.toml"), "--bus", f"sqlite://{tmp_path}/bus.db",
             "--host", f"t-port-{port}", "--http", f"127.0.0.1:{port}"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert f"127.0.0.1:{port}" in line
    assert "--http" in line
    assert "Traceback" not in done.stderr


def test_a_configuration_that_cannot_be_used_ends_it_before_anything_is_served(start_manager: StartManager) -> None:
    with pytest.raises(ManagerError, match="lease"):
        start_manager('lease = "soon"\nexternal-resources = []\n')

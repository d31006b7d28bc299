"""A machine with NVIDIA's GPUs for tests, without any: the driver's fake.

`FakeMachine` is a file that says what NVML answers, and the files of sysfs, procfs and /dev beside it. The NVML process
is a real one, with the real package nvidia-ml-py: only the shared library below it is replaced (`pynvml.nvmlLib`). A
test changes the machine while the driver runs: a GPU is lost, NVML hangs, an Xid comes, MIG is made anew, the driver is
upgraded.

    machine = FakeMachine(tmp_path, gpus=[FakeGpu(0), FakeGpu(1)])
    driver = machine.driver()
    machine.change(1, lost=15)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from outfitter_drivers import settings
from outfitter_drivers.api import DriverParams, ExternalResourceDriverFactory
from outfitter_drivers.nvidia import options
from outfitter_drivers.nvidia.driver import CheckingNvmlDriver, NvmlDriver
from outfitter_drivers.nvidia.fake_library import FakeEvent, FakeGpu, FakeInstance, State
from outfitter_drivers.nvidia.process import NvmlProcess

__all__ = ["FakeEvent", "FakeGpu", "FakeGpuDriverFactory", "FakeInstance", "FakeMachine", "State"]


class FakeMachine:
    """A folder with the state and the files of a machine."""

    def __init__(self, folder: Path, gpus: Sequence[FakeGpu] | None = None, **more: Any) -> None:
        """`gpus` None: the machine that another process has made in this folder."""
        self.folder = folder
        self.path = folder / "nvml.json"
        self.root = folder / "root"
        if gpus is None:
            self.state = msgspec.json.decode(self.path.read_bytes(), type=State)
        else:
            self.state = State(gpus=list(gpus), **more)
            self.write()

    @property
    def command(self) -> tuple[str, ...]:
        """The command of an NVML process on this machine."""
        return (sys.executable, "-P", "-m", "outfitter_drivers.nvidia.fake_library", str(self.path))

    def driver(self, *, is_checking: bool = True, **more: Any) -> NvmlDriver:
        """A driver on this machine."""
        kind = CheckingNvmlDriver if is_checking else NvmlDriver
        timeout = more.setdefault("timeout", 10.0)
        return kind(nvml=NvmlProcess(self.command, timeout=timeout), root=self.root, **more)

    def change(self, number: int | None = None, /, **fields: Any) -> None:
        """Set fields of a GPU, or of the machine."""
        target: Any = self.state if number is None else self.state.gpus[number]
        for name, value in fields.items():
            setattr(target, name, value)
        self.write()

    def xid(self, code: int, gpu: int, **more: int) -> None:
        self.state.events.append(FakeEvent(gpu=gpu, data=code, **more))
        self.write()

    def write(self) -> None:
        """Write the state, and the files of the kernel."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self.state))
        new.replace(self.path)
        self._write("sys/module/nvidia/version", self.state.driver_version)
        self._write("dev/nvidiactl", "")
        for gpu in self.state.gpus:
            self._write_gpu(gpu)

    def _write_gpu(self, gpu: FakeGpu) -> None:
        """As the kernel's ABI/testing/sysfs-bus-pci and the driver's README describe them."""
        folder = f"sys/bus/pci/devices/{gpu.bus_id}"
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(gpu.numa_node))):
            self._write(f"{folder}/{name}", text)
        link = self.root / folder / "driver"
        link.unlink(missing_ok=True)
        link.symlink_to(f"../../../../bus/pci/drivers/{'nvidia' if gpu.is_bound else 'vfio-pci'}")
        self._write(
            f"proc/driver/nvidia/gpus/{gpu.bus_id}/information",
            f"Model: \t\t {gpu.name}\nGPU UUID: \t {gpu.uuid}\nDevice Minor: \t {gpu.number}\nGPU Excluded:\t No\n",
        )
        self._write(f"dev/nvidia{gpu.number}", "")

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


class FakeGpuDriverFactory(ExternalResourceDriverFactory):
    """Builds the driver on a machine that `FakeMachine` has made, in the folder `machine`; for trying a configuration
    without GPUs. Its other settings are those of `gpu`."""

    def create_external_resource_driver(self, config: DriverParams) -> NvmlDriver:
        settings.reject_unknown(config, ("machine", "poll-interval"), prefixes=(options.XID,))
        folder = (config.directory or Path()) / config.get("machine", ".")
        interval = settings.seconds(config, "poll-interval", default=1.0, maximum=3600)
        return FakeMachine(folder).driver(poll_interval=interval, classes=options.xid_classes(config))

"""The machine that is checked: one with GPUs, or a pretended one, so that the check itself is tested without any."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from outfitter_drivers.nvidia.driver import CheckingNvmlDriver, Interface
from outfitter_drivers.nvidia.testing import FakeGpu, FakeMachine

CUDA = Path(__file__).with_name("cuda.py")
SMI_FIELDS = ("index", "uuid", "memory.total", "pci.bus_id", "name", "driver_version")


class Machine:
    """A machine with NVIDIA's GPUs."""

    config = 'driver = "gpu"\nparam.interface = "nvml"\nparam.poll-interval = "2s"\n'

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cuda = [sys.executable, str(CUDA)]

    def driver(self, interface: Interface) -> CheckingNvmlDriver:
        return CheckingNvmlDriver(interface=interface)

    def outfitter(self, *arguments: str) -> list[str]:
        """A command line of ours."""
        return [sys.executable, "-c", "from outfitter_service.cli import main; main()", *arguments]

    def uses(self, uuid: str | None, pids: list[int]) -> None:
        """These processes use that GPU."""

    def smi(self) -> list[dict[str, str]]:
        """What nvidia-smi says of the GPUs."""
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        rows = [line.split(",") for line in said.stdout.splitlines()]
        return [dict(zip(SMI_FIELDS, map(str.strip, row), strict=False)) for row in rows]


class PretendedMachine(Machine):
    """Two GPUs that do not exist."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fake = FakeMachine(folder / "machine", [FakeGpu(0), FakeGpu(1)])
        self.config = (
            f'driver = "outfitter_drivers.nvidia.testing:FakeGpuDriverFactory"\nparam.machine = "{folder}/machine"\n'
        )
        self.cuda.append("--pretend")
        rows = [
            ", ".join((str(gpu.number), gpu.uuid, str(gpu.memory_mib), f"0000{gpu.bus_id}", gpu.name))
            for gpu in self.fake.state.gpus
        ]
        program = folder / "bin/nvidia-smi"
        program.parent.mkdir()
        program.write_text(
            "#!/bin/sh\ncase $1 in *driver_version) end=570.124.06 ;; *) end='None, Disabled' ;; esac\n"
            f'for row in {shlex.join(rows)}; do echo "$row, $end"; done\n'
        )
        program.chmod(0o755)
        os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"

    def driver(self, interface: Interface) -> CheckingNvmlDriver:
        driver: Any = self.fake.driver(interface=interface)
        return driver

    def outfitter(self, *arguments: str) -> list[str]:
        """As above; what it takes for NVML processes are those of this machine."""
        launch = (
            "from outfitter_drivers.nvidia import release; from outfitter_service.cli import main; "
            f"release.MODULE = {str(self.fake.path)!r}; main()"
        )
        return [sys.executable, "-c", launch, *arguments]

    def uses(self, uuid: str | None, pids: list[int]) -> None:
        number = next(gpu.number for gpu in self.fake.state.gpus if gpu.uuid == uuid)
        self.fake.change(number, processes=pids)

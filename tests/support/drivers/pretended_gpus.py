"""A host's NVIDIA GPUs that do not exist, told alike by the nvidia-smi on its PATH and by NVML.

Of a GPU in MIG mode nvidia-smi shows the mode, and the processes as those of the whole card.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outfitter_drivers.nvidia.testing import FakeGpu, FakeMachine
from support.drivers.gpu_machine import executable

_ANSWER = """
case "$*" in
*--query-compute-apps=*) cat {folder}/processes ;;
*mig.mode.current*) cat {folder}/gpus ;;
*) cat {folder}/gpus-of-few-fields ;;
esac
"""
"""The three questions that this version and the last release ask."""
_SERVING = """
import functools, pathlib
from outfitter_drivers.nvidia import driver
from outfitter_service.cli import main
driver.ROOT = pathlib.Path({root!r})
driver.NvmlProcess = functools.partial(driver.NvmlProcess, {command!r})
main()
"""


class PretendedGpus:
    """The GPUs in `folder`. `path`: of whoever calls nvidia-smi. `program`, `program_without_nvml`: command lines of
    Outfitter by which a manager's driver `gpu` finds these GPUs, or at least finds no real ones by NVML."""

    def __init__(self, folder: Path, gpus: Sequence[FakeGpu]) -> None:
        self.fake = FakeMachine(folder / "nvml", gpus)
        self._smi = folder / "smi"
        self.path = f"{folder}/bin:{os.environ['PATH']}"
        self.program = self._program(self.fake.root)
        self.program_without_nvml = self._program(folder / "no-root")
        executable(folder / "bin" / "nvidia-smi", _ANSWER.format(folder=self._smi))
        self._write()

    def change(self, number: int, **fields: Any) -> None:
        """Set fields of a GPU."""
        self.fake.change(number, **fields)
        self._write()

    def number(self, uuid: str) -> int:
        return next(gpu.number for gpu in self.fake.state.gpus if gpu.uuid == uuid)

    def uuids(self, model: str) -> list[str]:
        return [gpu.uuid for gpu in self.fake.state.gpus if model in gpu.name]

    def _program(self, root: Path) -> tuple[str, ...]:
        return (sys.executable, "-c", _SERVING.format(root=str(root), command=self.fake.command))

    def _write(self) -> None:
        gpus = self.fake.state.gpus
        rows = [f"{gpu.number}, {gpu.uuid}, {gpu.memory_mib}, 0000{gpu.bus_id.upper()}, {gpu.name}" for gpu in gpus]
        modes = ["Enabled" if gpu.mig and gpu.mig[0] else "Disabled" for gpu in gpus]
        pids = [(gpu.uuid, pid) for gpu in gpus for each in (gpu, *gpu.instances) for pid in each.processes]
        self._answer("gpus-of-few-fields", rows)
        self._answer("gpus", [f"{row}, None, {mode}" for row, mode in zip(rows, modes, strict=True)])
        self._answer("processes", [f"{uuid}, {pid}, python" for uuid, pid in pids])

    def _answer(self, name: str, rows: Sequence[str]) -> None:
        self._smi.mkdir(exist_ok=True)
        new = self._smi / f".{name}"
        new.write_text("".join(f"{row}\n" for row in rows))
        new.replace(self._smi / name)

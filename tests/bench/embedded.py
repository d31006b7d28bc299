"""Outfitter on the embedded bus: what `outfitter run` costs, and how soon one worker has one device."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
from msgspec import Struct

from bench import machine
from outfitter import RuntimeContext
from outfitter.session.worker_session import WorkerSession
from outfitter_proto import bus as buses
from outfitter_proto.records import Register, ResourceRequest
from support.managers.process import Manager, environment, files_config

OUTFITTER = (str(Path(sys.executable).parent / "outfitter"),)


class Embedded(Struct, kw_only=True):
    """Medians in milliseconds. `context` is entering a `RuntimeContext` until its infos are there, bus, thread and
    all; `session` is registering until the infos are there, on a bus that is open."""

    python_ms: float
    python_cpu_ms: float
    run_ms: float
    run_cpu_ms: float
    context_ms: list[float]
    session_ms: list[float]


def measure(folder: Path, *, runs: int, grants: int) -> Embedded:
    """Measure beside a manager with one device."""
    manager = Manager(folder, files_config(folder / "gpus", gpus=1), arguments=["--log-level", "warning"])
    manager.bus_url = f"sqlite://{folder}/bus.db"  # as people have it: each commit is on the disk
    manager.start()
    try:
        env = environment(OUTFITTER_BUS=manager.bus_url, OUTFITTER_HOST=manager.host)
        # compiled once, as installed packages are
        env["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        run_command = [*OUTFITTER, "run", "--resource", "gpu=1", "--", "true"]
        _milliseconds(run_command, env)
        python: list[tuple[float, float]] = []
        whole: list[tuple[float, float]] = []
        for _ in range(runs):
            python.append(_milliseconds([sys.executable, "-c", "pass"], env))
            whole.append(_milliseconds(run_command, env))
        contexts = [_context(manager) for _ in range(grants)]
        sessions = anyio.run(_sessions, manager, grants)
    finally:
        manager.stop()
    python_ms, python_cpu_ms = (machine.median(figures) for figures in zip(*python, strict=True))
    run_ms, run_cpu_ms = (machine.median(figures) for figures in zip(*whole, strict=True))
    return Embedded(
        python_ms=python_ms,
        python_cpu_ms=python_cpu_ms,
        run_ms=run_ms,
        run_cpu_ms=run_cpu_ms,
        context_ms=contexts,
        session_ms=sessions,
    )


def _milliseconds(command: Sequence[str], env: dict[str, str]) -> tuple[float, float]:
    """How long a command takes, start to end, and the CPU time of it and of what it started."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=env, check=True, stdin=subprocess.DEVNULL)
    took, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took * 1000, used * 1000


def _context(manager: Manager) -> float:
    begun = time.perf_counter()
    with RuntimeContext({"gpu": 1}, bus=manager.bus_url, host=manager.host) as context:
        infos = context.get_external_resource_infos("gpu")
        took = (time.perf_counter() - begun) * 1000
    if len(infos) != 1:
        raise RuntimeError(f"one device was wanted, {len(infos)} came")
    return took


async def _sessions(manager: Manager, count: int) -> list[float]:
    took: list[float] = []
    async with buses.connect(manager.bus_url) as bus:
        for number in range(count):
            asked = Register(
                host=manager.host,
                worker="bench",
                incarnation=f"bench-{number}",
                resources={"gpu": ResourceRequest(amount=1)},
            )
            begun = time.perf_counter()
            async with WorkerSession(bus, asked) as session:
                await session.wait()
                took.append((time.perf_counter() - begun) * 1000)
    return took

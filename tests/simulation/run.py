"""Run a seed, and say what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog
from msgspec import Struct

from simulation import promises
from simulation.loop import START_S, Loop, current, running
from simulation.model.client import ModelBus
from simulation.world.world import MakeBus, World

MOMENTS = 300
"""How often managers' states are compared with the ledger, to find a moment without a commit. With a slow broker these
moments are rare."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of a seed. `violations` should be empty. `digest` is the same for each run of it."""

    seed: int
    steps: int
    seconds: float
    faults: int
    digest: str
    counts: dict[str, int]
    violations: list[str]
    log: list[str] = []


def run(seed: int, *, make_bus: MakeBus = ModelBus, traced: bool = False) -> Outcome:
    """Run one seed. `make_bus` makes each manager's bus; `traced` has all written down."""
    with _told(traced) as lines, running(seed) as loop:
        world = World(loop, seed, make_bus=make_bus, log=lines if traced else None)
        loop.run_until_complete(loop.spawn(loop.world, world.main))
        for _ in range(MOMENTS):  # not in the middle of a commit
            if not promises.at_odds(world):
                break
            loop.run_until_complete(loop.spawn(loop.world, lambda: asyncio.sleep(0.13)))
        steps, digest, seconds = loop.steps, loop.digest, loop.time() - START_S
        violations, counts = promises.check(world)
        loop.run_until_complete(loop.spawn(loop.world, lambda: _end(world)))
        return Outcome(
            seed=seed, steps=steps, seconds=seconds, faults=world.faults.count, digest=f"{digest:012x}",
            counts=counts, violations=violations, log=lines,
        )  # fmt: skip


async def _end(world: World) -> None:
    """End every task there is: nobody looks any more, and Python has nothing to complain about."""
    world.close()
    me = asyncio.current_task()
    for _ in range(100):
        await asyncio.sleep(1.0)  # a task that has not begun must not be cancelled: its coroutine would complain
        left = [task for process in world.processes for task in process.tasks if not task.done() and task is not me]
        if not left:
            return
        for task in left:
            task.cancel()
    raise RuntimeError(f"these tasks do not end: {left}")


@contextmanager
def _told(traced: bool) -> Iterator[list[str]]:
    """What the runtime logs: nothing, or into a list."""
    lines: list[str] = []

    def write(level: str, what: str) -> None:
        loop = _running()
        at = loop.time() - START_S if loop is not None else 0.0
        who = current().name if loop is not None else "-"
        lines.append(f"{at:9.3f} {who:10} {level}: {what}")

    def keep(_: Any, level: str, event: MutableMapping[str, Any]) -> str:
        what = event.pop("event")
        about = " ".join(f"{name}={value}" for name, value in event.items() if name not in ("exc_info", "host"))
        write(level, f"{what} {about}")
        raise structlog.DropEvent

    def keep_line(record: logging.LogRecord) -> bool:
        if traced:
            write(record.levelname.lower(), record.getMessage())
        return False

    worker_log = logging.getLogger("outfitter")
    worker_log.addFilter(keep_line)
    before = structlog.get_config()
    structlog.configure(
        processors=[keep],
        wrapper_class=structlog.make_filtering_bound_logger(0 if traced else 50),
        cache_logger_on_first_use=False,
    )
    try:
        yield lines
    finally:
        structlog.configure(**before)
        worker_log.removeFilter(keep_line)


def _running() -> Loop | None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if isinstance(loop, Loop) else None

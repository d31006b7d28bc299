"""When the driver that alone knows of what devices are parts says so: on some hosts late, and not always."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from simulation.hosts.hardware import LOOK_S

if TYPE_CHECKING:
    from simulation.hosts.managers import Host
    from simulation.world.world import World

EVERY_S = 15.0


class Silence:
    """One host's driver of parts."""

    def __init__(self, world: World, host: Host) -> None:
        self._world = world
        self._bench = host.bench
        self._dice = random.Random(f"{world.seed}/{host.name}/parts")
        self._late_s = self._dice.choice((0.0, self._dice.uniform(3.0, 25.0)))
        self._bench.keeps_silent = self._late_s > 0

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Learn, forget and learn again until the world is at rest."""
        await anyio.sleep(self._late_s)
        while not is_over():
            self._keep_silent(False)
            await anyio.sleep(self._dice.expovariate(1 / EVERY_S))
            if is_over():
                return
            self._keep_silent(True)
            await anyio.sleep(self._dice.choice((LOOK_S, 20 * self._dice.random())))

    def _keep_silent(self, keeps_silent: bool) -> None:
        self._bench.keeps_silent = keeps_silent
        self._world.note(self._bench.host, f"{'nobody' if keeps_silent else 'a driver'} says what is part of what")


def silences(world: World) -> list[Silence]:
    """Those of a world's hosts."""
    is_any = world.setting.silent and world.setting.catalogue.parts
    return [Silence(world, host) for host in world.hosts] if is_any else []

"""Worlds in which an administrator lowers what the topics take while managers run, and raises it again."""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio

from simulation.model.broker import Broker

LOWERING = 0.2
"""How many of the worlds have an administrator who does that."""
LIMITS = (600, 1200, 1800, 2500, 5000)
"""From less than a checkpoint needs to what most commits keep to."""
EVERY_S = 15.0
LOW_S = 8.0


class Lowering:
    """Lowers the limit of all topics that managers write to now and then, for a while."""

    def __init__(self, broker: Broker, dice: random.Random) -> None:
        self._broker = broker
        self._dice = dice

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Lower and raise until the world is at rest."""
        while not is_over():
            await anyio.sleep(self._dice.expovariate(1 / EVERY_S))
            if is_over():
                break
            self._broker.lowered_to = self._dice.choice(LIMITS)
            await anyio.sleep(self._dice.expovariate(1 / LOW_S))
            self._broker.lowered_to = None


def lowering(broker: Broker, seed: int) -> Lowering | None:
    """The administrator of a seed's world, if it has one."""
    dice = random.Random(f"{seed}/lowering")
    return Lowering(broker, dice) if dice.random() < LOWERING else None

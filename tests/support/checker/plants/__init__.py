"""Violations planted in a clean stream for the checker to find. Each says by which check, and in what words."""

from __future__ import annotations

from collections.abc import Callable

from support.checker.streams import World

Plant = Callable[[World], None]
PLANTS: dict[str, tuple[str, str, Plant]] = {}


def planted(by: str, says: str = "") -> Callable[[Plant], Plant]:
    """This function plants a violation that the check `by` must find, and tell in words that include `says`."""

    def keep(plant: Plant) -> Plant:
        PLANTS[plant.__name__.replace("_", " ")] = (by, says, plant)
        return plant

    return keep

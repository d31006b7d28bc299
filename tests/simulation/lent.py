"""What a record lends, by what each device really is."""

from __future__ import annotations

from typing import Any

from simulation.hosts.hardware import HALF, physical
from support.exclusivity import Held

HOLDING = ("preparing", "allocated", "releasing")


def lent(found: dict[str, Any]) -> Held:
    """The devices of a record, as its JSON has it, each by its one name. Those of `half` are replicas if the record
    says so: a manager may be configured to lend them whole."""
    if found.get("state") not in HOLDING:
        return Held()
    shared, halves = found.get("shared", []), _halves(found)
    ids = {name: [physical(info["id"]) for info in infos] for name, infos in found["resources"].items()}
    return Held(
        frozenset(
            [each for name in ids.keys() - {*shared} for each in ids[name] if name != HALF or each not in halves]
        ),
        frozenset([each for name in shared for each in ids.get(name, ())]),
        tuple([each for each in ids.get(HALF, ()) if each in halves]),
    )


def _halves(found: dict[str, Any]) -> set[str]:
    return {
        physical(pool) for pool, use in found.get("uses", {}).items() if any("replicas" in word for word in use[2:])
    }

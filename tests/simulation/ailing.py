"""What must be so of devices that were ill after a run: by what the topic says of them, and when."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from simulation.hosts.managers import Host
from simulation.lent import HOLDING
from simulation.model import log as model
from simulation.ordered import commits
from simulation.world.world import World

CERTAIN = 1 / 3
"""A device that is lent after less of its time was lent too early for certain: a commit may take long, and others'
changes begin a host's record anew."""


def lent_while_ailing(world: World, host: Host, ledger: model.Log) -> list[str]:
    """No device is lent that the host's record calls ill, or soon after that. Managers of one host have one clock, if
    nobody sets it; those of cluster scope have several."""
    time_s = world.setting.catalogue.min_healthy_s
    if not time_s or world.setting.jumps or world.setting.replicas or world.setting.changes:
        return []
    wrong: list[str] = []
    ill: dict[tuple[str, str], datetime] = {}
    well: dict[tuple[str, str], datetime] = {}
    tokens: set[int] = set()
    for commit in commits(ledger):
        for key, body in commit:
            if not key.startswith(f"{host.name}/") or body is None or body["state"] not in HOLDING:
                continue
            if body.get("token") in tokens:
                continue
            tokens.add(body["token"])
            since = datetime.fromisoformat(body["since"])
            for resource, infos in body["resources"].items():
                for device in ((resource, info["id"]) for info in infos):
                    if device in ill and since >= ill[device]:
                        wrong.append(f"PROMISE 6: {key} gets {device[1]}, which is ill")
                    elif device in well and (since - well[device]).total_seconds() < time_s * CERTAIN:
                        wrong.append(f"PROMISE 6: {key} gets {device[1]}, which was ill at {well[device]}")
        for key, body in commit:
            if key == f"@host/{host.name}" and body is not None:
                _note(body, ill, well)
    return wrong[:5]


def _note(told: dict[str, Any], ill: dict[tuple[str, str], datetime], well: dict[tuple[str, str], datetime]) -> None:
    """Note which devices a host's record calls ill, and which no longer. A record without room does not list all."""
    since = datetime.fromisoformat(told["since"])
    for resource, inventory in told.get("resources", {}).items():
        listed = {each["id"] for each in inventory.get("devices", ())}
        for device in [each for each in ill if each[0] == resource and each[1] not in listed]:
            del ill[device]
        for each in inventory.get("devices", ()):
            device = (resource, each["id"])
            if each.get("health") == "unhealthy":
                ill.setdefault(device, since)
                well.pop(device, None)
            elif ill.pop(device, None) is not None:
                well[device] = since

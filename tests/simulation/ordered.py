"""What must be so of operators' orders after a run: by what each device really is, and by what the topic says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from outfitter_proto.codec import WireError, decode_order
from outfitter_proto.records import Cordon
from outfitter_service.runtime.processor.processor import Processor
from simulation.hosts.hardware import RESOURCE, physical
from simulation.hosts.managers import TOPICS, Host
from simulation.lent import HOLDING
from simulation.model import log as model
from simulation.world.operators import CONTROL
from simulation.world.world import World


def lent_although_ordered(host: Host, ledger: model.Log) -> list[str]:
    """No device is lent that an order takes out before the commit of its grant, and after it: whatever its names."""
    wrong: list[str] = []
    had: dict[str, dict[str, Any]] = {}
    told: dict[str, Any] = {}
    before: dict[str, dict[str, Any]] = {}
    for commit in commits(ledger):
        after, connected, parts = dict(before), _connected(told), _parts(told)
        granted: list[tuple[str, str, str, datetime]] = []
        for key, body in commit:
            if key.startswith(f"@cordon/{host.name}/"):
                after.pop(key, None) if body is None else after.update({key: body})
            elif key == f"@host/{host.name}":
                told = body or {}
            elif key.startswith(f"{host.name}/"):
                held = had.pop(key, {})
                if body is not None and body["state"] in HOLDING:
                    had[key] = body["resources"]
                    granted += [
                        (key, resource, info["id"], datetime.fromisoformat(body["since"]))
                        for resource, infos in body["resources"].items()
                        for info in infos
                        if info["id"] not in _ids(held)
                    ]
        connected, parts = connected & _connected(told), parts & _parts(told)
        steady = [order for key, order in before.items() if after.get(key) == order]
        wrong += [
            f"PROMISE 6: {key} gets {device} of {resource}, which order {order['order']} takes out"
            for key, resource, device, since in granted
            for order in steady
            # a ledger that was made anew has no grants from before, only later versions of their records
            if since >= datetime.fromisoformat(order["since"]) and _takes_out(order, resource, device, connected, parts)
        ]
        before = after
    return sorted(set(wrong))[:5]


def commits(ledger: model.Log) -> Iterable[list[tuple[str, Any]]]:
    """The records of each commit: up to its checkpoint."""
    commit: list[tuple[str, Any]] = []
    for record, _ in ledger.committed():
        key = (record.key or b"").decode()
        commit.append((key, None if record.value is None else json.loads(record.value)))
        if key.startswith("@checkpoint/"):
            yield commit
            commit = []


def _ids(resources: dict[str, Any]) -> set[str]:
    return {info["id"] for infos in resources.values() for info in infos}


def _connected(told: dict[str, Any]) -> set[str]:
    """The devices of which a host's record has several names."""
    return {
        physical(names[0]) for resource in told.get("resources", {}).values() for names in resource.get("names") or ()
    }


def _parts(told: dict[str, Any]) -> set[tuple[str, str]]:
    """What a host's record says of parts, each with its whole."""
    return {
        (part, whole)
        for resource in told.get("resources", {}).values()
        for whole, parts in (resource.get("parts") or {}).items()
        for part in parts
    }


def _takes_out(
    order: dict[str, Any], resource: str, device: str, connected: set[str], parts: set[tuple[str, str]]
) -> bool:
    """Whether an order certainly applies: to the device, to a part of it, or to what it is a part of. That two names
    mean one device, or a device and a part of it, is for a driver to say."""
    ordered = order.get("device")
    if ordered is None:
        return order.get("resource") in (None, resource)

    def is_same(one: str, other: str) -> bool:
        is_known = f"-{RESOURCE}-" in other and physical(one) == physical(other) and physical(other) in connected
        return one == other or is_known

    is_related = any(
        (part == device and is_same(ordered, physical(whole)) and is_same(whole, physical(whole)))
        or (part == ordered and is_same(whole, device))
        for part, whole in parts
    )
    return is_same(ordered, device) or is_related


def in_effect_at_rest(world: World) -> list[str]:
    """Once nothing happens any more, just those orders are in effect that stand in the topic. The ledger may have
    forgotten a host that nobody uses: orders to it wait until somebody does."""
    if world.operators is None:
        return []
    ledger = _in_ledger(world)
    hosts = {key.removeprefix("@host/") for key in ledger if key.startswith("@host/")}
    last: dict[str, str | None] = {}
    for record, _ in world.broker.logs[CONTROL, 0].committed():
        if record.value is not None:
            try:
                order = decode_order(record.value, key=record.key)
            except WireError:
                continue
            stands = order.ended_at is None or not order.ended_at
            last[order.id] = f"@cordon/{order.host}/{order.id}" if stands and order.host in hosts else None
    wanted = {key for key in last.values() if key is not None}
    found = {key for key in ledger if key.startswith("@cordon/")}
    return [
        *(f"PROMISE 6: {key} stands in the topic, and is not in effect" for key in sorted(wanted - found)),
        *(f"PROMISE 6: {key} is in effect, and does not stand in the topic" for key in sorted(found - wanted)),
    ]


def _in_ledger(world: World) -> set[str]:
    """The keys that the ledger has."""
    keys: set[str] = set()
    for number in range(world.setting.partitions):
        for record, _ in world.broker.logs[TOPICS.allocations, number].committed():
            key = (record.key or b"").decode()
            (keys.discard if record.value is None else keys.add)(key)
    return keys


def in_mind(processor: Processor) -> dict[str, Cordon]:
    """The orders that a processor has in mind, by their keys."""
    return {
        cordon.key: cordon for host_state in processor.ledger.hosts.values() for cordon in host_state.cordons.values()
    }

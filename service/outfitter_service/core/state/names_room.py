"""The room for what drivers connect in a host's record, names and parts: all of a report fits, or it is refused.

A name that the record lacks could let a device be lent twice after a restart. So a report with more names than there is
room for counts for no grant. Resources are counted in the order of the configuration. So the same one is refused after
each restart, and none pushes out another that is configured before it. What was lent stays lent, under all its names.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, structs

from outfitter_proto.codec import encode
from outfitter_proto.records import ResourceInventory
from outfitter_service.core.model import ResourceSpec, SpecState
from outfitter_service.core.state.device_names import NO_LINKS, Links, Parts, by_whole, pairs
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.infos import names_held, other_names
from outfitter_service.core.state.resource_state import NOT_REPORTED, RefusedNames, ResourceState


def record_bytes(max_bytes: int) -> int:
    """The most bytes of a host's inventories in its record. `max_bytes`: those of a decision."""
    return max_bytes // 2


def most_bytes(max_bytes: int) -> int:
    """The most bytes of names among these. The rest is for numbers and states, and for the devices that are listed."""
    return record_bytes(max_bytes) * 9 // 10


def size(links: Links) -> int:
    """The bytes that names and parts take in a record."""
    names = len(encode(links.names)) if links.names else 0
    return names + (len(encode(by_whole(links.parts))) if links.parts else 0)


def without_room(wanted: Mapping[str, int], kept: Mapping[str, int], most: int) -> dict[str, int]:
    """The resources whose names do not fit, each with the bytes that there are for it.

    `wanted`: the bytes of each resource's names, in the order of the configuration. `kept`: how many of them stay in
    the record if the resource is refused. Bytes that stay are taken before all others.
    """
    left = most - sum(kept.values())
    refused: dict[str, int] = {}
    for resource, needed in wanted.items():
        room = max(left + kept.get(resource, 0), 0)
        if needed > room:
            refused[resource] = room
        else:
            left = room - needed
    return refused


def reassessed(
    host_state: HostState, specs: Mapping[str, ResourceSpec], inventories: Mapping[str, ResourceState], max_bytes: int
) -> dict[str, ResourceState]:
    """Those of a host's inventories that are refused from now on, or no longer. `inventories`: the current ones, the
    latest report included."""
    recorded = host_state.record.resources if host_state.record is not None else {}
    links: dict[str, Links] = {}
    for resource, spec in specs.items():
        if spec.state == SpecState.OK:
            inventory = inventories.get(resource, NOT_REPORTED)
            links[resource] = inventory.links if inventory.reported else _links(recorded.get(resource))
    most = most_bytes(max_bytes)
    wanted = {resource: size(each) for resource, each in links.items()}
    lasting = {resource: size(_links(entry)) for resource, entry in recorded.items() if resource not in links}
    is_tight = sum(wanted.values()) + sum(lasting.values()) > most
    if not is_tight and not any(inventory.refused for inventory in inventories.values()):
        return {}  # nearly always
    kept = {resource: _needed(host_state, _links(recorded.get(resource))) for resource in links}
    sizes = {resource: size(each) for resource, each in kept.items()}
    refused = without_room(wanted, sizes | (lasting if host_state.keeps_names else {}), most)
    changed: dict[str, ResourceState] = {}
    for resource in links:
        inventory = inventories.get(resource, NOT_REPORTED)
        now = None
        if resource in refused:
            now = RefusedNames(size=wanted[resource], room=refused[resource], most=most, kept=kept[resource])
        if now != inventory.refused:
            changed[resource] = structs.replace(inventory, refused=now)
    return changed


def _links(recorded: ResourceInventory | None) -> Links:
    if recorded is None:
        return NO_LINKS
    return Links(tuple([tuple(group) for group in recorded.names or ()]), pairs(recorded.parts or {}))


def _needed(host_state: HostState, links: Links) -> Links:
    """What the host's record keeps in any case: the names of a held device, while its holder's record lacks one of
    them, and those of a device that an operator's order names; and what somebody holds a part of."""
    needed = lacking_names(host_state) | ordered_names(host_state) if links.names else set()
    names = [group for group in links.names if not needed.isdisjoint(group)]
    return Links(tuple(names), held_parts(host_state, links.parts))


def held_parts(host_state: HostState, parts: Parts) -> tuple[tuple[str, str], ...]:
    """Those of which somebody holds the part or the whole."""
    canonical, used = host_state.devices.canonical, host_state.devices.pools.used
    return tuple([pair for pair in parts if any(canonical(name) in used for name in pair)])


def lacking_names(host_state: HostState) -> set[str]:
    """All names of the held devices whose holders' records lack some of them."""
    lacking: set[str] = set()
    for record in host_state.holders.live.values():
        for device_id, others in names_held(record):
            if (names_now := other_names(device_id, others, host_state.devices.classes)) != list(others):
                lacking.update((device_id, *names_now))
        for pool in record.uses or ():  # a device of which it has a part: the record has no other names of that one
            lacking.update(host_state.devices.classes.get(pool, ()))
    return lacking


def ordered_names(host_state: HostState) -> set[str]:
    """All names of the devices that operators' orders name."""
    ordered: set[str] = set()
    for cordon in host_state.cordons.values():
        if cordon.device is not UNSET:
            ordered.update(host_state.devices.classes.get(cordon.device, (cordon.device,)))
    return ordered

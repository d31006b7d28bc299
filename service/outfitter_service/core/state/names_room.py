"""The room for the names of devices in a host's record: all names of a report fit, or the report is refused.

A name that the record lacks could let a device be lent twice after a restart. So a report with more names than there is
room for counts for no grant. Resources are counted in the order of the configuration. So the same one is refused after
each restart, and none pushes out another that is configured before it. What was lent stays lent, under all its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET, structs

from outfitter_proto.codec import encode
from outfitter_proto.records import ResourceInventory
from outfitter_service.core.model import ResourceSpec, SpecState
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.infos import names_held, other_names
from outfitter_service.core.state.resource_state import NOT_REPORTED, RefusedNames, ResourceState

Groups = Iterable[Sequence[str]]
"""The names of devices with several names, device by device."""


def record_bytes(max_bytes: int) -> int:
    """The most bytes of a host's inventories in its record. `max_bytes`: those of a decision."""
    return max_bytes // 2


def most_bytes(max_bytes: int) -> int:
    """The most bytes of names among these. The rest is for numbers and states, and for the devices that are listed."""
    return record_bytes(max_bytes) * 9 // 10


def size(groups: Groups) -> int:
    """The bytes that names take in a record."""
    groups = list(groups)
    return len(encode(groups)) if groups else 0


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
    names: dict[str, Groups] = {}
    for resource, spec in specs.items():
        if spec.state == SpecState.OK:
            inventory = inventories.get(resource, NOT_REPORTED)
            names[resource] = inventory.names if inventory.reported else _names(recorded.get(resource))
    most = most_bytes(max_bytes)
    wanted = {resource: size(groups) for resource, groups in names.items()}
    lasting = {resource: size(_names(entry)) for resource, entry in recorded.items() if resource not in names}
    is_tight = sum(wanted.values()) + sum(lasting.values()) > most
    if not is_tight and not any(inventory.refused for inventory in inventories.values()):
        return {}  # nearly always
    kept = {resource: _needed(host_state, recorded.get(resource)) for resource in names}
    sizes = {resource: size(groups) for resource, groups in kept.items()}
    refused = without_room(wanted, sizes | (lasting if host_state.keeps_names else {}), most)
    changed: dict[str, ResourceState] = {}
    for resource in names:
        inventory = inventories.get(resource, NOT_REPORTED)
        now = None
        if resource in refused:
            now = RefusedNames(size=wanted[resource], room=refused[resource], most=most, kept=kept[resource])
        if now != inventory.refused:
            changed[resource] = structs.replace(inventory, refused=now)
    return changed


def _names(recorded: ResourceInventory | None) -> list[list[str]]:
    return recorded.names or [] if recorded is not None else []


def _needed(host_state: HostState, recorded: ResourceInventory | None) -> tuple[tuple[str, ...], ...]:
    """The recorded names that the host's record keeps in any case: those of a held device, while its holder's record
    lacks one of them, and those of a device that an operator's order names."""
    groups = _names(recorded)
    needed = lacking_names(host_state) | ordered_names(host_state) if groups else ()
    return tuple([tuple(group) for group in groups if not needed.isdisjoint(group)]) if needed else ()


def lacking_names(host_state: HostState) -> set[str]:
    """All names of the held devices whose holders' records lack some of them."""
    lacking: set[str] = set()
    for record in host_state.holders.live.values():
        for device_id, others in names_held(record):
            if (names_now := other_names(device_id, others, host_state.devices.classes)) != list(others):
                lacking.update((device_id, *names_now))
    return lacking


def ordered_names(host_state: HostState) -> set[str]:
    """All names of the devices that operators' orders name."""
    ordered: set[str] = set()
    for cordon in host_state.cordons.values():
        if cordon.device is not UNSET:
            ordered.update(host_state.devices.classes.get(cordon.device, (cordon.device,)))
    return ordered

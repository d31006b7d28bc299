"""Operators' orders in effect on one host: to which of its devices they apply.

A device is cordoned under all of its names, in every resource that shows it, while any order applies to it, to a part
of it, or to what it is a part of. It is a block as illness is (`lending`). The core assesses it when a driver reports
and when an order begins or ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import UNSET

from outfitter_proto.records import Cordon, ResourceInventory
from outfitter_service.core.state.device_names import CanonicalName, Links, one_name_each, wholes_of
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.resource_state import NOT_REPORTED, ResourceState

Cordons = Mapping[str, Cordon]
"""Orders in effect on one host, by their ids."""


def reassessed(
    host_state: HostState, cordons: Cordons, inventories: Mapping[str, ResourceState]
) -> dict[str, ResourceState]:
    """Those of a host's inventories whose cordoned devices change. `inventories`: the current ones, the latest report
    included."""
    if not cordons and not any(inventory.cordoned for inventory in inventories.values()):
        return {}  # nearly always
    recorded = host_state.record.resources if host_state.record is not None else {}
    links = [
        _connected(host_state, resource, inventories.get(resource, NOT_REPORTED))
        for resource in {**inventories, **recorded}
    ]
    synonyms, _ = one_name_each([names for each in links for names in each.names])
    by_name: dict[CanonicalName, str] = {}
    for order, cordon in sorted(cordons.items()):
        for name in _names(cordon, inventories, recorded):
            by_name.setdefault(synonyms.get(name, CanonicalName(name)), order)
    above = wholes_of([pair for each in links for pair in each.parts], synonyms)
    related = [(part, whole) for part, wholes in above.items() for whole in wholes]
    related += [(whole, part) for part, whole in related]
    by_name |= {name: by_name[other] for name, other in related if other in by_name and name not in by_name}
    everything = next((order for order, cordon in sorted(cordons.items()) if _is_of_host(cordon)), None)
    changed: dict[str, ResourceState] = {}
    for resource, inventory in inventories.items():
        orders = {
            device.id: by_name.get(synonyms.get(device.id, CanonicalName(device.id)), everything)
            for device in inventory.as_reported
        }
        cordoned = {device_id: order for device_id, order in orders.items() if order is not None}
        if cordoned != inventory.cordoned:
            changed[resource] = inventory.with_cordoned(cordoned)
    return changed


def _connected(host_state: HostState, resource: str, inventory: ResourceState) -> Links:
    """What a resource connects, as `DeviceIndex.connected` has them once the inventory is put."""
    return inventory.links if inventory.reported else host_state.devices.connected(resource)


def _is_of_host(cordon: Cordon) -> bool:
    return cordon.resource is UNSET and cordon.device is UNSET


def _names(
    cordon: Cordon, inventories: Mapping[str, ResourceState], recorded: Mapping[str, ResourceInventory]
) -> Iterable[str]:
    """The names of the devices that an order names. Of a resource that has not reported since the restart, the host's
    record has them."""
    if cordon.device is not UNSET:
        return [cordon.device]
    if cordon.resource is UNSET:
        return []
    inventory = inventories.get(cordon.resource, NOT_REPORTED)
    before = recorded.get(cordon.resource)
    if inventory.reported or before is None:
        return inventory.names_of_all
    known = before.known or () if before.known is not UNSET else ()
    return [
        *[device.id for device in before.devices],
        *known,
        *[name for group in before.names or () for name in group],
    ]

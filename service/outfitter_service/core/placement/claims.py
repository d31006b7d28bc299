"""What earlier waiters claim, so that it is left to them.

A waiter that takes any device claims its whole resource, by name. One with clauses claims only the devices that could
be its own. `WaiterIndex` knows who waits for what; this module says which devices that means now.
"""

from __future__ import annotations

from collections.abc import Mapping

from outfitter_proto.records import ResolvedRequest
from outfitter_service.core.model import ResourceSpec
from outfitter_service.core.state.device_index import DeviceIndex
from outfitter_service.core.state.wants import MOST_WANTS, Want, wants_of


class Claims:
    """The resources of earlier waiters, and the devices of those with clauses."""

    def __init__(self, devices: DeviceIndex, specs: Mapping[str, ResourceSpec]) -> None:
        self.resources: set[str] = set()
        """Those that somebody claims as a whole."""
        self.chosen: dict[str, set[int]] = {}
        """The positions in free lists that somebody with clauses claims, by resource."""
        self._devices = devices
        self._specs = specs
        self._wants: dict[str, set[Want]] = {}

    def touches(self, resource: str) -> bool:
        """Whether somebody claims any device as one of this resource."""
        return resource in self.resources or resource in self._wants

    def has(self, resource: str, want: Want | None) -> bool:
        """Whether an earlier waiter claims whatever this one wants of a resource. `want`: None for any device."""
        return resource in self.resources or (want is not None and want in self._wants.get(resource, ()))

    def add_all_of(self, request: ResolvedRequest) -> None:
        """A waiter with this request goes on waiting."""
        wants = wants_of(request)
        for resource in request.amounts:
            self.add(resource, wants.get(resource))

    def add(self, resource: str, want: Want | None) -> None:
        """A waiter claims a resource (`want`: None), or what it wants of it. Many different wants of one resource claim
        it as a whole."""
        wants = self._wants.setdefault(resource, set()) if want is not None else None
        if wants is None or want is None or len(wants) >= MOST_WANTS:
            self.resources.add(resource)
        elif want not in wants:
            wants.add(want)
            free_list, spec = self._devices.free_lists.get(resource), self._specs.get(resource)
            if free_list is not None and spec is not None:
                serving = free_list.selection(want.clauses).serving(spec.devices_for(want.amount))
                self.chosen.setdefault(resource, set()).update(serving)

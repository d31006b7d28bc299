"""Whether a worker that chooses gets what it has chosen: before it registers, and when it is granted devices.

A manager of version 0.2 ignores `where` and `same` and grants any device. A later one says in the host's record that it
obeys them, and in an allocation's record which clauses have counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from outfitter.errors import ChoiceIgnoredError
from outfitter_proto.clauses import Clauses, chosen, clauses_of, fault
from outfitter_proto.records import OBEYED, Allocation, Host, Register, ResourceRequest

if TYPE_CHECKING:
    from outfitter_proto.bus.port import Bus

LOOK_WITHIN = 5.0
"""Seconds for reading the host's record. Afterwards only the grant is checked."""


def asked_of(registration: Register) -> dict[str, Clauses]:
    """The clauses that a worker says itself, by resource."""
    requests = (registration.resources or {}).items()
    asked = {name: clauses_of(request.where, request.same) for name, request in requests}
    return {name: clauses for name, clauses in asked.items() if clauses}


async def check_manager(bus: Bus, cluster: str, registration: Register, partitions: int) -> None:
    """Return if the host's manager obeys what a registration says, or is not known.

    Raises:
        ChoiceIgnoredError: it would grant any device.
        BusError: see the bus port.
    """
    if not asked_of(registration):
        return
    import anyio  # only now is an event loop needed

    from outfitter.session.manager_lookup import ManagerLookup

    lookup = ManagerLookup(bus, cluster, registration.host)
    with anyio.move_on_after(LOOK_WITHIN):
        await lookup.run_own(partitions)
    host = lookup.hosts.get(registration.host)
    if host is not None and (problem := ignored_by(host)) is not None:
        raise ChoiceIgnoredError(problem, code="invalid-request")


def ignored_by(host: Host) -> str | None:
    """Why the manager of this record would grant any device, or None."""
    manager = host.manager
    if manager.stopped_at is not None or set(OBEYED) <= set(manager.obeys or ()):
        return None
    return (
        f"the manager of host {host.host!r} (version {manager.version}) ignores where and same, and would grant any "
        "device: upgrade it, or leave where and same out"
    )


def check_grant(registration: Register, record: Allocation) -> None:
    """Return if the granted devices are those that a registration asks for.

    Raises:
        ChoiceIgnoredError: they are not. The manager did not know the clauses, or has forgotten them.
    """
    counted = chosen(record.request)
    for name, clauses in asked_of(registration).items():
        request = (registration.resources or {})[name]
        if _has_counted(request, clauses, counted.get(name, Clauses())):
            continue
        if (problem := fault(clauses, record.resources.get(name, []))) is not None:
            raise ChoiceIgnoredError(
                f"{name} was granted without regard to where and same ({problem}): the manager of host "
                f"{record.host!r} ignores them; upgrade it",
                code="invalid-request",
                record=record,
            )


def _has_counted(request: ResourceRequest, asked: Clauses, counted: Clauses) -> bool:
    """Whether the manager has chosen by what a worker says."""
    return (request.where in (UNSET, None) or asked.where == counted.where) and (
        request.same in (UNSET, None) or asked.same == counted.same
    )

"""Looks for workers that still run and are not in a ledger that is about to be used.

A ledger that is adopted, or that has nothing of this host yet, may be old or new. A worker that got its devices from
another one still uses them, and they would be lent again. So no manager uses the ledger before these workers have
ended. It sees those of its own machine only, in two ways:

- by the variables that `outfitter run` sets, which all processes of the worker inherit;
- by the owner process that a registration names, as far as the registrations topic still has it. A worker may also wait
  for the first manager of its host. So this counts only in a ledger that is adopted.

A worker that names no owner, and has no variables, is not found. Nor is any in cluster scope.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import structlog

from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_registration
from outfitter_proto.keys import AllocationKey, allocation_key
from outfitter_proto.records import FINAL_STATES, HOLDING_STATES, Deregister, Owner, Register
from outfitter_proto.support.backoff import Backoff
from outfitter_proto.support.descriptors import SCARCE
from outfitter_proto.support.processes import process_owner
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.changelog.restore import Restored
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.survivors import processes

log = structlog.get_logger("outfitter.processor")

MOST_NAMED = 5
"""Most workers that the message names."""
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
"""The first and the longest time until a search that lacked memory or descriptors is tried again."""


SearchOfHost = Callable[[str], Awaitable[processes.Search]]
"""Finds the processes of all workers of a host."""


async def search_host(host: str) -> processes.Search:
    """The processes of all workers of a host, as far as this process may see them. Without memory or descriptors it
    waits until there are some: a ledger that is adopted unseen would lend devices again.

    Raises:
        OSError: /proc cannot be listed.
    """
    backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
    while True:
        try:
            return await anyio.to_thread.run_sync(processes.search, processes.MarksOfHost(host))
        except OSError as error:
            if error.errno not in SCARCE:
                raise
            log.warning("the processes of this machine cannot be searched for workers, trying again", error=str(error))
        await anyio.sleep(backoff.next_delay())


class UnrecordedWorkersError(RuntimeError):
    """Workers run that the ledger does not have. The message names them."""


async def refuse_unrecorded(
    assignment: Assignment, restored: Restored, reason: str | None, search: SearchOfHost
) -> None:
    """Refuse a ledger that lacks workers which still run on this machine. `reason`: why it must be adopted; None: it
    need not be, because it has nothing of this host yet.

    Raises:
        UnrecordedWorkersError: there are such workers.
        BusError: the registrations cannot be read.
    """
    host = assignment.identity.host
    if host is None or assignment.identity.pid_ns is None:
        return
    ledger = restored.ledger
    living = {} if reason is None else await _owners(assignment, host)
    found = await search(host)
    living |= _processes(found)
    if reason is not None:
        _warn_of_gaps(found)
    unrecorded = {key: process for key, process in sorted(living.items()) if not _is_recorded(ledger, key)}
    if not unrecorded:
        return
    shown = ", ".join(f"{key} (process {process})" for key, process in list(unrecorded.items())[:MOST_NAMED])
    more = f" and {len(unrecorded) - MOST_NAMED} more" if len(unrecorded) > MOST_NAMED else ""
    missing = (
        f"Workers run on this machine that it does not have, or has as waiting: {shown}{more}. If they have got "
        "devices since, these would be lent again"
    )
    if reason is None:
        raise UnrecordedWorkersError(
            f"the ledger has nothing of host {host!r}, because it is new, or lost. {missing}: end these processes. If "
            "they are of another cluster, give this manager another --host"
        )
    raise UnrecordedWorkersError(f"{reason}. {missing}: end these processes, and start again with --adopt-ledger")


def _is_recorded(ledger: Ledger, key: AllocationKey) -> bool:
    """Whether the ledger knows what an allocation has. One that waited may have got devices since."""
    record = ledger.allocations.get(key)
    return record is not None and record.state in HOLDING_STATES | FINAL_STATES


def _processes(found: processes.Search) -> dict[AllocationKey, str]:
    """The workers whose processes have their names in the environment, and one such process of each."""
    return {
        allocation_key(mark.host, mark.worker, mark.incarnation): f"{survivors[0].pid}, {survivors[0].command}"
        for mark, survivors in found.survivors.items()
    }


def _warn_of_gaps(found: processes.Search) -> None:
    if found.refused:
        log.warning(
            "the processes of other users cannot be searched for workers that the ledger does not have: make sure that "
            "none runs, or start the manager as root once",
            users=sorted(found.refused),
        )
    if found.missed:
        log.warning("processes change too fast for a complete search for workers", reason=found.missed)


async def _owners(assignment: Assignment, host: str) -> dict[AllocationKey, str]:
    """The workers of a host whose owner process lives, by the registrations that are still there."""
    key = host.encode()
    owners: dict[AllocationKey, Owner] = {}
    start, end = await assignment.input_bounds()
    async with await assignment.open_input(start) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                if message.key != key:
                    continue
                try:
                    registration = decode_registration(message.value, key=message.key, exact=False, named=False)
                except WireError:
                    continue
                match registration:
                    case Register(owner=Owner() as owner):
                        owners[allocation_key(host, registration.worker, registration.incarnation)] = owner
                    case Deregister(incarnation=str(incarnation)):
                        owners.pop(allocation_key(host, registration.worker, incarnation), None)
    return {key: str(owner.pid) for key, owner in owners.items() if _lives(owner)}


def _lives(owner: Owner) -> bool:
    """Whether this process still runs, and this manager sees it."""
    process = process_owner(owner.pid)
    return process is not None and (process.boot_id, process.pid_ns, process.start_ticks) == (
        owner.boot_id,
        owner.pid_ns,
        owner.start_ticks,
    )

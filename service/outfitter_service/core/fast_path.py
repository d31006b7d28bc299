"""The plain grant: a new worker that wants one exclusive resource, of which enough is free and for which nobody waits.

Nearly every registration is one. What `decide` works out for it step by step is said here in one go, and so is what it
does to the ledger (`Ledger.grant`): that takes half of the time. Whatever is not as plain is left to the steps. It
is no rule of its own: property tests hold the two against each other.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import final

from msgspec import Raw, Struct, structs

from outfitter_proto.keys import allocation_key
from outfitter_proto.records import Allocation, Register, ResolvedRequest, Source, Transition
from outfitter_service.core import model as m
from outfitter_service.core.decision import Rules
from outfitter_service.core.request_check import resolve
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.core.state.sizes import REQUEST_BYTES
from outfitter_service.core.states import Step, advance

_GRANTED = advance(None, Step.GRANT)
_EPOCH = datetime.fromtimestamp(0, UTC)

# to fill in what differs takes a quarter of the time of making a record with all its fields
_BLANK = Allocation(
    host="",
    worker="",
    incarnation="",
    state=_GRANTED,
    request=ResolvedRequest(amounts={}),
    since=_EPOCH,
    writer="",
    commit=0,
    source=Source(partition=0, offset=0),
    resources=m.NO_ITEMS,
    operators=m.NO_ITEMS,
    env=m.NO_ITEMS,
    cdi=m.NO_NAMES,
    shared=m.NO_NAMES,
    unavailable=m.NO_ITEMS,
)


@final
class FastGrant(Struct, frozen=True, gc=False):
    """A decision that comes to a plain grant and nothing else: its record, that one's key, and the canonical names of
    the devices in it. Its lease begins with it."""

    key: str
    record: Allocation
    names: list[str]

    def step(self, told: Raw | None = None) -> Transition:
        """What history says of it; `told` is the record as it is encoded, where it is already."""
        record = self.record
        return Transition(
            at=record.since,
            host=record.host,
            worker=record.worker,
            incarnation=record.incarnation,
            event="register",
            to=_GRANTED,
            explanation="granted",
            record=record if told is None else told,
            source=record.source,
        )


def grant(ledger: Ledger, rules: Rules, event: m.Incoming, now: datetime) -> FastGrant | None:
    """What a message comes to, or None: it has to be worked out."""
    message = event.message
    if type(message) is not Register or event.warnings:
        return None
    host_state = ledger.hosts.get(message.host)
    if host_state is None or host_state.queue or message.operators or message.worker in host_state.incarnations:
        return None
    resolved = resolve(rules, message)
    request = resolved.request
    if resolved.problem is not None or resolved.unavailable or len(request.amounts) != 1:
        return None
    [(resource, amount)] = request.amounts.items()
    spec = rules.specs[resource]
    free_list = host_state.shelves.get(resource)
    if (
        free_list is None
        or host_state.inventories[resource].failure is not None
        or spec.shared
        or spec.on_demand
        or spec.prepares
        or spec.confirms
    ):
        return None
    if amount > 1 and free_list.repeats:
        return None
    if amount * free_list.largest + REQUEST_BYTES > rules.max_bytes:
        return None  # whether it fits is measured
    offered = free_list.offer(amount)
    if offered is None:
        return None
    told, names = offered
    host, worker, incarnation = host_state.host, message.worker, message.incarnation
    record = structs.replace(
        _BLANK,
        host=host,
        worker=worker,
        incarnation=incarnation,
        request=request,
        since=now,
        writer=rules.writer,
        commit=ledger.commits + 1,
        source=event.source,
        token=ledger.token + 1,
        resources=told.infos,
        env=told.env,
        cdi=told.cdi,
        aliases=told.aliases,
    )
    return FastGrant(allocation_key(host, worker, incarnation), record, names)

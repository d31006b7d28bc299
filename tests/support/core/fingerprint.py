"""Everything that a ledger in memory has, in a form that can be compared."""

from __future__ import annotations

from typing import Any

from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.ledger import Ledger
from support.core.core_driver import HOST


def fingerprint(host_state: HostState) -> dict[str, Any]:
    """Everything in the state of a host, in a form that can be compared."""
    return {
        "record": host_state.record,
        "cordons": dict(host_state.cordons),
        "inventories": dict(host_state.devices.inventories),
        "suspects": host_state.devices.suspects,
        "free": {
            name: list(free_list.free) for name, free_list in host_state.devices.free_lists.items() if free_list.devices
        },
        "places": {
            name: dict(free_list.positions)
            for name, free_list in host_state.devices.free_lists.items()
            if free_list.devices
        },
        "alone": {
            name: (list(free_list.alone), free_list.largest, free_list.least_bytes(len(free_list.devices)))
            for name, free_list in host_state.devices.free_lists.items()
            if free_list.devices
        },
        "distinct": host_state.devices.distinct,
        "live": dict(host_state.holders.live),
        "without": host_state.holders.without_exclusive,
        "items": host_state.items,
        "used": dict(host_state.devices.pools.used),
        "words": {name: dict(words) for name, words in host_state.devices.pools.words.items()},
        "queue": list(host_state.waiters.queue),
        "overlapping": host_state.devices.overlapping,
        "waiting": {name: list(entries) for name, entries in host_state.waiters.waiting.items()},
        "claims": {name: list(entries) for name, entries in host_state.waiters.claims.items()},
        "choosers": {name: list(entries) for name, entries in host_state.waiters.choosers.items()},
        "unplaced": list(host_state.waiters.unplaced),
        "wants": {
            name: {want: list(entries) for want, entries in wants.items()}
            for name, wants in host_state.waiters.wants.items()
        },
        "choosing": host_state.waiters.choosing,
        "unanswered": {name: list(entries) for name, entries in host_state.waiters.unanswered.items()},
        "scan_from": host_state.waiters.scan_from,
        "deadlines": list(host_state.waiters.deadlines),
        "waiting_since": list(host_state.waiters.waiting_since),
        "incarnations": {worker: list(runs) for worker, runs in host_state.runs.incarnations.items()},
        "past": {worker: list(endings) for worker, endings in host_state.runs.past.items()},
        "endings": list(host_state.runs.endings),
    }


def whole(ledger: Ledger) -> dict[str, Any]:
    return {"allocations": dict(ledger.allocations), "token": ledger.token, **fingerprint(ledger.host_state(HOST))}

"""Sentences for people who ask for what is not there: they name what there is."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple, Protocol

from outfitter_proto.bus import Bus
from outfitter_proto.signs_of_life import Verdict
from outfitter_service.config import BusConnection
from outfitter_service.query import ledger_view, managers
from outfitter_service.query.device_lines import entries_of
from outfitter_service.query.labels import Wanted, in_words
from outfitter_service.query.ledger_view import LedgerView

_SHOWN = 10


class WorkerName(Protocol):
    """What people write for a worker."""

    @property
    def worker(self) -> str: ...


class Look(NamedTuple):
    """The ledger of one host or of all, and whether their managers live. `unknown_host`: that there is no such host."""

    ledger: LedgerView
    lives: dict[str, Verdict]
    unknown_host: str | None


async def look(connection: BusConnection, host: str | None) -> Look:
    """Connect, and read the ledger of `host` or of all hosts; see `ledger_view.read`."""
    async with ledger_view.opened(connection) as bus:
        ledger = await ledger_view.read(bus, connection.cluster, host)
        lives = await managers.lives(bus, connection.cluster, ledger, host)
        return Look(ledger, lives, await unknown_host(bus, connection.cluster, ledger, host))


async def unknown_host(bus: Bus, cluster: str, ledger: LedgerView, host: str | None) -> str | None:
    """That there is no such host; None if there is, or if `host` is None. `ledger`: perhaps of this host only.

    Raises:
        BusError: see `ledger_view.read`.
    """
    if host is None or host in ledger.hosts:
        return None
    there = (await ledger_view.read(bus, cluster)).hosts
    return f"host {host!r} is unknown: it has no manager, and never had one; {_there('host', 'hosts', there)}"


def unknown_resource(ledger: LedgerView, resource: str) -> str | None:
    """That no host of this ledger has such a resource; None if one has it."""
    hosts = ledger.hosts
    there = {name for record in hosts.values() for name in record.resources}
    if resource in there:
        return None
    where = f"host {next(iter(hosts))!r}" if len(hosts) == 1 else "no host"
    has = "has no resource" if len(hosts) == 1 else "has a resource"
    return f"{where} {has} {resource!r}; {_there('resource', 'resources', there)}"


def unknown_device(ledger: LedgerView, host: str, device: str, resource: str | None) -> str:
    """That a host of this ledger has no device with this name, in a resource or in any; with a near name."""
    record = ledger.hosts_record(host)
    found = entries_of(ledger, record) if record is not None else []
    there = [entry for entry in found if resource in {None, entry.resource}]
    by_index = [entry.id for entry in there if device and device == entry.properties.get("index")]
    near = by_index or get_close_matches(device, {name for entry in there for name in entry.names}, n=1)
    hint = f"did you mean {near[0]}?" if near else _there("device", "devices", {entry.id for entry in there})
    of = "" if resource is None else f" in resource {resource!r}"
    return f"host {host!r} has no device {device!r}{of}; {hint}"


def unknown_model(ledger: LedgerView, text: str) -> str:
    """That no device of this ledger has a model with this text in its name."""
    models = {device.model for host in ledger.hosts.values() for device in entries_of(ledger, host)}
    return f"no device is of a model {text!r}; {_there('model', 'models', filter(None, models))}"


def no_worker(ledger: LedgerView, worker: WorkerName) -> str:
    """That there is no such worker, with a near name."""
    near = get_close_matches(worker.worker, _workers(ledger), n=1)
    hint = f"did you mean {near[0]}?" if near else "`outfitter status` lists all workers"
    return f"there is no worker {str(worker)!r}: it never registered, or ended long ago; {hint}"


def unknown_worker(ledger: LedgerView, worker: WorkerName) -> str | None:
    """That no worker of this ledger has this name; None if one has it."""
    return None if worker.worker in _workers(ledger) else no_worker(ledger, worker)


def _workers(ledger: LedgerView) -> list[str]:
    return list(dict.fromkeys(stored.record.worker for stored in ledger.allocations))


def unknown_labels(ledger: LedgerView, wanted: Wanted) -> str | None:
    """That no worker of this ledger has such a label; None if for each label one has it."""
    there = {item for stored in ledger.allocations for item in stored.record.request.labels.items()}
    missing = [item for item in wanted if item not in there]
    if not missing:
        return None
    known = _there("label", "labels", {in_words({name: value}) for name, value in there})
    return f"no worker has the label {in_words(dict(missing[:1]))}; {known}"


def _there(one: str, many: str, names: Iterable[str]) -> str:
    found = sorted(names)
    if not found:
        return f"there are no {many}"
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"the {one if len(found) == 1 else many} there: {', '.join(found[:_SHOWN])}{more}"

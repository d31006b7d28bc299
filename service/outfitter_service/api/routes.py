"""The routes: what each list has, in which order, and how it is filtered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from msgspec import UNSET, Raw, UnsetType

from outfitter_proto import __version__
from outfitter_proto.records import Allocation, Host, ResourceInventory
from outfitter_proto.signs_of_life import Life, Verdict
from outfitter_service.api import items
from outfitter_service.api.follower import Follower
from outfitter_service.api.model.fleet import (
    Fleet,
    HistoryStep,
    allocation_place,
    as_json,
    as_value,
    device_place,
    host_place,
    queue_place,
    worker_place,
)
from outfitter_service.api.model.tail import Tail, TailItem
from outfitter_service.api.paging import Page, Paged, page
from outfitter_service.api.troubles import troubles_of
from outfitter_service.api.typed import RefusedError, Route
from outfitter_service.query import labels
from outfitter_service.query.device_lines import DeviceEntry, DeviceLine, counted_only
from outfitter_service.query.device_totals import ResourceTotals, left_outs, totals_of
from outfitter_service.query.explanation import Explanation, explain
from outfitter_service.query.ledger_view import StoredAllocation, held_by_resource, warnings_of
from outfitter_service.query.letters import ShownLetter
from outfitter_service.query.steps import labels_of

T = TypeVar("T")
S = TypeVar("S")

BASE = "/api/v1"
_AFTER_ALL = "\U0010ffff"

Path = Mapping[str, str]


def status(follower: Follower, _fleet: None, _query: Any, _path: Path) -> items.Status:
    fleet = follower.fleet
    workers: Counter[str] = Counter()
    if fleet is not None:
        for host in fleet.hosts:
            workers.update(_host(fleet, host).workers)
    return items.Status(
        cluster=follower.cluster,
        host=fleet.host if fleet is not None else None,
        version=__version__,
        ready=fleet is not None,
        condition=follower.condition,
        as_of=follower.as_of,
        behind=follower.behind,
        outage=follower.outage,
        history=fleet.steps.unavailable if fleet is not None else None,
        dead_letters=fleet.letters.unavailable if fleet is not None else None,
        event_id=fleet.events.last_id if fleet is not None else None,
        hosts=len(fleet.hosts) if fleet is not None else 0,
        workers=dict(sorted(workers.items())),
    )


def hosts(_: Follower, fleet: Fleet, query: items.HostQuery, _path: Path) -> Page[items.HostItem]:
    def places() -> Iterator[tuple[str, items.HostItem]]:
        for host in _hosts(fleet, query):
            place, item = host_place(host), _host(fleet, host)
            if (
                _is_behind(place, query)
                and query.managed in {UNSET, item.managed}
                and query.planned in {UNSET, item.planned}
            ):
                yield place, item

    return page(places(), query, lambda item: item)


def host(_: Follower, fleet: Fleet, _query: Any, path: Path) -> items.HostDetail:
    name = path["host"]
    if name not in fleet.hosts:
        raise RefusedError(404, f"there is no record of host {name!r}")
    item, record = _host(fleet, name), fleet.ledger.hosts_record(name)
    return items.HostDetail(
        **{field: getattr(item, field) for field in item.__struct_fields__},
        inventories=record.resources if record is not None else None,
    )


def resources(_: Follower, fleet: Fleet, query: items.ResourceQuery, _path: Path) -> Page[ResourceTotals]:
    wanted = labels.wanted(query.label or ())
    hosts = list(_hosts(fleet, Paged(), query.host))
    devices = [device for host in hosts for device in fleet.devices(host) if _is_device_chosen(device, query, wanted)]
    there = {device.resource for device in devices}
    is_any = query.resource is query.model is query.health is UNSET
    waiting = (
        {resource for resource in stored.record.request.amounts if is_any or resource in there}
        for host in hosts
        for stored in fleet.queue(host)
        if labels.has_all(stored.record.request.labels, wanted)
    )
    left_out = None
    if query.model is query.health is query.label is UNSET:
        records = filter(None, map(fleet.ledger.hosts_record, hosts))
        left_out = left_outs(records, query.resource or None)
    unserved = {host for host in hosts if not fleet.is_managed(host)}
    found = totals_of(devices, waiting, unserved=unserved, left_out=left_out)
    places = ((totals.resource, totals) for totals in found if _is_behind(totals.resource, query))
    return page(places, query, lambda totals: totals)


def devices(_: Follower, fleet: Fleet, query: items.DeviceQuery, _path: Path) -> Page[DeviceLine]:
    wanted = labels.wanted(query.label or ())

    def places() -> Iterator[tuple[str, DeviceEntry]]:
        for host in _hosts(fleet, query, query.host):
            is_managed = fleet.is_managed(host)
            for device in fleet.devices(host):
                place = device_place(device)
                if (
                    _is_behind(place, query)
                    and _is_device_chosen(device, query, wanted)
                    and query.held in {UNSET, bool(device.held_as)}
                    and query.free in {UNSET, is_managed and device.is_free}
                    and query.cordoned in {UNSET, device.cordon is not None}
                ):
                    yield place, device

    return page(places(), query, DeviceEntry.line)


def workers(_: Follower, fleet: Fleet, query: items.WorkerQuery, _path: Path) -> Page[items.WorkerItem]:
    wanted = labels.wanted(query.label or ())

    def places() -> Iterator[tuple[str, StoredAllocation]]:
        for host in _hosts(fleet, query, query.host):
            for stored in fleet.workers(host):
                place = worker_place(stored)
                if _is_behind(place, query) and _is_chosen(stored, query, wanted):
                    yield place, stored

    return page(places(), query, _worker)


def allocations(_: Follower, fleet: Fleet, query: items.AllocationQuery, _path: Path) -> Page[Raw]:
    wanted = labels.wanted(query.label or ())

    def places() -> Iterator[tuple[str, StoredAllocation]]:
        for host in _hosts(fleet, query, query.host):
            for stored in fleet.allocations(host):
                place = allocation_place(stored)
                if (
                    _is_behind(place, query)
                    and _is_chosen(stored, query, wanted)
                    and query.incarnation in {UNSET, stored.record.incarnation}
                ):
                    yield place, stored

    return page(places(), query, lambda stored: as_json(stored.wire))


def allocation(_: Follower, fleet: Fleet, _query: Any, path: Path) -> Raw:
    key = f"{path['host']}/{path['worker']}/{path['incarnation']}"
    for stored in fleet.allocations(path["host"]):
        if stored.record.key == key:
            return as_json(stored.wire)
    raise RefusedError(404, f"there is no allocation {key!r}")


def queue(_: Follower, fleet: Fleet, query: items.QueueQuery, _path: Path) -> Page[items.QueueItem]:
    wanted = labels.wanted(query.label or ())

    def places() -> Iterator[tuple[str, StoredAllocation]]:
        for host in _hosts(fleet, query, query.host):
            for stored in fleet.queue(host):
                record = stored.record
                place = queue_place(stored)
                if (
                    _is_behind(place, query)
                    and (query.resource is UNSET or query.resource in record.request.amounts)
                    and query.reason_code in {UNSET, record.reason_code}
                    and labels.has_all(record.request.labels, wanted)
                ):
                    yield place, stored

    return page(places(), query, _waiting)


def troubles(follower: Follower, fleet: Fleet, query: items.TroubleQuery, _path: Path) -> Page[items.Trouble]:
    now, only = datetime.now(UTC).replace(microsecond=0), None if query.host is UNSET else query.host

    def compute() -> list[tuple[str, items.Trouble]]:
        counted = [_host(fleet, name) for name in fleet.hosts if only in {None, name}]
        return troubles_of(fleet, counted, host=only, outage=follower.outage, now=now)

    found = fleet.once_at((now, only, follower.outage), compute)
    return page(((place, trouble) for place, trouble in found if _is_behind(place, query)), query, lambda each: each)


def explanations(_: Follower, fleet: Fleet, query: items.ExplanationQuery, path: Path) -> Page[Explanation]:
    worker, found = path["worker"], False

    def places() -> Iterator[tuple[str, StoredAllocation]]:
        nonlocal found
        for host in _hosts(fleet, Paged(), query.host):
            runs = fleet.workers(host) if query.incarnation is UNSET else fleet.allocations(host)
            for stored in runs:
                if stored.record.worker == worker and query.incarnation in {UNSET, stored.record.incarnation}:
                    found = True
                    if _is_behind(worker_place(stored), query):
                        yield worker_place(stored), stored

    explained = page(
        places(),
        query,
        lambda stored: explain(
            fleet.ledger, stored.record, fleet.devices(stored.record.host), verdict=fleet.life(stored.record.host)
        ),
    )
    if not found:
        raise RefusedError(404, f"there is no such worker {worker!r}: it never registered, or ended long ago")
    return explained


def history(_: Follower, fleet: Fleet, query: items.HistoryQuery, _path: Path) -> items.TailPage[Any]:
    wanted = labels.wanted(query.label or ())
    return _tail_page(
        fleet.steps, query, lambda step: _is_step_chosen(step, query, wanted), lambda step: as_value(step.message)
    )


def dead_letters(_: Follower, fleet: Fleet, query: items.LetterQuery, _path: Path) -> items.TailPage[ShownLetter]:
    def is_chosen(letter: ShownLetter) -> bool:
        return query.host in {UNSET, letter.key} and query.code in {UNSET, letter.code}

    return _tail_page(fleet.letters, query, is_chosen, lambda letter: letter)


def writers(_: Follower, fleet: Fleet, query: Paged, _path: Path) -> Page[items.Writer]:
    positions = (
        (position.checkpoint.writer, position)
        for position in fleet.writers
        if _is_behind(position.checkpoint.writer, query)
    )
    return page(
        positions,
        query,
        lambda position: items.Writer(
            writer=position.checkpoint.writer,
            checkpoint=position.checkpoint,
            end=position.end,
            lag=None if position.end is None else max(0, position.end - position.checkpoint.input.to),
        ),
    )


def _hosts(fleet: Fleet, query: Paged, only: str | UnsetType = UNSET) -> Iterator[str]:
    """The hosts of a list, without those whose items are all before the cursor."""
    start = query.start
    for host in fleet.hosts:
        if only in {UNSET, host} and (start is None or host_place(host) + _AFTER_ALL > start):
            yield host


def _is_behind(place: str, query: Paged) -> bool:
    return query.start is None or place > query.start


def _is_device_chosen(device: DeviceEntry, query: items.ResourceQuery, wanted: labels.Wanted) -> bool:
    return device.fits(query.resource or None, query.model or None, query.health or None) and (
        not wanted or any(labels.has_all(each.request.labels, wanted) for each in device.holders)
    )


def _is_chosen(stored: StoredAllocation, query: items.WorkerQuery, wanted: labels.Wanted) -> bool:
    record = stored.record
    return (
        query.worker in {UNSET, record.worker}
        and query.state in {UNSET, record.state}
        and (query.resource is UNSET or query.resource in record.request.amounts)
        and labels.has_all(record.request.labels, wanted)
    )


def _tail_page(
    tail: Tail[T], query: items.HistoryQuery | items.LetterQuery, is_chosen: Callable[[T], bool], show: Callable[[T], S]
) -> items.TailPage[S]:
    """A page of the chosen items of a tail, the newest first."""
    chosen = ((item.position, item.value) for item in _behind(tail, query) if is_chosen(item.value))
    shown = page(chosen, query, show)
    return items.TailPage(items=shown.items, next=shown.next, oldest=tail.oldest)


def _behind(tail: Tail[T], query: items.HistoryQuery | items.LetterQuery) -> Iterator[TailItem[T]]:
    """The items of a tail behind the cursor and within the times, the newest first.

    Raises:
        RefusedError: the topic cannot be read.
    """
    if tail.unavailable is not None:
        raise RefusedError(503, tail.unavailable)
    for item in tail.newest_first(query.start):
        if query.until is not UNSET and item.at > query.until:
            continue
        if query.since is not UNSET and item.at < query.since:
            break
        yield item


def _is_step_chosen(step: HistoryStep, query: items.HistoryQuery, wanted: labels.Wanted) -> bool:
    host, worker, incarnation = step.names
    return (
        query.host in {UNSET, host}
        and query.worker in {UNSET, worker}
        and query.incarnation in {UNSET, incarnation}
        and (query.device is UNSET or query.device in step.devices)
        and (not wanted or labels.has_all(labels_of(step.record), wanted))
    )


def _host(fleet: Fleet, host: str) -> items.HostItem:
    """What pages show of a host. Checkpoints and time change some of it, and no record of the host."""
    item = fleet.once(host, "item", lambda: _host_of(fleet, host))
    verdict = fleet.life(host)
    shown = Verdict(Life(item.life), item.life_at, item.process), item.planned, item.orders_unread
    now = verdict, fleet.is_planned(host), fleet.orders_unread(host)
    return item if shown == now else _host_of(fleet, host)


def _host_of(fleet: Fleet, host: str) -> items.HostItem:
    record, verdict = fleet.ledger.hosts_record(host), fleet.life(host)
    return items.HostItem(
        host=host,
        managed=fleet.is_managed(host),
        life=verdict.life.value,
        life_at=verdict.at,
        process=verdict.process,
        unanswered=fleet.unanswered.get(host),
        missed=fleet.is_missed(host),
        planned=fleet.is_planned(host),
        orders=fleet.orders(host),
        orders_unread=fleet.orders_unread(host),
        since=record.since if record is not None else None,
        manager=record.manager if record is not None else None,
        resources=_resources(record),
        workers=dict(sorted(Counter(stored.record.state for stored in fleet.workers(host)).items())),
    )


def _resources(record: Host | None) -> dict[str, items.ResourceSummary] | None:
    return None if record is None else {name: _resource(found) for name, found in record.resources.items()}


def _resource(inventory: ResourceInventory) -> items.ResourceSummary:
    healthy = sum(device.health == "healthy" for device in inventory.devices)
    return items.ResourceSummary(
        state=inventory.state,
        reason=inventory.reason,
        amount=inventory.amount,
        sharing=inventory.sharing,
        total=len(inventory.devices) if inventory.total is UNSET else inventory.total,
        healthy=healthy if inventory.healthy is UNSET else inventory.healthy,
        cordoned=inventory.cordoned or 0,
        left_out=counted_only(inventory),
    )


def _worker(stored: StoredAllocation) -> items.WorkerItem:
    record = stored.record
    return items.WorkerItem(
        host=record.host,
        worker=record.worker,
        incarnation=record.incarnation,
        state=record.state,
        since=record.since,
        amounts=record.request.amounts,
        devices=held_by_resource(record),
        queue_position=record.queue_position,
        priority=record.request.priority,
        labels=record.request.labels,
        reason=record.reason,
        reason_code=record.reason_code,
        wait_until=record.wait_until,
        warnings=warnings_of(record),
    )


def _waiting(stored: StoredAllocation) -> items.QueueItem:
    record = stored.record
    return items.QueueItem(
        host=record.host,
        worker=record.worker,
        incarnation=record.incarnation,
        queue_position=record.queue_position,
        since=record.since,
        priority=record.request.priority,
        amounts=record.request.amounts,
        reason=record.reason,
        reason_code=record.reason_code,
        wait_until=record.wait_until,
        labels=record.request.labels,
    )


ROUTES: tuple[Route, ...] = (
    Route(
        path=f"{BASE}/status", name="status", handler=status, answer=items.Status, early=True,
        summary="What the API is doing, and how far it is behind",
    ),
    Route(
        path=f"{BASE}/troubles", name="troubles", handler=troubles, answer=Page[items.Trouble],
        query=items.TroubleQuery, summary="What needs a person, the worst first",
    ),
    Route(
        path=f"{BASE}/hosts", name="hosts", handler=hosts, answer=Page[items.HostItem], query=items.HostQuery,
        summary="The hosts",
    ),
    Route(
        path=f"{BASE}/hosts/{{host}}", name="host", handler=host, answer=items.HostDetail, refusals=(404,),
        summary="One host, with its inventories",
    ),
    Route(
        path=f"{BASE}/resources", name="resources", handler=resources, answer=Page[ResourceTotals],
        query=items.ResourceQuery, summary="How many devices of each resource and model there are, and who waits",
    ),
    Route(
        path=f"{BASE}/devices", name="devices", handler=devices, answer=Page[DeviceLine], query=items.DeviceQuery,
        summary="The devices, their health and their holders",
    ),
    Route(
        path=f"{BASE}/workers", name="workers", handler=workers, answer=Page[items.WorkerItem],
        query=items.WorkerQuery, summary="The newest run of each worker",
    ),
    Route(
        path=f"{BASE}/workers/{{worker}}/explanations", name="explanations", handler=explanations,
        answer=Page[Explanation], query=items.ExplanationQuery, refusals=(404,),
        summary="What a worker holds, or why it waits, on each host that knows it",
    ),
    Route(
        path=f"{BASE}/allocations", name="allocations", handler=allocations, answer=Page[Allocation],
        query=items.AllocationQuery, summary="The allocation records, as on the bus",
    ),
    Route(
        path=f"{BASE}/allocations/{{host}}/{{worker}}/{{incarnation}}", name="allocation", handler=allocation,
        answer=Allocation, refusals=(404,), summary="One allocation record, as on the bus",
    ),
    Route(
        path=f"{BASE}/queue", name="queue", handler=queue, answer=Page[items.QueueItem], query=items.QueueQuery,
        summary="The waiting workers of each host in the order of its queue, with the reasons",
    ),
    Route(
        path=f"{BASE}/history", name="history", handler=history, answer=items.TailPage[items.StepItem],
        query=items.HistoryQuery, summary="The newest steps of history, the last one first",
    ),
    Route(
        path=f"{BASE}/dead-letters", name="dead_letters", handler=dead_letters,
        answer=items.TailPage[ShownLetter], query=items.LetterQuery,
        summary="The newest dead letters, the last one first",
    ),
    Route(
        path=f"{BASE}/writers", name="writers", handler=writers, answer=Page[items.Writer], query=Paged,
        summary="The writers of the ledger, and how far each is behind its input",
    ),
)  # fmt: skip

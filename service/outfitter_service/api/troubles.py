"""What needs a person, the worst first: one entry for all that have one cause.

Only this module judges what a trouble is. The console and `outfitter top` show its list. A test compares the alerts in
deploy/prometheus with `KINDS`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from outfitter_proto.records import Allocation
from outfitter_service.api.items import HostItem, Trouble
from outfitter_service.api.model.fleet import Fleet
from outfitter_service.query.device_lines import DeviceHolder, DeviceLine
from outfitter_service.query.letters import ShownLetter
from outfitter_service.query.reasons import waits_for_healing

RECENT = timedelta(hours=1)
"""How long a failed worker and a refused message are shown."""
_NAMED = 3
"""The most hosts that a text names."""


class TroubleKind(Struct, frozen=True, kw_only=True):
    """A kind of trouble."""

    code: str
    urgent: bool = False
    """Somebody must act now, and the alert is critical."""
    after: timedelta = timedelta()
    """How long it lasts before it is shown, as before the alert; 0: it is shown at once."""
    alert: str | None = None
    """The alert for the same, if there is one."""


LENT_TWICE = TroubleKind(code="lent-twice", urgent=True, alert="OutfitterExclusivityViolation")
BUS_AWAY = TroubleKind(code="bus-away", urgent=True, alert="OutfitterNotReady")
KILLED = TroubleKind(code="killed", urgent=True, alert="OutfitterDown")
NOT_HEARD = TroubleKind(code="not-heard", urgent=True)
NO_MANAGER = TroubleKind(code="no-manager", urgent=True, alert="OutfitterDown")
DRIVER_FAILED = TroubleKind(code="driver-failed", alert="OutfitterDriverFails")
MISCONFIGURED = TroubleKind(code="misconfigured")
NO_DRIVER = TroubleKind(code="no-driver")
UNHEALTHY = TroubleKind(code="unhealthy", alert="OutfitterDevicesUnhealthy")
WAITS_FOR_HEALING = TroubleKind(code="waits-for-healing", alert="OutfitterWorkersWaitInVain")
INFEASIBLE = TroubleKind(code="infeasible", alert="OutfitterWorkersWaitInVain")
NOT_REPORTED = TroubleKind(code="not-reported", after=timedelta(minutes=10), alert="OutfitterWorkersWaitInVain")
BESIDE_FREE = TroubleKind(code="beside-free", after=timedelta(minutes=15), alert="OutfitterWorkersWaitAlthoughFree")
STILL_USED = TroubleKind(code="still-used")
STRANGER = TroubleKind(code="used-by-stranger", alert="OutfitterDevicesUsedByStrangers")
HELD_BACK = TroubleKind(code="held-back", alert="OutfitterDevicesHeldBack")
UNKNOWN = TroubleKind(code="unknown", alert="OutfitterDevicesUnhealthy")
ORDERS_UNREAD = TroubleKind(code="orders-unread", alert="OutfitterOrdersUnread")
FAILED = TroubleKind(code="failed")
REFUSED = TroubleKind(code="refused", alert="OutfitterDeadLetters")

KINDS = (
    LENT_TWICE, BUS_AWAY, KILLED, NOT_HEARD, NO_MANAGER, DRIVER_FAILED, MISCONFIGURED, NO_DRIVER, UNHEALTHY,
    WAITS_FOR_HEALING, INFEASIBLE, NOT_REPORTED, BESIDE_FREE, STILL_USED, STRANGER, HELD_BACK, UNKNOWN, ORDERS_UNREAD,
    FAILED, REFUSED,
)  # fmt: skip
"""All kinds, in the order of the list: the urgent ones first."""
_RANKS = {kind.code: rank for rank, kind in enumerate(KINDS)}


class _Records(NamedTuple):
    """What the records of one host say, as far as it may be a trouble."""

    lent_twice: list[DeviceLine]
    ill: dict[TroubleKind, list[DeviceLine]]
    still_used: list[DeviceLine]
    free: set[str]
    """The resources of which a device is free."""
    mended: set[str]
    """The resources of which devices are ill, all of them cordoned: somebody looks after them."""
    holding: int
    """How many workers hold devices."""
    waiting: list[Allocation]
    failed: list[Allocation]


class _Host(NamedTuple):
    item: HostItem
    records: _Records

    @property
    def name(self) -> str:
        return self.item.host


class _Picture(NamedTuple):
    """`managed`: the hosts with a manager. `letters`: those of the last hour, the newest first."""

    hosts: Sequence[_Host]
    managed: Sequence[_Host]
    letters: Sequence[ShownLetter]
    outage: str | None
    now: datetime


_OF_BLOCKS: Mapping[str, TroubleKind] = {kind.code: kind for kind in (UNHEALTHY, HELD_BACK, UNKNOWN, STRANGER)}
"""The trouble that a device is in, by why nobody gets it (`DeviceLine.block`). What operators take out is none."""


def troubles_of(
    fleet: Fleet, hosts: Iterable[HostItem], *, host: str | None, outage: str | None, now: datetime
) -> list[tuple[str, Trouble]]:
    """The list, each trouble with its place in it. `hosts`: all that count; `host`: the one that counts alone.
    `outage`: why the bus cannot be read."""
    seen = [_Host(item, fleet.once(item.host, "troubles", partial(_records, fleet, item.host))) for item in hosts]
    managed = [each for each in seen if each.item.managed]
    picture = _Picture(seen, managed, list(_letters(fleet, host, now - RECENT)), outage, now)
    found = [trouble for look in _LOOKS for trouble in look(picture)]
    return sorted(((f"{_RANKS[each.kind]:02d}/{each.title}", each) for each in found), key=lambda placed: placed[0])


def _letters(fleet: Fleet, host: str | None, since: datetime) -> Iterator[ShownLetter]:
    for item in fleet.letters.newest_first():
        if item.at <= since:
            return
        if host in {None, item.value.key}:
            yield item.value


def _records(fleet: Fleet, host: str) -> _Records:
    lines = [device.line() for device in fleet.devices(host)]
    ill: dict[TroubleKind, list[DeviceLine]] = {}
    for line in lines:
        if line.block is not None and line.cordon is None:
            ill.setdefault(_OF_BLOCKS[line.block], []).append(line)
    ill_and_cordoned = {line.resource for line in lines if line.illness is not None and line.cordon is not None}
    holders = {holder.worker for line in lines for holder in line.holders}
    return _Records(
        lent_twice=[line for line in lines if line.lent_twice],
        ill=ill,
        still_used=[line for line in lines if any(holder.delayed_by for holder in line.holders)],
        free={line.resource for line in lines if line.is_free},
        mended=ill_and_cordoned - {line.resource for of_kind in ill.values() for line in of_kind},
        holding=max(len(holders), *(line.holder_count for line in lines), 0),
        waiting=[stored.record for stored in fleet.queue(host)],
        failed=[stored.record for stored in fleet.workers(host) if stored.record.state == "failed"],
    )


def _alone(line: DeviceLine) -> list[DeviceHolder]:
    """Who has a device or a part of it, and shares it with nobody, each run once."""
    holders = [holder for holder in line.holders if not holder.shared]
    return list({(holder.worker, holder.incarnation): holder for holder in [*holders, *line.kept_by]}.values())


def _lent_twice(picture: _Picture) -> Iterator[Trouble]:
    # one device may be in two resources
    twice = {(line.host, line.id): line for host in picture.hosts for line in host.records.lent_twice}
    for line in list(twice.values())[:1]:
        alone = _alone(line)
        yield _trouble(
            LENT_TWICE,
            f"{_count(len(twice), 'device')} {_verb(len(twice), 'is', 'are')} lent twice",
            f"{' and '.join(holder.worker for holder in alone)} have {line.id} on {line.host}.",
            "Stop one of them, keep the topics, and report what `outfitter verify` says.",
            since=max(holder.since for holder in alone),
            host=line.host,
            device=line.id,
        )


def _bus_away(picture: _Picture) -> Iterator[Trouble]:
    if picture.outage:
        text = f"{_sentence(picture.outage)} Workers keep what they have."
        yield _trouble(
            BUS_AWAY, "The bus cannot be read", text, "Look after the brokers; the picture follows by itself."
        )


def _without_manager(picture: _Picture) -> Iterator[Trouble]:
    dead = [host for host in picture.hosts if host.item.life == "dead" and not host.item.planned]
    missed = [host for host in picture.hosts if host.item.life != "dead" and host.item.missed]
    starts = "Nobody answers before `outfitter serve` runs again"
    writes = "Nobody answers before it writes again. See its log, and whether it is stopped or on another bus"
    killed = [host for host in dead if host.item.process is None]
    not_heard = [host for host in dead if host.item.process is not None]
    for kind, hosts, title, remedy in (
        (KILLED, killed, "The manager of {} was killed, or hangs", starts),
        (NOT_HEARD, not_heard, "The manager of {} lives, but was not heard", writes),
        (NO_MANAGER, missed, f"{{}} {_verb(len(missed), 'has', 'have')} no manager", starts),
    ):  # fmt: skip
        if hosts:
            named = _some(
                [f"process {host.item.process} for {host.name}" if host.item.process else host.name for host in hosts]
            )
            yield _trouble(
                kind,
                title.format(_where(hosts)),
                _affected(hosts),
                f"{remedy}{f': {named}' if len(hosts) > 1 or kind is NOT_HEARD else ''}.",
                since=min((host.item.life_at for host in hosts if host.item.life_at is not None), default=None),
                host=hosts[0].name,
            )


def _affected(hosts: Sequence[_Host]) -> str:
    """Who feels that nobody answers on these hosts; nothing if nobody does."""
    holding = sum(host.records.holding for host in hosts)
    waiting = sum(len(host.records.waiting) for host in hosts)
    messages = sum(host.item.unanswered or 0 for host in hosts)
    parts = [
        f"{_count(holding, 'worker')} there {_verb(holding, 'keeps', 'keep')} devices" if holding else "",
        f"{_count(waiting, 'worker')} {_verb(waiting, 'waits', 'wait')}" if waiting else "",
        f"{_count(messages, 'message')} {_verb(messages, 'lies', 'lie')} unanswered" if messages else "",
    ]
    return _sentence(", and ".join(filter(None, parts)))


_FAILING = {
    "driver-failed": (
        DRIVER_FAILED, "The driver of {} fails",
        "The manager tries again by itself. `outfitter doctor` on the host says what it lacks.",
    ),
    "misconfigured": (
        MISCONFIGURED, "{} is misconfigured", "Correct the host's configuration: `outfitter config check` says where.",
    ),
    "no-driver": (NO_DRIVER, "{} has no driver", "Name its driver in the host's configuration."),
}  # fmt: skip
"""The states of a resource that nobody gets."""


def _failing_drivers(picture: _Picture) -> Iterator[Trouble]:
    groups: defaultdict[tuple[str, str], list[_Host]] = defaultdict(list)
    for host in picture.managed:
        for name, resource in (host.item.resources or {}).items():
            if resource.state in _FAILING:
                groups[name, resource.state].append(host)
    for (name, state), hosts in groups.items():
        kind, title, remedy = _FAILING[state]
        reason = ((hosts[0].item.resources or {})[name].reason or "").rstrip(".")
        text = f"Nobody gets any {name} there{f': {reason}' if reason else ''}."
        yield _trouble(kind, f"{title.format(name)} on {_where(hosts)}", text, remedy, host=hosts[0].name)


ILLNESSES = (
    (
        UNHEALTHY, "{} on {} {} unhealthy",
        "Look at it, or replace it: drivers/health.md says what makes a device ill.",
    ),
    (STRANGER, "{} on {} {} used by strangers", "End that process, or have its user register for the device."),
    (HELD_BACK, "{} on {} {} held back", "End that worker, or let the driver report the old id as an alias."),
    (
        UNKNOWN, "The health of {} on {} is unknown",
        "Nobody gets it before it is known to be well: drivers/health.md says when that is.",
    ),
)  # fmt: skip
"""Kinds of ill devices, each with the title and the remedy of its trouble."""


def _ill_devices(picture: _Picture) -> Iterator[Trouble]:
    for kind, title, remedy in ILLNESSES:
        hosts = [host for host in picture.managed if kind in host.records.ill]
        ill = [line for host in hosts for line in host.records.ill[kind]]
        for line in ill[:1]:
            held = sum(bool(each.holders) for each in ill) if kind is UNHEALTHY else 0
            still = f" Workers still hold {f'{held} of them' if len(ill) > 1 else 'it'}."
            if len(ill) == line.holder_count == 1:
                still = f" Worker {line.holders[0].worker} still holds it."
            reason = _sentence((line.stranger if kind is STRANGER else line.reason) or "no reason is given")
            yield _trouble(
                kind,
                title.format(_count(len(ill), "device"), _where(hosts), _verb(len(ill), "is", "are")),
                f"{line.id} on {line.host}: {reason}{still if held else ''}",
                remedy,
                host=line.host if len(hosts) == 1 else None,
            )


def _unread_orders(picture: _Picture) -> Iterator[Trouble]:
    hosts = [host for host in picture.managed if host.item.orders_unread]
    if hosts:
        yield _trouble(
            ORDERS_UNREAD,
            f"Operators' orders are not read on {_where(hosts)}",
            f"{_sentence(hosts[0].item.orders_unread)} What is cordoned stays so.",
            "`outfitter topics check` says what is missing.",
            host=hosts[0].name,
        )


def _waiting(picture: _Picture) -> Iterator[Trouble]:
    in_vain = [
        each
        for host in picture.hosts
        for each in host.records.waiting
        if each.reason_code == "infeasible"
        and not (waits_for_healing(each.reason) and host.records.mended.issuperset(each.request.amounts))
    ]
    healing = [each for each in in_vain if waits_for_healing(each.reason)]
    large = [each for each in in_vain if not waits_for_healing(each.reason)]
    without_answer = [
        (each, each.since if host.item.manager is None else max(each.since, host.item.manager.since))
        for host in picture.managed
        for each in host.records.waiting
        if each.reason_code == "not-reported"
    ]
    beside_free = [
        each
        for host in picture.managed
        for each in host.records.waiting
        if each.reason_code in ("busy", "placement-not-found")
        and not host.records.free.isdisjoint(each.request.amounts)
    ]
    for kind, waiters, one, more, what, remedy in (
        (WAITS_FOR_HEALING, _since(healing), "wants", "want", "devices that are ill", "Mend or replace the ill ones."),
        (INFEASIBLE, _since(large), "wants", "want", "more than the host has",
         "That never comes by waiting: register with less, or add devices."),
        (NOT_REPORTED, without_answer, "waits", "wait", "for a driver's answer",
         "`outfitter doctor` on the host says what the driver lacks."),
        (BESIDE_FREE, _since(beside_free), "waits", "wait", "although devices are free",
         "A large request may keep them for itself: `outfitter explain` says more."),
    ):  # fmt: skip
        late = [waiter for waiter in waiters if picture.now - waiter[1] >= kind.after]
        if late:
            first, since = min(late, key=lambda waiter: waiter[1])
            yield _trouble(
                kind,
                f"{_count(len(late), 'worker')} {_verb(len(late), one, more)} {what}",
                f"{first.worker} on {first.host}: {_sentence(first.reason)}",
                remedy,
                since=since,
                host=first.host,
                worker=first.worker,
            )


def _since(waiters: Iterable[Allocation]) -> list[tuple[Allocation, datetime]]:
    return [(waiter, waiter.since) for waiter in waiters]


def _still_used(picture: _Picture) -> Iterator[Trouble]:
    delayed = [
        (line, holder)
        for host in picture.hosts
        for line in host.records.still_used
        for holder in line.holders
        if holder.delayed_by
    ]
    if delayed:
        line, holder = min(delayed, key=lambda pair: pair[1].since)
        yield _trouble(
            STILL_USED,
            f"{_count(len(delayed), 'device')} {_verb(len(delayed), 'is', 'are')} still in use after release",
            f"{line.id} of {holder.worker} on {line.host}: {_sentence(holder.delayed_by)}",
            "It is lent again when nobody uses it.",
            since=holder.since,
            host=line.host,
            device=line.id,
        )


def _failed(picture: _Picture) -> Iterator[Trouble]:
    failed = [each for host in picture.hosts for each in host.records.failed if picture.now - each.since < RECENT]
    if failed:
        last = max(failed, key=lambda each: each.since)
        yield _trouble(
            FAILED,
            f"{_count(len(failed), 'worker')} failed in the last hour",
            f"The last was {last.worker} on {last.host}: {_sentence(last.reason)}",
            "`outfitter history` says what led to it.",
            since=last.since,
            host=last.host,
            worker=last.worker,
        )


def _refused(picture: _Picture) -> Iterator[Trouble]:
    if picture.letters:
        number, last = sum(letter.count for letter in picture.letters), picture.letters[0]
        yield _trouble(
            REFUSED,
            f"{_count(number, 'message')} {_verb(number, 'was', 'were')} refused in the last hour",
            f"The last: {_sentence(last.reason)}",
            "`outfitter dead-letters` shows them whole.",
            since=last.at,
        )


_LOOKS = (
    _lent_twice, _bus_away, _without_manager, _failing_drivers, _ill_devices, _waiting, _still_used, _unread_orders,
    _failed, _refused,
)  # fmt: skip


def _trouble(
    kind: TroubleKind,
    title: str,
    text: str,
    remedy: str,
    *,
    since: datetime | None = None,
    host: str | None = None,
    device: str | None = None,
    worker: str | None = None,
) -> Trouble:
    return Trouble(
        kind=kind.code, urgent=kind.urgent, title=title, text=text, remedy=remedy,
        since=since, host=host, device=device, worker=worker,
    )  # fmt: skip


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _verb(number: int, one: str, more: str) -> str:
    return one if number == 1 else more


def _where(hosts: Sequence[_Host]) -> str:
    return hosts[0].name if len(hosts) == 1 else _count(len(hosts), "host")


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")


def _sentence(reason: str | None) -> str:
    """A reason as a sentence; nothing if there is none."""
    return f"{reason.rstrip('.')}." if reason else ""

"""What needs a person, the worst first: one entry for all that have one cause. The console says the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from outfitter_service.api.items import QueueItem
from outfitter_service.cli._lib.overview.picture import HostView, Picture
from outfitter_service.core.reasons import HEALING

RECENT = timedelta(hours=1)
"""How long a failed worker and a refused message are shown."""
UNANSWERED = timedelta(minutes=10)
"""A driver that has not answered for this long will not do so by itself: see the alert OutfitterWorkersWaitInVain."""
BESIDE_FREE = timedelta(minutes=15)
"""Who waits this long beside free devices is shown: see the alert OutfitterWorkersWaitAlthoughFree."""
_NAMED = 3


class Trouble(Struct, frozen=True, kw_only=True):
    """`urgent`: somebody must act now, exactly where the alert for the same is critical. `title`: what it is. `text`:
    what it means, and what to do. `since`: when it began, if that is known."""

    urgent: bool
    title: str
    text: str
    since: datetime | None = None


def troubles_of(picture: Picture, views: Sequence[HostView], now: datetime) -> list[Trouble]:
    """The troubles of a picture. `views`: its hosts, the most urgent first."""
    found = [trouble for look in _LOOKS for trouble in look(picture, views, now)]
    return sorted(found, key=lambda trouble: not trouble.urgent)


def _lent_twice(picture: Picture, _views: Sequence[HostView], _now: datetime) -> Iterator[Trouble]:
    alone = {
        (device.host, device.id): [holder for holder in device.holders if not holder.shared]
        for device in picture.devices
        if len(device.holders) > 1
    }
    twice = {device: holders for device, holders in alone.items() if len(holders) > 1}
    if twice:
        (host, device_id), holders = next(iter(twice.items()))
        yield Trouble(
            urgent=True,
            title=f"{_count(len(twice), 'device')} {_verb(list(twice), 'is', 'are')} lent twice",
            text=f"{' and '.join(holder.worker for holder in holders)} have {device_id} on {host}. "
            "Stop one of them, keep the topics, and report what `outfitter verify` says.",
            since=max(holder.since for holder in holders),
        )


def _outage(picture: Picture, _views: Sequence[HostView], _now: datetime) -> Iterator[Trouble]:
    if picture.outage:
        yield Trouble(
            urgent=True,
            title="The bus cannot be read",
            text=f"{_sentence(picture.outage)}Workers keep what they have. Look after the brokers.",
        )


def _killed(_picture: Picture, views: Sequence[HostView], _now: datetime) -> Iterator[Trouble]:
    if dead := [view for view in views if view.item.life == "dead" and view.item.process is None]:
        heard = [view.item.life_at for view in dead if view.item.life_at is not None]
        yield Trouble(
            urgent=True,
            title=f"The manager of {_where(dead)} was killed, or hangs",
            text=f"{_affected(dead)} Nobody answers before `outfitter serve` runs again: {_names(dead)}.",
            since=min(heard, default=None),
        )


def _silent(_picture: Picture, views: Sequence[HostView], _now: datetime) -> Iterator[Trouble]:
    if silent := [view for view in views if view.item.life == "dead" and view.item.process is not None]:
        heard = [view.item.life_at for view in silent if view.item.life_at is not None]
        yield Trouble(
            urgent=True,
            title=f"The manager of {_where(silent)} lives, but was not heard",
            text=f"{_affected(silent)} Nobody answers before it writes again. See its log, and whether it is stopped "
            f"or on another bus: {', '.join(_process(view) for view in silent[:_NAMED])}{_more(silent)}.",
            since=min(heard, default=None),
        )


def _process(view: HostView) -> str:
    return f"process {view.item.process} for {view.name}" if view.item.process else view.name


def _without_manager(_picture: Picture, views: Sequence[HostView], _now: datetime) -> Iterator[Trouble]:
    missed = [view for view in views if view.is_missed and view.item.life != "dead"]
    if missed:
        stopped = [view.item.life_at for view in missed if view.item.life_at is not None]
        yield Trouble(
            urgent=True,
            title=f"{_where(missed)} {_verb(missed, 'has', 'have')} no manager",
            text=f"{_affected(missed)} Nobody answers before `outfitter serve` runs again: {_names(missed)}.",
            since=min(stopped, default=None),
        )


def _affected(views: Sequence[HostView]) -> str:
    holders, waiters = sum(view.holding for view in views), sum(len(view.waiting) for view in views)
    unanswered = sum(view.item.unanswered or 0 for view in views)
    messages = f", unanswered messages: {unanswered}" if unanswered else ""
    return f"Workers with devices there: {holders}, waiting: {waiters}{messages}."


_REMEDIES = {
    "driver-failed": "The driver of {} fails. `outfitter doctor` on the host says what it lacks.",
    "misconfigured": "{} is misconfigured. `outfitter config check` says where.",
    "no-driver": "{} has no driver. Name one in the host's configuration.",
}


def _failing_drivers(_picture: Picture, views: Sequence[HostView], _now: datetime) -> Iterator[Trouble]:
    groups: defaultdict[tuple[str, str], list[HostView]] = defaultdict(list)
    for view in views:
        for name in view.failing if view.item.managed else ():
            groups[name, (view.item.resources or {})[name].state].append(view)
    for (name, state), hosts in groups.items():
        reason = (hosts[0].item.resources or {})[name].reason
        yield Trouble(
            urgent=False,
            title=f"Nobody gets any {name} on {_where(hosts)}",
            text=f"{_sentence(reason)}{_REMEDIES[state].format(name)}",
        )


def _ill_devices(_picture: Picture, views: Sequence[HostView], _now: datetime) -> Iterator[Trouble]:
    for illness, remedy in (
        ("unhealthy", "Look at it, or replace it."),
        ("held back", "End that worker, or let the driver report the old id as an alias."),
        ("unknown", "Nobody gets it before its driver reports it healthy."),
    ):
        hosts = [view for view in views if view.item.managed and illness in view.states]
        if not hosts:
            continue
        ill = [
            device
            for view in hosts
            for device, state in zip(view.devices, view.states, strict=True)
            if state == illness
        ]
        first, number = ill[0], len(ill)
        yield Trouble(
            urgent=False,
            title=f"{_count(number, 'device')} on {_where(hosts)} {_verb(range(number), 'is', 'are')} {illness}",
            text=f"{first.id} on {first.host}: {_sentence(first.reason)}{remedy}",
        )


def _infeasible(picture: Picture, _views: Sequence[HostView], _now: datetime) -> Iterator[Trouble]:
    waiters = [item for item in picture.queue if item.reason_code == "infeasible"]
    healing = [item for item in waiters if HEALING in (item.reason or "")]
    for found, what, remedy in (
        (healing, "devices that are ill", "Mend or replace the ill ones."),
        (
            [item for item in waiters if item not in healing],
            "more than the host has",
            "That never comes by waiting: register with less, or add devices.",
        ),
    ):
        if found:
            first = min(found, key=lambda item: item.since)
            yield Trouble(
                urgent=False,
                title=f"{_count(len(found), 'worker')} {_verb(found, 'wants', 'want')} {what}",
                text=f"{first.worker} on {first.host}: {_sentence(first.reason)}{remedy}",
                since=first.since,
            )


def _unanswered(_picture: Picture, views: Sequence[HostView], now: datetime) -> Iterator[Trouble]:
    def begin(view: HostView, item: QueueItem) -> datetime:
        manager = view.item.manager
        return item.since if manager is None else max(item.since, manager.since)

    waiters = [
        (begin(view, item), item)
        for view in views
        for item in (view.waiting if view.item.managed else ())
        if item.reason_code == "not-reported" and now - begin(view, item) >= UNANSWERED
    ]
    if waiters:
        since, first = min(waiters, key=lambda waiter: waiter[0])
        yield Trouble(
            urgent=False,
            title=f"{_count(len(waiters), 'worker')} {_verb(waiters, 'waits', 'wait')} for a driver's answer",
            text=f"{first.worker} on {first.host}: {_sentence(first.reason)}"
            "`outfitter doctor` on the host says what the driver lacks.",
            since=since,
        )


def _beside_free(_picture: Picture, views: Sequence[HostView], now: datetime) -> Iterator[Trouble]:
    waiters: list[QueueItem] = []
    for view in views:
        free = {device.resource for device, state in zip(view.devices, view.states, strict=True) if state == "free"}
        waiters += [
            item
            for item in view.waiting
            if item.reason_code == "busy" and now - item.since >= BESIDE_FREE and not free.isdisjoint(item.amounts)
        ]
    if waiters:
        first = min(waiters, key=lambda item: item.since)
        yield Trouble(
            urgent=False,
            title=f"{_count(len(waiters), 'worker')} {_verb(waiters, 'waits', 'wait')} although devices are free",
            text=f"{first.worker} on {first.host}: {_sentence(first.reason)}"
            "A large request may keep them for itself: `outfitter explain` says more.",
            since=first.since,
        )


def _not_free(picture: Picture, _views: Sequence[HostView], _now: datetime) -> Iterator[Trouble]:
    delayed = [(device, each) for device in picture.devices for each in device.holders if each.delayed_by]
    if delayed:
        device, holder = min(delayed, key=lambda pair: pair[1].since)
        yield Trouble(
            urgent=False,
            title=f"{_count(len(delayed), 'device')} {_verb(delayed, 'is', 'are')} still in use after release",
            text=f"{device.id} of {holder.worker} on {device.host}: {_sentence(holder.delayed_by)}",
            since=holder.since,
        )


def _failed(picture: Picture, _views: Sequence[HostView], now: datetime) -> Iterator[Trouble]:
    recent = [worker for worker in picture.failed if now - worker.since < RECENT]
    if recent:
        last = max(recent, key=lambda worker: worker.since)
        yield Trouble(
            urgent=False,
            title=f"{_count(len(recent), 'worker')} failed in the last hour",
            text=f"The last was {last.worker} on {last.host}: {_sentence(last.reason)}",
            since=last.since,
        )


def _refused(picture: Picture, _views: Sequence[HostView], now: datetime) -> Iterator[Trouble]:
    recent = [letter for letter in picture.letters if now - letter.at < RECENT]
    if recent:
        was = _verb(recent, "was", "were")
        yield Trouble(
            urgent=False,
            title=f"{_count(len(recent), 'message')} {was} refused in the last hour",
            text=f"The last: {_sentence(recent[0].reason)}`outfitter dead-letters` shows them whole.",
            since=recent[0].at,
        )


_LOOKS: tuple[Callable[[Picture, Sequence[HostView], datetime], Iterable[Trouble]], ...] = (
    _lent_twice,
    _outage,
    _killed,
    _silent,
    _without_manager,
    _failing_drivers,
    _ill_devices,
    _infeasible,
    _unanswered,
    _beside_free,
    _not_free,
    _failed,
    _refused,
)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _verb(things: Sequence[object], one: str, many: str) -> str:
    return one if len(things) == 1 else many


def _where(hosts: Sequence[HostView]) -> str:
    return hosts[0].name if len(hosts) == 1 else f"{len(hosts)} hosts"


def _names(hosts: Sequence[HostView]) -> str:
    return ", ".join(view.name for view in hosts[:_NAMED]) + _more(hosts)


def _more(hosts: Sequence[HostView]) -> str:
    return f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else ""


def _sentence(reason: str | None) -> str:
    """The reason as a sentence before others; nothing if there is none."""
    return f"{reason.rstrip('.')}. " if reason else ""

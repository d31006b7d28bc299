"""The picture as lines of a terminal: none is wider than the terminal, and there are not more than fit.

First what needs a person, then what operators have taken out, how many devices there are, who waits, and the fleet.
Each part has what it wants, or else its fair share. Everything that a colour says is said by a character as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby, islice
from textwrap import wrap

from rich.text import Text

from outfitter_proto.support.printable import printable
from outfitter_service.api.items import HostItem, Trouble
from outfitter_service.cli._lib.output import age
from outfitter_service.cli._lib.overview.picture import STATES, HostView, Picture, totals_in, views_of
from outfitter_service.query import labels
from outfitter_service.query.cordons import OrderInEffect
from outfitter_service.query.device_totals import ResourceTotals, rows_of

SIGNS = {
    "unhealthy": "!",
    "unknown": "?",
    "held back": "-",
    "used by stranger": "%",
    "cordoned": "x",
    "held": "#",
    "free": ".",
}
STYLES = {
    "unhealthy": "bold red", "unknown": "yellow", "held back": "magenta", "used by stranger": "yellow",
    "cordoned": "cyan", "held": "blue", "free": "green",
}  # fmt: skip
NARROWEST, SHORTEST = 40, 10
"""The smallest terminal for which there is a screen. In a smaller one its lines are cut off."""
TALLEST = 10_000
"""Lines of a picture that is printed and not shown on a screen."""
_WHY = 3
"""The most lines of why a picture is old."""
_REMEDY = 4
"""The most lines of what a trouble means and what to do."""
_ORDER = 3
"""The most lines of an operator's order."""
_NAME = 24
"""The most columns of a name, if what follows needs the rest."""
_FIXED = "\N{NO-BREAK SPACE}"
_FREE = 26
"""The columns that are kept for what is free."""


def lines_of(picture: Picture, now: datetime, width: int, height: int, stale: str | None = None) -> list[Text]:
    """The lines of a picture. `stale`: why there is no newer one."""
    width, height = max(width, NARROWEST), max(height, SHORTEST)
    views = views_of(picture)
    troubles, totals = picture.troubles, totals_in(picture) if picture.devices else []
    orders = [(host, order) for host in picture.hosts for order in host.orders]
    head = [
        _header(picture, views, stale),
        *(_old(picture, now, width, stale) if stale else [_sentence(troubles)]),
    ]
    parts = [
        [line for trouble in troubles for line in _trouble(trouble, now, width)],
        [Text(f"CORDONED {len(orders)}", "bold"), *_orders(orders, now, width)] if orders else [],
        [Text(f"DEVICES {sum(each.total for each in totals)}", "bold"), *_totals(totals, width)] if totals else [],
        [Text(f"WAITING {len(picture.queue)}", "bold"), *_waiting(picture, now)] if picture.queue else [],
        [Text(f"FLEET {len(views)}", "bold"), *_fleet(views, width)] if views else [],
    ]
    shown = [part for part in parts if part]
    room = height - len(head) - 1 - len(shown)
    lines = list(head)
    for part, share in zip(shown, shares([len(part) for part in shown], room), strict=True):
        lines += [Text(), *_cut(part, share)]
    lines = [*lines[: height - 1], _legend()]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """How many of `room` lines each part gets: what it wants, or as much as any other that wants more."""
    given = [0] * len(wanted)
    while room > 0 and (hungry := [part for part, wish in enumerate(wanted) if given[part] < wish]):
        portion = max(1, room // len(hungry))
        for part in hungry:
            more = min(portion, wanted[part] - given[part], room)
            given[part] += more
            room -= more
    return given


def _cut(lines: Sequence[Text], share: int) -> list[Text]:
    """The first lines, and the number of those that are left out."""
    if len(lines) <= share or share < 1:
        return list(lines[:share])
    return [*lines[: share - 1], Text(f"… and {len(lines) - share + 1} more lines", "dim")]


def _header(picture: Picture, views: Sequence[HostView], stale: str | None) -> Text:
    at = "never" if picture.as_of is None else picture.as_of.astimezone().strftime("%H:%M:%S")
    header = Text(f"{printable(picture.cluster)}  ", "bold")
    header.append(f"as of {at}  ", "bold red" if stale else "")
    return header.append(f"hosts: {len(views)}  waiting: {len(picture.queue)}", "not bold")


def _orders(orders: Sequence[tuple[HostItem, OrderInEffect]], now: datetime, width: int) -> Iterator[Text]:
    """What operators have taken out, the newest first, and which hosts are without a manager because of it."""
    for host, order in sorted(orders, key=lambda pair: pair[1].since, reverse=True):
        planned = "; no manager, as planned" if host.planned and order.is_of_host else ""
        told = f"{host.host}: {order.about} for {_age(now, order.since)}: {order.in_words}{planned}"
        lines = wrap(printable(told), width, subsequent_indent="  ")
        yield from map(Text, lines[: _ORDER - 1])
        if rest := " ".join(line.strip() for line in lines[_ORDER - 1 :]):
            yield Text(f"  {rest}")


def _totals(totals: Sequence[ResourceTotals], width: int) -> Iterator[Text]:
    """The numbers of each resource and model. A long name is cut, and no number."""
    for name, numbers in rows_of(totals):
        line = Text(printable(name))
        line.truncate(min(_NAME, width - _FREE), overflow="ellipsis")
        indent = " " * (line.cell_len + 2)
        whole = numbers.replace(" ", _FIXED).replace(f",{_FIXED}", ", ")
        first, *rest = wrap(whole, width, initial_indent=indent, subsequent_indent=" " * 4)
        yield line.append(f": {first.removeprefix(indent)}".replace(_FIXED, " "))
        yield from (Text(each.replace(_FIXED, " ")) for each in rest)


def _old(picture: Picture, now: datetime, width: int, stale: str) -> list[Text]:
    """How old the picture is, and why."""
    how_old = "" if picture.as_of is None else f"{_age(now, picture.as_of)} "
    return [Text(line, "bold red") for line in wrap(f"This picture is {how_old}old: {printable(stale)}", width)[:_WHY]]


def _sentence(troubles: Sequence[Trouble]) -> Text:
    urgent = sum(trouble.urgent for trouble in troubles)
    if urgent:
        return Text(f"{urgent} {'thing needs' if urgent == 1 else 'things need'} you now.", "bold red")
    if troubles:
        return Text(f"Nothing is urgent. {len(troubles)} to look at.", "yellow")
    return Text("Nothing needs you.", "green")


def _trouble(trouble: Trouble, now: datetime, width: int) -> Iterator[Text]:
    since = "" if trouble.since is None else f"  {_age(now, trouble.since)}"
    mark, style = ("!", "bold red") if trouble.urgent else ("*", "yellow")
    yield Text(f"{mark} {printable(trouble.title)}{since}", style)
    lines = wrap(printable(f"{trouble.text} {trouble.remedy}".strip()), width - 2)
    for line in lines[: _REMEDY - 1]:
        yield Text(f"  {line}", "dim")
    if rest := " ".join(lines[_REMEDY - 1 :]):
        yield Text(f"  {rest}", "dim")


def _waiting(picture: Picture, now: datetime) -> Iterator[Text]:
    for item in sorted(picture.queue, key=lambda item: item.since):
        amounts = ", ".join(f"{amount} {name}" for name, amount in sorted(item.amounts.items())) or "nothing"
        reason = item.reason or "not decided yet"
        of_worker = f" ({labels.in_words(item.labels)})" if item.labels else ""
        who = f"{item.worker} on {item.host}{of_worker}"
        yield Text(printable(f"{_age(now, item.since):>4}  {who}  {amounts}: {reason}"))


def _fleet(views: Sequence[HostView], width: int) -> Iterator[Text]:
    widest = max(len(printable(view.name)) for view in views)
    column = min(widest, max(_NAME, width - 40))
    for view in views:
        name = printable(view.name)
        line = Text(f"{name if len(name) <= column else name[: column - 1] + '…':{column}}  ")
        line.append_text(_signs(view, max(1, width - column - 14)))
        line.append(_remark(view), "dim")
        yield line


def _signs(view: HostView, room: int) -> Text:
    """A sign for each device in the order of the machine, behind the name of its resource if there are several."""
    signs = Text()
    several = len({device.resource for device in view.devices}) > 1
    devices = islice(zip(view.devices, view.states, strict=True), room + 1)
    for resource, of_resource in groupby(devices, key=lambda each: each[0].resource):
        if several:
            signs.append("  " if signs else "").append(f"{printable(resource)} ", "dim")
        for _, state in of_resource:
            signs.append(SIGNS[state], STYLES[state])
    signs.truncate(room, overflow="ellipsis")
    return signs


_UNSERVED = {"dead": "no manager: killed", "stopped": "no manager: stopped"}


def _remark(view: HostView) -> str:
    """What a host's signs do not say."""
    unserved = "not heard" if view.item.process is not None else _UNSERVED.get(view.item.life, "no manager")
    if view.item.planned:
        unserved = "no manager: planned"
    said = [] if view.item.managed else [unserved]
    said += [f"{name} fails" for name in view.failing]
    if view.waiting:
        said.append(f"{len(view.waiting)} wait")
    return printable(f"  {', '.join(said)}") if said else ""


def _legend() -> Text:
    legend = Text()
    for state in reversed(STATES):
        legend.append(f"{SIGNS[state]} ", STYLES[state]).append(f"{state.removeprefix('used by ')}  ", "dim")
    legend.rstrip()
    return legend


def _age(now: datetime, since: datetime) -> str:
    return age(max(0.0, (now - since).total_seconds()))

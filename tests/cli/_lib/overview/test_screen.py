"""The screen of `outfitter top`: what is on it, and that it fits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from outfitter_proto.records import ManagerIdentity, MessageSource
from outfitter_service.api.items import HostItem, QueueItem, ResourceSummary, WorkerItem
from outfitter_service.cli._lib.overview import screen
from outfitter_service.cli._lib.overview.picture import Picture, views_of
from outfitter_service.cli._lib.overview.troubles import troubles_of
from outfitter_service.core.state.resource_state import HELD_BACK
from outfitter_service.query.device_lines import DeviceHolder, DeviceLine
from outfitter_service.query.letters import ShownLetter

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOSTILE = "\x1b[2J\nüñí漢字" * 40


def host(
    name: str = "h",
    *,
    managed: bool = True,
    state: str = "ok",
    reason: str | None = None,
    life: Any = "unknown",
    process: int | None = None,
    unanswered: int | None = None,
) -> HostItem:
    summary = ResourceSummary(state=state, reason=reason, amount=1, sharing="exclusive", total=1, healthy=1)
    return HostItem(
        host=name,
        managed=managed and life not in {"dead", "stopped"},
        life=life,
        life_at=NOW - 3 * MINUTE if life in {"dead", "stopped"} else None,
        process=process,
        unanswered=unanswered,
        since=NOW,
        manager=None,
        resources={"gpu": summary},
        workers={},
    )


def device(
    name: str = "GPU-0", on: str = "h", *, holder: str | None = None, delayed: str | None = None, **more: Any
) -> DeviceLine:
    holders = []
    if holder is not None:
        holders = [
            DeviceHolder(
                worker=holder, incarnation="1", state="allocated", token=1, since=NOW - MINUTE, delayed_by=delayed
            )
        ]
    return DeviceLine(
        **{
            "host": on,
            "resource": "gpu",
            "id": name,
            "health": "healthy",
            "sharing": "exclusive",
            "holders": holders,
            **more,
        }
    )


def lent_twice(name: str, *, shared: bool = False) -> DeviceLine:
    """A device with two holders. `shared`: they may share it."""
    once = device(name, holder="a")
    first, second = (structs.replace(once.holders[0], worker=worker, shared=shared) for worker in ("a", "b"))
    return structs.replace(once, holders=[first, second])


def waiter(
    name: str = "w",
    on: str = "h",
    *,
    code: str = "busy",
    reason: str = "waits for 1 gpu",
    ago: timedelta = 5 * MINUTE,
) -> QueueItem:
    return QueueItem(
        host=on, worker=name, incarnation="1", queue_position=1, since=NOW - ago, priority=0, amounts={"gpu": 2},
        reason=reason, reason_code=code, wait_until=None,
    )  # fmt: skip


def failed(name: str = "w", *, ago: timedelta = MINUTE) -> WorkerItem:
    return WorkerItem(
        host="h", worker=name, incarnation="1", state="failed", since=NOW - ago, amounts={}, devices={},
        queue_position=None, priority=0, labels={}, reason="prepare failed.", reason_code=None, wait_until=None,
        warnings=[],
    )  # fmt: skip


def letter(*, ago: timedelta = MINUTE) -> ShownLetter:
    return ShownLetter(
        at=NOW - ago, source=MessageSource(topic="t", partition=0, offset=0), key="h", code="bad", field=None,
        reason="is no JSON", length=1, sha256="", writer="host/h", text="x", base64=None,
    )  # fmt: skip


def picture(**more: Any) -> Picture:
    usual = {"cluster": "outfitter", "as_of": NOW, "outage": None, "hosts": [host()], "devices": [device()]}
    return Picture(**{**usual, "queue": [], "failed": [], "letters": [], **more})


def shown(found: Picture, width: int = 80, height: int = 24, **more: Any) -> list[str]:
    return [line.plain for line in screen.lines_of(found, NOW, width, height, **more)]


def test_a_quiet_fleet_needs_nobody() -> None:
    lines = shown(picture(devices=[device("a", holder="w"), device("b")]))
    assert lines[0].endswith("hosts: 1  devices: 1 held, 1 free  waiting: 0")
    assert lines[1] == "Nothing needs you."
    assert "h  #." in lines


TROUBLES: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "no manager": (
        {"hosts": [host(managed=False)], "devices": [device(holder="w")], "queue": [waiter()]},
        True,
        "h has no manager",
        "Workers with devices there: 1, waiting: 1.",
    ),
    "killed": (
        {"hosts": [host(life="dead")]},
        True,
        "The manager of h was killed, or hangs  3m",
        "Workers with devices there: 0, waiting: 0. Nobody answers before",
    ),
    "not heard": (
        {"hosts": [host(life="dead", process=77)]},
        True,
        "The manager of h lives, but was not heard  3m",
        (
            "Nobody answers before it writes again. See its log, and whether it is stopped or on another bus: "
            "process 77 for h."
        ),
    ),
    "stopped, and a worker waits": (
        {"hosts": [host(life="stopped")], "queue": [waiter()]},
        True,
        "h has no manager  3m",
        "Workers with devices there: 0, waiting: 1.",
    ),
    "stopped, and messages wait": (
        {"hosts": [host(life="stopped", unanswered=2)]},
        True,
        "h has no manager  3m",
        "Workers with devices there: 0, waiting: 0, unanswered messages: 2.",
    ),
    "driver": (
        {"hosts": [host(state="driver-failed", reason="no nvidia-smi")]},
        False,
        "Nobody gets any gpu on h",
        "no nvidia-smi. The driver of gpu fails.",
    ),
    "unhealthy": (
        {"devices": [device(health="unhealthy", reason="XID 79")]},
        False,
        "1 device on h is unhealthy",
        "GPU-0 on h: XID 79.",
    ),
    "unknown": ({"devices": [device(health="unknown")]}, False, "1 device on h is unknown", "Nobody gets it"),
    "infeasible": (
        {"queue": [waiter(code="infeasible", reason="only 1 there")]},
        False,
        "1 worker wants more than the host has  5m",
        "only 1 there.",
    ),
    "ill": (
        {
            "queue": [
                waiter(
                    code="infeasible", reason="8 gpu requested, 6 of 8 healthy; granted when enough are healthy again"
                )
            ]
        },
        False,
        "1 worker wants devices that are ill  5m",
        "w on h: 8 gpu requested, 6 of 8 healthy; granted when enough are healthy again. Mend",
    ),
    "not free": (
        {"devices": [device(holder="w", delayed="in use by 42")]},
        False,
        "1 device is still in use after release  1m",
        "GPU-0 of w on h: in use by 42",
    ),
    "failed": (
        {"failed": [failed(), failed("x", ago=3 * MINUTE)]},
        False,
        "2 workers failed in the last hour  1m",
        "The last was w on h: prepare failed.",
    ),
    "refused": (
        {"letters": [letter()]},
        False,
        "1 message was refused in the last hour  1m",
        "The last: is no JSON.",
    ),
    "lent twice": (
        {"devices": [lent_twice("GPU-0"), lent_twice("GPU-1", shared=True)]},
        True,
        "1 device is lent twice  1m",
        "a and b have GPU-0 on h. Stop one of them",
    ),
    "held back": (
        {"devices": [device(health="unknown", reason=f"{HELD_BACK}h/w/1 holds 0 of gpu")]},
        False,
        "1 device on h is held back",
        "held back: h/w/1 holds 0 of gpu. End",
    ),
    "no answer": (
        {"queue": [waiter(code="not-reported", reason="the driver of gpu has not reported yet", ago=10 * MINUTE)]},
        False,
        "1 worker waits for a driver's answer  10m",
        "the driver of gpu has not reported yet. `outfitter doctor`",
    ),
    "beside free": (
        {"queue": [waiter(ago=15 * MINUTE), waiter("x", ago=14 * MINUTE)]},
        False,
        "1 worker waits although devices are free  15m",
        "w on h: waits for 1 gpu. A large request",
    ),
    "outage": ({"outage": "no broker"}, True, "The bus cannot be read", "no broker."),
}


ALERTS = {
    "no manager": "OutfitterDown",
    "outage": "OutfitterNotReady",
    "lent twice": "OutfitterExclusivityViolation",
    "driver": "OutfitterDriverFails",
    "unhealthy": "OutfitterDevicesUnhealthy",
    "held back": "OutfitterDevicesHeldBack",
    "infeasible": "OutfitterWorkersWaitInVain",
    "ill": "OutfitterWorkersWaitInVain",
    "no answer": "OutfitterWorkersWaitInVain",
    "beside free": "OutfitterWorkersWaitAlthoughFree",
    "refused": "OutfitterDeadLetters",
}
RULES = Path(__file__).parents[4] / "deploy/prometheus/rules.yml"


@pytest.mark.parametrize("kind", ALERTS)
def test_a_trouble_is_as_urgent_as_its_alert_is_severe(kind: str) -> None:
    rule = RULES.read_text().partition(f"alert: {ALERTS[kind]}\n")[2].partition("- alert:")[0]
    assert ("severity: critical" in rule) == TROUBLES[kind][1]


@pytest.mark.parametrize("kind", TROUBLES)
def test_each_trouble_is_said_with_what_to_do(kind: str) -> None:
    found, urgent, title, text = TROUBLES[kind]
    lines = shown(picture(**found))
    mark = "!" if urgent else "*"
    place = lines.index(f"{mark} {title}")
    assert text in " ".join(line.strip() for line in lines[place + 1 : place + 4])
    assert lines[1] == ("1 thing needs you now." if urgent else "Nothing is urgent. 1 to look at.")


def test_what_is_over_an_hour_old_is_no_trouble() -> None:
    found = picture(failed=[failed(ago=61 * MINUTE)], letters=[letter(ago=61 * MINUTE)])
    assert troubles_of(found, views_of(found), NOW) == []


def test_a_driver_has_time_to_answer_from_the_start_of_its_manager_on() -> None:
    manager = ManagerIdentity(instance="i", version="0.1.0", since=NOW - 9 * MINUTE)
    found = picture(
        hosts=[structs.replace(host(), manager=manager)],
        queue=[waiter(code="not-reported", reason="not reported yet", ago=60 * MINUTE)],
    )
    assert troubles_of(found, views_of(found), NOW) == []


def test_the_urgent_troubles_and_the_worst_hosts_come_first() -> None:
    names = ["quiet", "waits", "ill", "alone"]
    found = picture(
        hosts=[host("quiet"), host("waits"), host("ill"), host("alone", managed=False)],
        devices=[device(name, name, health="unhealthy" if name == "ill" else "healthy") for name in names],
        queue=[waiter(on="waits")],
        failed=[failed()],
    )
    assert [view.name for view in views_of(found)] == ["alone", "ill", "waits", "quiet"]
    assert [trouble.urgent for trouble in troubles_of(found, views_of(found), NOW)] == [False, False]


def test_each_state_of_a_device_has_a_sign_of_its_own() -> None:
    devices = [
        device("a"), device("b", holder="w"), device("c", health="unknown", reason="held back: h/w/i holds b"),
        device("d", health="unknown"), device("e", health="unhealthy"),
    ]  # fmt: skip
    assert "h  .#-?!" in shown(picture(devices=devices))


def test_devices_of_a_host_without_a_manager_are_not_free() -> None:
    assert "h  ?  no manager" in shown(picture(hosts=[host(managed=False)]))


def test_an_old_picture_says_so_and_why() -> None:
    old = picture(as_of=NOW - 5 * MINUTE)
    assert shown(old, stale="the API is gone")[1] == "This picture is 5m old: the API is gone"
    why = " ".join(line.strip() for line in shown(old, stale=f"{'http://api.example/' * 5} answers 502")[1:4])
    assert why.endswith("answers 502 ")


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (1, 1), (60, 12), (250, 70)])
@pytest.mark.parametrize("hosts", [0, 1, 1000])
def test_it_fits_any_terminal_with_any_names_and_leaves_nothing_out_in_silence(
    size: tuple[int, int], hosts: int
) -> None:
    names = [f"{number}-{HOSTILE}" for number in range(hosts)]
    found = picture(
        cluster=HOSTILE,
        hosts=[host(name, managed=number % 7 != 0) for number, name in enumerate(names)],
        devices=[
            device(f"{number}/{HOSTILE}", name, health=HOSTILE, reason=HOSTILE) for name in names for number in range(8)
        ],
        queue=[waiter(HOSTILE, name, reason=HOSTILE) for name in names],
        failed=[structs.replace(failed(HOSTILE), reason=HOSTILE)],
        letters=[letter()],
        outage=HOSTILE if hosts else None,
    )
    width, height = max(size[0], screen.NARROWEST), max(size[1], screen.SHORTEST)
    lines = screen.lines_of(found, NOW, *size)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    assert all(line.plain.isprintable() for line in lines)
    if hosts == 1000:
        assert sum("more lines" in line.plain for line in lines) >= 2 + (height < 40)


@pytest.mark.parametrize(
    ("wanted", "room", "given"),
    [([2, 2], 10, [2, 2]), ([100, 2, 100], 20, [9, 2, 9]), ([5, 5], 1, [1, 0]), ([], 3, []), ([3], 0, [0])],
)
def test_each_part_gets_what_it_wants_or_its_fair_share(wanted: list[int], room: int, given: list[int]) -> None:
    assert screen.shares(wanted, room) == given


def test_a_manager_that_stopped_in_order_is_shown_and_needs_nobody() -> None:
    lines = shown(picture(hosts=[host(life="stopped")], devices=[device(holder="w")]))
    assert lines[1] == "Nothing needs you."
    assert "h  #  no manager: stopped" in lines


def test_the_worst_numbers_and_the_remedies_are_whole_also_in_a_narrow_terminal() -> None:
    devices = [device(f"{n}", health="unhealthy", reason="XID 79: the GPU has fallen off the bus") for n in range(4)]
    devices += [device(f"h{n}", holder="w") for n in range(135)] + [device(f"f{n}") for n in range(88)]
    lines = shown(picture(cluster="production", devices=devices), width=80)
    assert lines[1] == "hosts: 1  devices: 4 unhealthy, 135 held, 88 free  waiting: 0"
    assert "Look at it, or replace it." in " ".join(line.strip() for line in lines)

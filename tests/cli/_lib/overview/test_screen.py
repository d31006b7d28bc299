"""The screen of `outfitter top`: what is on it, and that it fits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from outfitter_service.api.items import HostItem, QueueItem, ResourceSummary, Trouble
from outfitter_service.cli._lib.overview import screen
from outfitter_service.cli._lib.overview.picture import Only, Picture, views_of
from outfitter_service.query.cordons import OrderInEffect
from outfitter_service.query.device_lines import DeviceHolder, DeviceLine, LeftOut

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOSTILE = "\x1b[2J\nüñí漢字" * 40


def host(name: str = "h", *, managed: bool = True, life: Any = "unknown") -> HostItem:
    summary = ResourceSummary(state="ok", reason=None, amount=1, sharing="exclusive", total=1, healthy=1)
    return HostItem(
        host=name,
        managed=managed and life not in {"dead", "stopped"},
        life=life,
        life_at=NOW - 3 * MINUTE if life in {"dead", "stopped"} else None,
        process=None,
        unanswered=None,
        missed=life == "dead",
        since=NOW,
        manager=None,
        resources={"gpu": summary},
        workers={},
    )


def device(name: str = "GPU-0", on: str = "h", *, holder: str | None = None, **more: Any) -> DeviceLine:
    holders = []
    if holder is not None:
        holders = [
            DeviceHolder(
                worker=holder, incarnation="1", state="allocated", token=1, since=NOW - MINUTE,
                labels=more.pop("labels", {}),
            )
        ]  # fmt: skip
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


def waiter(
    name: str = "w",
    on: str = "h",
    *,
    reason: str = "waits for 1 gpu",
    ago: timedelta = 5 * MINUTE,
) -> QueueItem:
    return QueueItem(
        host=on, worker=name, incarnation="1", queue_position=1, since=NOW - ago, priority=0, amounts={"gpu": 2},
        reason=reason, reason_code="busy", wait_until=None,
    )  # fmt: skip


def picture(**more: Any) -> Picture:
    usual = {"cluster": "outfitter", "as_of": NOW, "hosts": [host()], "devices": [device()]}
    return Picture(**{**usual, "queue": [], "troubles": [], **more})


def shown(found: Picture, width: int = 80, height: int = 24, **more: Any) -> list[str]:
    return [line.plain for line in screen.lines_of(found, NOW, width, height, **more)]


def test_a_quiet_fleet_needs_nobody() -> None:
    lines = shown(picture(devices=[device("a", holder="w"), device("b")]))
    assert lines[0].endswith("hosts: 1  waiting: 0")
    assert lines[1] == "Nothing needs you."
    assert "h  #." in lines


def test_the_devices_are_counted_by_resource_and_by_model() -> None:
    devices = [
        device("a", holder="w", properties={"model": "A100"}), device("b", properties={"model": "H100"}),
        device("c", properties={"model": "H100"}, health="unhealthy"), device("n", resource="nic"),
    ]  # fmt: skip
    lines = shown(picture(devices=devices, queue=[waiter()]))
    at = lines.index("DEVICES 4")
    assert lines[at + 1 : at + 6] == [
        "gpu: 1 of 3 free, 2 healthy, 1 held, 1 unhealthy, 1 worker waits",
        "  A100: 0 of 1 free, 1 held",
        "  H100: 1 of 2 free, 1 healthy, 0 held, 1 unhealthy",
        "nic: 1 of 1 free, 0 held",
        "",
    ]


def test_the_devices_of_a_host_are_grouped_by_resource_in_the_order_of_the_machine() -> None:
    def gpu(index: int, **more: Any) -> DeviceLine:
        return device(f"GPU-{9 - index % 5}{index}", properties={"index": str(index)}, **more)

    gpus = [gpu(10), gpu(2, health="unhealthy"), gpu(0, holder="w")]
    assert "h  #!." in shown(picture(devices=gpus))
    nics = [device("n", resource="nic"), device("m", resource="nic", holder="w")]
    assert "h  gpu #!.  nic #." in shown(picture(devices=[*nics, *gpus]))
    many = [device(f"{n:03}") for n in range(200)]
    assert f"h  gpu {'.' * 60}…" in shown(picture(devices=[*many, *nics]))


@pytest.mark.parametrize(
    ("only", "devices", "queue", "hosts"),
    [
        (Only(), 4, 2, ["h", "i"]),
        (Only(resource="gpu"), 3, 2, ["h", "i"]),
        (Only(model="a1"), 1, 1, ["h"]),
        (Only(health="unhealthy"), 1, 1, ["i"]),
        (Only(labelled=(("team", "vision"),)), 1, 1, ["h"]),
        (Only(resource="nope"), 0, 0, []),
    ],
)
def test_a_picture_is_narrowed_to_what_is_asked_for(only: Only, devices: int, queue: int, hosts: list[str]) -> None:
    labels = {"team": "vision"}
    found = picture(
        hosts=[host("h"), host("i")],
        devices=[
            device("a", holder="w", labels=labels, properties={"model": "A100"}),
            device("n", resource="nic"), device("b", "i", health="unhealthy"), device("c", "i"),
        ],
        queue=[structs.replace(waiter(), labels=labels), waiter("x", "i")],
    )  # fmt: skip
    narrowed = only.of(found)
    assert (len(narrowed.devices), len(narrowed.queue)) == (devices, queue)
    assert [each.host for each in narrowed.hosts] == hosts


def trouble(*, urgent: bool = False, since: datetime | None = NOW - 5 * MINUTE, **more: Any) -> Trouble:
    words = {"title": "gpu has no driver on h", "text": "Nobody gets any gpu there.", "remedy": "Name its driver."}
    places: dict[str, Any] = dict.fromkeys(("host", "device", "worker"))
    return Trouble(**{"kind": "no-driver", **words, **places, **more}, urgent=urgent, since=since)


def test_a_trouble_is_said_as_the_api_says_it_with_what_to_do() -> None:
    lines = shown(picture(troubles=[trouble(urgent=True), trouble(since=None)]))
    assert lines[1] == "1 thing needs you now."
    assert lines[3:5] == ["! gpu has no driver on h  5m", "  Nobody gets any gpu there. Name its driver."]
    assert lines[5:7] == ["* gpu has no driver on h", "  Nobody gets any gpu there. Name its driver."]
    assert shown(picture(troubles=[trouble()]))[1] == "Nothing is urgent. 1 to look at."


def test_the_worst_hosts_come_first() -> None:
    names = ["quiet", "waits", "ill", "alone"]
    found = picture(
        hosts=[host("quiet"), host("waits"), host("ill"), host("alone", managed=False)],
        devices=[device(name, name, health="unhealthy" if name == "ill" else "healthy") for name in names],
        queue=[waiter(on="waits")],
    )
    assert [view.name for view in views_of(found)] == ["alone", "ill", "waits", "quiet"]


def test_each_state_of_a_device_has_a_sign_of_its_own() -> None:
    devices = [
        device("a"), device("b", holder="w"), device("c", health="unknown", reason="held back: h/w/i holds b"),
        device("d", health="unknown"), device("e", health="unhealthy"), device("f", cordon="o-1", holder="w"),
    ]  # fmt: skip
    assert "h  .#-?!x" in shown(picture(devices=devices))


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
        troubles=[trouble(title=HOSTILE, text=HOSTILE, remedy=HOSTILE)] * min(hosts, 60),
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


def order(id_: str = "k3v9-01", **more: Any) -> OrderInEffect:
    usual: dict[str, Any] = {"author": "ada@ops-1", "reason": "rebooted tonight", "since": NOW - 5 * MINUTE}
    return OrderInEffect(**{**usual, **dict.fromkeys(("until", "resource", "device")), **more}, id=id_)


def test_what_operators_have_taken_out_is_said_with_author_and_reason_apart_from_what_needs_a_person() -> None:
    planned = structs.replace(host("b", life="stopped"), planned=True, orders=[order()])
    one = order("a1b2-02", author="bob@ops-2", reason="XID 79", device="GPU-0", since=NOW - MINUTE)
    hosts = [structs.replace(host("a"), orders=[one]), planned, host("c")]
    devices = [device(on="a", cordon="a1b2-02"), device(on="b", cordon="k3v9-01"), device(on="c")]
    lines = shown(picture(hosts=hosts, devices=devices), width=120)
    assert lines[1] == "Nothing needs you."
    at = lines.index("CORDONED 2")
    assert lines[at + 1 : at + 4] == [
        "a: the device GPU-0 for 1m: XID 79 (bob@ops-2, order a1b2-02)",
        "b: all devices for 5m: rebooted tonight (ada@ops-1, order k3v9-01); no manager, as planned",
        "",
    ]
    assert "gpu: 1 of 3 free, 0 held, 2 cordoned" in lines
    assert "b  x  no manager: planned" in lines
    assert [view.name for view in views_of(picture(hosts=hosts, devices=devices))] == ["a", "b", "c"]


@pytest.mark.parametrize("width", [40, 80])
def test_an_order_fits_any_terminal(width: int) -> None:
    hostile = order(HOSTILE, author=HOSTILE, reason=HOSTILE, device=HOSTILE)
    lines = shown(picture(hosts=[structs.replace(host(HOSTILE), orders=[hostile] * 50)]), width=width)
    assert all(len(line) <= width and line.isprintable() for line in lines)


def test_devices_for_which_records_have_no_room_are_counted_unless_they_may_not_be_meant() -> None:
    found = picture(left_out={("h", "gpu"): LeftOut(total=298, healthy=290, cordoned=3)})
    assert "gpu: 288 of 299 free, 291 healthy, 0 held, 3 cordoned, 8 unknown" in shown(found)
    assert "DEVICES 299" in shown(Only(resource="gpu").of(found))
    for only in (Only(health="healthy"), Only(model="A100"), Only(labelled=(("a", "b"),)), Only(resource="nic")):
        assert only.of(found).left_out == {}


def test_the_worst_numbers_and_the_remedies_are_whole_also_in_a_narrow_terminal() -> None:
    devices = [device(f"{n}", health="unhealthy", reason="XID 79: the GPU has fallen off the bus") for n in range(4)]
    devices += [device(f"h{n}", holder="w") for n in range(135)] + [device(f"f{n}") for n in range(88)]
    text = "GPU-0 on gpu-0001.eu-central-1.compute.internal: XID 79: the GPU has fallen off the bus."
    ill = trouble(text=text, remedy="Look at it, or replace it.")
    lines = shown(picture(cluster="production", devices=devices, troubles=[ill]), width=80)
    assert "gpu: 88 of 227 free, 223 healthy, 135 held, 4 unhealthy" in lines
    assert "Look at it, or replace it." in " ".join(line.strip() for line in lines)


def test_no_number_is_cut_off_in_a_narrow_terminal() -> None:
    devices = [device(f"c{n}", holder="w", cordon="o-1") for n in range(12)]
    devices += [device(f"u{n}", health="unhealthy", holder="w") for n in range(1234)] + [device("f")]
    lines = shown(picture(devices=devices, queue=[waiter()]), width=80)
    at = next(at for at, line in enumerate(lines) if line.startswith("gpu: "))
    assert lines[at : at + 2] == [
        "gpu: 1 of 1247 free, 13 healthy, 1246 held (1234 of them ill),",
        "    12 cordoned (12 of them held), 1234 unhealthy, 1 worker waits",
    ]


@pytest.mark.parametrize("width", [40, 80])
def test_what_is_free_is_never_cut_off(width: int) -> None:
    devices = [
        device(f"{name}{n}", resource=name, health=health, properties={"model": model})
        for name, model in (("r" * 64, "m" * 100), ("r" * 64, "n" * 100), ("漢字" * 30, "NVIDIA H100"))
        for n, health in enumerate(["healthy", "unhealthy", "unknown"] * 40)
    ]
    lines = shown(picture(devices=devices, queue=[waiter()]), width=width, height=50)
    counted = [line for line in lines if " of " in line and " free" in line]
    assert len(counted) == 5
    assert sum("80 of 240 free" in line for line in counted) == 1
    assert sum("40 of 120 free" in line for line in counted) == 3

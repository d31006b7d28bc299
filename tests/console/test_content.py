"""What the console says of a fleet: what needs a person, who waits, the tiles, and the panel."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import UNSET, structs
from playwright.sync_api import Locator, Page, expect

from outfitter_proto.records import InventoryDevice, PoolUse, ResourceInventory
from outfitter_service.core.state.lending import HELD_BACK
from support.api import allocation, cordon
from support.console import fleets
from support.console.served import served

pytestmark = pytest.mark.console

OpenPage = Callable[..., Page]
HOSTILE = "<img src=x onerror='window.harmed=1'><script>window.harmed=1</script>\"'`{{7*7}}"


def titles(page: Page) -> list[str]:
    """The troubles, in the page's order."""
    expect(page.locator(".troubles li").first).to_be_visible()
    return [re.sub(r"\s+", " ", text) for text in page.locator(".troubles b").all_inner_texts()]


def hosts(page: Page) -> list[str]:
    """The tiles, in the page's order."""
    return [str(tile.get_attribute("data-host")) for tile in page.locator(".host").all()]


def test_it_says_first_how_many_things_need_a_person_and_then_which_the_worst_first(open_page: OpenPage) -> None:
    with served(fleets.shapes()) as fleet:
        page = open_page(fleet.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("1 thing needs you")
        assert titles(page) == [
            "silent-and-missed has no manager",
            "1 device on ill is unhealthy",
            "1 device is still in use after release",
            "The health of 1 device on ill is unknown",
            "1 worker failed in the last hour",
        ]
        assert page.locator(".urgent").count() == 1
        expect(page.locator(".troubles li").first).to_contain_text("Nobody answers before outfitter serve runs again.")
        expect(page).to_have_title("(1) Outfitter c")


def test_where_nothing_is_wrong_it_says_so(open_page: OpenPage) -> None:
    with served(fleets.calm()) as fleet:
        page = open_page(fleet.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("All is well")
        expect(page.locator(".summary")).to_have_text("3 hosts, 9 of 12 gpu free, nobody waits")
        expect(page.get_by_text("Nobody waits.")).to_be_visible()


def test_where_no_host_is_known_it_says_how_to_begin(open_page: OpenPage) -> None:
    with served([]) as fleet:
        expect(open_page(fleet.url).get_by_text("No host is known. Start a manager: outfitter serve")).to_be_visible()


@pytest.mark.parametrize(
    ("state", "title"),
    [
        ("driver-failed", "The driver of fpga fails on one"),
        ("misconfigured", "fpga is misconfigured on one"),
        ("no-driver", "fpga has no driver on one"),
    ],
)
def test_a_resource_that_cannot_be_had_is_a_trouble_with_its_reason(
    state: str, title: str, open_page: OpenPage
) -> None:
    fpga = ResourceInventory(state=state, reason="timed out after 10 s")
    with served([fleets.host("one", ["healthy"], fpga=fpga)]) as fleet:
        page = open_page(fleet.url)
        assert titles(page) == [title]
        expect(page.locator(".troubles p")).to_contain_text("Nobody gets any fpga there: timed out after 10 s.")


NOT_YET = {"reason": "the driver of gpu has not reported yet", "reason_code": "not-reported"}
BUSY = {"reason": "waits for 2 gpu: 1 of 1 free", "reason_code": "busy"}
TROUBLES: dict[str, tuple[list[Any], str, str]] = {
    "lent twice": (
        [fleets.holder("one", 0, worker="a"), fleets.holder("one", 0, worker="b")],
        "1 device is lent twice",
        "a and b have GPU-one-0 on one. Stop one of them, keep the topics, and report what outfitter verify says.",
    ),
    "no answer": (
        [fleets.waiter("one", "w", 1, 12, **NOT_YET), fleets.waiter("one", "x", 2, 1, **NOT_YET)],
        "1 worker waits for a driver's answer",
        "w on one: the driver of gpu has not reported yet. outfitter doctor on the host says what the driver lacks.",
    ),
    "beside free": (
        [fleets.waiter("one", "w", 1, 20, 2, **BUSY), fleets.waiter("one", "x", 2, 1, 2, **BUSY)],
        "1 worker waits although devices are free",
        "w on one: waits for 2 gpu: 1 of 1 free. A large request may keep them for itself: outfitter",
    ),
    "held back": (
        [fleets.host("one", ["unknown"], reason=f"{HELD_BACK}one/w/1 holds 0 of gpu")],
        "1 device on one is held back",
        "GPU-one-0 on one: held back: one/w/1 holds 0 of gpu. End that worker, or let the driver report",
    ),
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_what_the_alerts_fire_for_is_a_trouble_whether_it_was_there_before_or_has_just_come(
    kind: str, open_page: OpenPage
) -> None:
    records, title, text = TROUBLES[kind]
    with served([fleets.host("one", ["healthy"])]) as fleet:
        page = open_page(fleet.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("All is well")
        fleet.change(*records)
        assert titles(page) == [title]
        page.reload()
        assert titles(page) == [title]
        expect(page.locator(".troubles p")).to_contain_text(text)


def test_who_may_share_a_device_is_no_trouble(open_page: OpenPage) -> None:
    sharers = [fleets.holder("one", 0, worker=worker, shared=["gpu"]) for worker in ("a", "b", "c")]
    with served([fleets.host("one", ["healthy"]), *sharers[:2]]) as fleet:
        page = open_page(fleet.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("All is well")
        fleet.change(sharers[2])
        page.locator("[data-host=one]").click()
        expect(page.get_by_role("complementary")).to_contain_text("c")
        expect(page.get_by_role("heading", level=1)).to_have_text("All is well")


def test_a_device_is_held_while_somebody_has_a_part_of_it_or_what_it_is_a_part_of(open_page: OpenPage) -> None:
    devices = [InventoryDevice(id=f"MIG-{n}", properties={"index": str(n)}) for n in range(2)]
    parts = ResourceInventory(state="reported", amount=1, devices=devices, parts={"GPU-one-0": ["MIG-0", "MIG-1"]})
    whole = fleets.holder("one", 0, worker="whole")
    part = structs.replace(
        allocation("one", "part", devices=["MIG-0"]), uses={"GPU-one-0": PoolUse(1, 720_720, "parts")}
    )
    part = structs.replace(part, resources={"mig": part.resources["gpu"]})
    with served([fleets.host("one", ["healthy", "healthy"], mig=parts), part]) as fleet:
        page = open_page(f"{fleet.url}#device/one/GPU-one-0")
        panel = page.get_by_role("complementary")
        expect(panel).to_contain_text("nobody, but somebody holds a part of it")
        fleet.change(structs.replace(part, state="ended", resources={}, uses=UNSET), whole)
        expect(panel).to_contain_text("whole")
        page.goto(f"{fleet.url}#device/one/MIG-1")
        expect(panel).to_contain_text("Part of")
        expect(panel).to_contain_text("GPU-one-0")
        expect(panel).to_contain_text("nobody, but somebody holds a part of it, or what it is a part of")


def test_a_part_of_what_is_no_device_itself_names_it_without_a_link(open_page: OpenPage) -> None:
    devices = [InventoryDevice(id="MIG-0", properties={"index": "0:0"})]
    parts = ResourceInventory(state="reported", amount=1, devices=devices, parts={"pci:0000:19:00.0": ["MIG-0"]})
    with served([fleets.host("one", [], mig=parts)]) as fleet:
        panel = open_page(f"{fleet.url}#device/one/MIG-0").get_by_role("complementary")
        expect(panel).to_contain_text("pci:0000:19:00.0")
        expect(panel.get_by_role("link", name="pci:0000:19:00.0")).to_have_count(0)


def test_a_stranger_on_a_device_comes_and_goes_as_it_happens(open_page: OpenPage) -> None:
    used_by = "process 4711 (python) of ada"
    with served([fleets.host("one", ["healthy"])]) as fleet:
        page = open_page(f"{fleet.url}#device/one/GPU-one-0")
        panel = page.get_by_role("complementary")
        expect(panel).to_contain_text("free")
        fleet.change(fleets.host("one", ["healthy"], used_by=used_by))
        expect(panel).to_contain_text(f"{used_by}, which Outfitter did not lend to")
        expect(page.get_by_role("button", name="stranger 1")).to_be_visible()
        fleet.change(fleets.host("one", ["healthy"]))
        expect(panel).not_to_contain_text(used_by)
        expect(page.get_by_role("button", name="stranger 0")).to_be_visible()


def test_who_waits_for_one_reason_shares_a_row_and_the_longest_wait_comes_first(open_page: OpenPage) -> None:
    busy = {"reason": "busy: 1 gpu wanted, 0 of 1 free", "reason_code": "busy"}
    waiters = [fleets.waiter("one", f"w{number}", number, 10 - number, **busy) for number in range(1, 6)]
    more = fleets.waiter("one", "big", 9, 20, 4, reason="infeasible: 4 gpu wanted", reason_code="infeasible")
    with served([fleets.host("one", ["healthy"]), *waiters, more]) as fleet:
        page = open_page(fleet.url)
        rows = page.locator(".waiting tbody tr")
        expect(rows).to_have_text(
            [
                re.compile(r"^\s*big on one\s*gpu.4\s*20 min\s*infeasible: 4 gpu wanted\s*$"),
                re.compile(
                    r"^\s*w1 on one, w2 on one, w3 on one and 2 more\s*gpu.1\s*9 min\s*busy: 1 gpu wanted, 0 of 1 free"
                ),
            ]
        )
        assert titles(page) == ["1 worker wants more than the host has"]


def test_who_waits_has_its_labels_in_the_list_and_is_found_by_them(open_page: OpenPage) -> None:
    waiter = fleets.waiter("one", "w", 1, 10, reason="busy", reason_code="busy")
    labels = {"team": "vision", "job": "<b>train</b>"}
    waiter = structs.replace(waiter, request=structs.replace(waiter.request, labels=labels))
    with served([fleets.host("one", ["healthy"]), fleets.host("two", ["healthy"]), waiter]) as fleet:
        page = open_page(fleet.url)
        row = re.compile(r"^\s*w on one job=<b>train</b>, team=vision\s*gpu.1\s*10 min\s*busy\s*$")
        expect(page.locator(".waiting tbody tr")).to_have_text([row])
        page.get_by_label("Find by host, device, model, worker or label").fill("team=vision")
        expect(page.locator(".host")).to_have_count(1)


def test_a_tile_is_a_host_with_a_cell_a_device_and_trouble_comes_first(open_page: OpenPage) -> None:
    with served(fleets.shapes()) as fleet:
        page = open_page(fleet.url)
        expect(page.locator(".host")).to_have_count(9)
        assert hosts(page)[:3] == ["silent-and-missed", "silent", "ill"]
        tile = page.locator("[data-host=ill]")
        expect(tile).to_have_attribute("aria-label", "ill: 1 unhealthy, 1 unknown, 1 held, 1 free")
        kinds = [str(cell.get_attribute("class")) for cell in tile.locator(".cell").all()]
        assert [kind.split()[1] for kind in kinds] == ["unhealthy", "unknown", "held", "free"]
        expect(page.locator("[data-host=many] .cells")).to_have_attribute("data-more", "+136")
        expect(page.locator("[data-host='silent']")).to_have_attribute(
            "aria-label", "silent: no manager (stopped), 4 unknown"
        )
        page.locator("#sort").select_option("name")
        expect(page.locator(".host").first).to_have_attribute("data-host", "all-free")
        assert hosts(page) == sorted(hosts(page))


def test_the_legend_counts_cells_and_selects_hosts(open_page: OpenPage) -> None:
    with served(fleets.shapes()) as fleet:
        page = open_page(fleet.url)
        button = page.get_by_role("button", name="unhealthy 1")
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        assert hosts(page) == ["ill"]
        expect(page.locator("#fleet").get_by_role("status")).to_have_text("1 of 9 hosts")
        button.click()
        expect(page.locator(".host")).to_have_count(9)


@pytest.mark.parametrize(
    ("text", "found"),
    [("ALL-F", "all-free"), ("GPU-all-held-3", "all-held"), ("tm-many-7 ", "many"), ("patient", "all-held")],
)
def test_the_search_finds_hosts_devices_and_workers(text: str, found: str, open_page: OpenPage) -> None:
    with served(fleets.shapes()) as fleet:
        page = open_page(fleet.url)
        page.locator("#find").fill(text)
        expect(page.locator(".host")).to_have_count(1)
        assert hosts(page) == [found]


def test_a_worker_that_has_ended_can_be_looked_up(open_page: OpenPage) -> None:
    with served([*fleets.calm(), fleets.ended("gpu-1", "gone")]) as fleet:
        page = open_page(fleet.url)
        page.locator("#find").fill("gone")
        page.get_by_role("link", name="Look up the worker gone").click()
        panel = page.get_by_role("complementary")
        expect(panel).to_contain_text(re.compile(r"Host\s*gpu-1\s*Run\s*run-1\s*State\s*ended"))
        page.locator("#find").fill("nobody")
        expect(page.get_by_role("link", name="Look up the worker nobody")).to_be_visible()
        page.locator("#find").press("Enter")
        expect(panel).to_contain_text("No worker nobody is known")


def test_a_hosts_panel_has_devices_owners_reasons_and_what_happened(open_page: OpenPage) -> None:
    with served(fleets.shapes()) as fleet:
        page = open_page(fleet.url)
        page.locator("[data-host=ill]").click()
        panel = page.get_by_role("complementary")
        title = panel.get_by_role("heading", level=2)
        expect(title).to_have_text("host ill")
        expect(panel).to_contain_text("ECC errors: 12 uncorrectable")
        expect(panel).to_contain_text("process 4711 (python train.py) still uses it")
        expect(panel).to_contain_text("Nothing that the API remembers.")
        held = fleets.holder("ill", 3, worker="late")
        fleet.change(held)
        fleet.add_steps(fleets.step(held, "register", "granted at once"))
        expect(panel.locator(".steps li")).to_have_text(re.compile(r"late allocated register: granted at once$"))
        panel.get_by_role("link", name="late").first.click()
        expect(title).to_have_text("worker late")
        expect(panel).to_contain_text(re.compile(r"State\s*allocated for 40 min"))
        panel.get_by_role("link", name="GPU-ill-3").click()
        expect(panel).to_contain_text(re.compile(r"Held by\s*late\s*index\s*3\s*name\s*NVIDIA H100 80GB HBM3"))
        page.go_back()
        page.go_back()
        expect(title).to_have_text("host ill")


def test_a_waiters_panel_says_who_is_before_it(open_page: OpenPage) -> None:
    first = fleets.waiter("one", "a", 1, 9, reason="busy: none is free")
    second = fleets.waiter("one", "b", 2, 9, reason="busy: none is free")
    with served([fleets.host("one", ["healthy"]), fleets.holder("one", 0, worker="has-it"), first, second]) as fleet:
        panel = open_page(f"{fleet.url}#worker/one/b").get_by_role("complementary")
        expect(panel).to_contain_text(re.compile(r"Place\s*2 in the queue"))
        expect(panel).to_contain_text(re.compile(r"Before it\s*a \(gpu.1\)"))
        expect(panel).to_contain_text("busy: none is free")


def hostile_records() -> list[Any]:
    """Records whose every text is markup."""
    fpga = ResourceInventory(state="driver-failed", reason=HOSTILE)
    ill = fleets.host("one", ["unhealthy"], reason=HOSTILE, fpga=fpga)
    waiting = fleets.waiter("one", "waits", 1, 2, reason=HOSTILE, reason_code="infeasible")
    holds = structs.replace(fleets.holder("one", 0, worker="<b>w<img src=x onerror=harmed=1>"), delayed_by=HOSTILE)
    failed = structs.replace(fleets.ended("one", "fails"), state="failed", reason=HOSTILE, since=datetime.now(UTC))
    return [ill, waiting, holds, failed, cordon("one", author=HOSTILE, reason=HOSTILE)]


@pytest.mark.parametrize(
    "address",
    ["", "#host/one", "#device/one/GPU-one-0", "#worker/one/waits", "#worker//%3Cimg%20src%3Dx%3E", "#host/%"],
)
def test_markup_in_names_and_reasons_is_shown_as_text_and_does_nothing(address: str, open_page: OpenPage) -> None:
    with served(hostile_records()) as fleet:
        waiting = hostile_records()[1]
        fleet.add_steps(fleets.step(waiting, HOSTILE, HOSTILE))
        page = open_page(fleet.url + address)
        expect(page.locator(".troubles")).to_contain_text("<img src=x onerror='window.harmed=1'>")
        fleet.change(structs.replace(waiting, reason=f"again {HOSTILE}"))
        expect(page.locator("main")).to_contain_text("again <img")
        assert page.locator("img, b b, body script").count() == 0
        assert page.evaluate("window.harmed") is None


TURNED = "abc\u202edcba\u2066 `rm -rf /`\u200b"


def test_text_of_strangers_turns_no_other_text_and_is_never_set_as_our_own_code(open_page: OpenPage) -> None:
    waiter = fleets.waiter("one", "w", 1, 20, reason=TURNED, reason_code="infeasible")
    with served([fleets.host("one", ["unhealthy"], reason=TURNED), waiter]) as fleet:
        fleet.add_letters(fleets.letter("one", TURNED))
        page = open_page(f"{fleet.url}#host/one")
        expect(page.locator(".troubles li")).to_have_count(3)
        fleet.change(fleets.waiter("one", "v", 2, 20, reason=TURNED, reason_code="busy"))
        expect(page.locator(".waiting tbody tr")).to_have_count(2)
        shown = page.locator("body").inner_text()
        assert not set("\u202e\u2066\u200b") & set(shown)
        assert "abc\\u202edcba\\u2066 `rm -rf /`\\u200b" in shown
        assert set(page.locator("code").all_inner_texts()) <= {"outfitter dead-letters"}


def test_devices_are_in_the_order_of_their_indexes_with_what_tells_them_apart(open_page: OpenPage) -> None:
    host = fleets.host("one", ["healthy"] * 12)
    devices = [
        structs.replace(
            device,
            id=f"GPU-{n * 37 % 97:02}-{n}",
            properties={**device.properties, "memory.total_bytes": str(81559 * 2**20)},
        )
        for n, device in enumerate(host.resources["gpu"].devices)
    ]
    host = structs.replace(host, resources={"gpu": structs.replace(host.resources["gpu"], devices=devices[::-1])})
    with served([host]) as fleet:
        page = open_page(f"{fleet.url}#host/one")
        rows = page.locator(".devices tbody tr")
        expect(rows).to_have_count(12)
        assert [
            re.search(r"gpu (\d+) · NVIDIA H100 80GB HBM3 · 79\.6 GiB", text)[1] for text in rows.all_inner_texts()
        ] == [str(n) for n in range(12)]


def test_labels_are_shown_and_found(open_page: OpenPage) -> None:
    def labelled(record: Any, **labels: str) -> Any:
        return structs.replace(record, request=structs.replace(record.request, labels=labels))

    records = [
        fleets.host("one", ["healthy"]), fleets.host("two", ["healthy"]), fleets.host("three", ["healthy"]),
        labelled(fleets.holder("one", 0, worker="h"), team="vision"),
    ]  # fmt: skip
    with served(records) as fleet:
        page = open_page(f"{fleet.url}#worker/one/h")
        expect(page.get_by_role("complementary")).to_contain_text("team=vision")
        fleet.change(labelled(fleets.waiter("two", "w", 1, 1, reason="busy"), team="vision", job="train"))
        page.locator("#find").fill("team=vision")
        expect(page.locator(".host")).to_have_count(2)
        page.locator("#find").fill("job=train")
        expect(page.locator(".host")).to_have_count(1)
        expect(page.locator(".waiting tbody tr")).to_contain_text("on two")


def taken_out(*, stopped: bool = True) -> list[Any]:
    """Host `one` has a device that is cordoned and held; host `two` is taken out as a whole, and has a waiter."""
    return [
        fleets.host("one", ["healthy"] * 3),
        fleets.holder("one", 0, worker="holds"),
        cordon("one", "a1b2-02", author="bob@ops-2", reason="XID 79", device="GPU-one-0", since=datetime.now(UTC)),
        fleets.host("two", ["healthy", "unhealthy"], stopped=datetime.now(UTC) if stopped else None),
        cordon("two"),
        fleets.waiter("two", "w", 1, 20, reason="waits for 1 gpu: 2 cordoned", reason_code="cordoned"),
    ]


WHY = "rebooted tonight (ada@ops-1, order k3v9-01)"


def test_what_operators_have_taken_out_is_shown_with_author_and_reason_and_needs_nobody(open_page: OpenPage) -> None:
    with served(taken_out()) as fleet:
        page = open_page(fleet.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("All is well")
        orders = page.get_by_role("region", name="Cordoned by operators").locator("li")
        expect(orders).to_have_text(
            [
                re.compile(rf"^\s*two: all devices for \d+ d: {re.escape(WHY)}; no manager, as planned$"),
                re.compile(r"^\s*one: the device GPU-one-0 for \d+ s: XID 79 \(bob@ops-2, order a1b2-02\)$"),
            ]
        )
        one, two = page.locator("[data-host=one]"), page.locator("[data-host=two]")
        expect(one).to_have_attribute("aria-label", "one: 1 cordoned, 2 free")
        expect(two).to_have_attribute("aria-label", f"two: no manager, as planned: {WHY}, 2 cordoned, 1 waiting")
        expect(two).to_have_class(re.compile(r"\bplanned\b"))
        assert two.locator(".name").evaluate("each => getComputedStyle(each, '::after').content") == '" planned"'
        expect(one.locator(".cordoned")).to_have_attribute("title", "XID 79 (bob@ops-2, order a1b2-02)")
        expect(page.locator("[data-resource=gpu]")).to_contain_text("gpu: 2 of 5 free, 1 waits, 3 cordoned")
        page.get_by_role("button", name="cordoned 3").click()
        assert hosts(page) == ["one", "two"]
        page.get_by_role("button", name="free 2").click()
        expect(page.locator(".host")).to_have_count(1)


def test_a_panel_has_the_orders_in_effect(open_page: OpenPage) -> None:
    with served(taken_out()) as fleet:
        page = open_page(f"{fleet.url}#host/one")
        panel = page.get_by_role("complementary")
        expect(panel.get_by_role("heading", name="Orders in effect")).to_be_visible()
        expect(panel.locator("table").nth(1).locator("tbody tr")).to_have_text(
            [re.compile(r"^\s*the device GPU-one-0\s*XID 79 \(bob@ops-2, order a1b2-02\)\s*\d+ s\s*$")]
        )
        expect(panel.locator(".devices tbody tr").first).to_contain_text("holds")
        expect(panel.locator(".devices tbody tr").first).to_contain_text("cordoned: XID 79 (bob@ops-2, order a1b2-02)")
        panel.get_by_role("link", name="GPU-one-0").click()
        expect(panel).to_contain_text(re.compile(r"State\s*cordoned\s*Cordoned\s*XID 79 \(bob@ops-2, order a1b2-02\)"))
        page.goto(f"{fleet.url}#host/two")
        expect(panel).to_contain_text(re.compile(rf"No manager, as planned, for \d+ s:\s*{re.escape(WHY)}\."))


def test_an_order_is_seen_as_it_comes_into_effect_and_as_it_ends(open_page: OpenPage) -> None:
    with served([fleets.host("one", ["healthy"] * 2), fleets.host("two", ["unhealthy"], reason="XID 79")]) as fleet:
        page = open_page(fleet.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("Nothing urgent")
        expect(page.get_by_role("region", name="Cordoned by operators")).to_have_count(0)
        on_device, on_host = cordon("one", device="GPU-one-1"), cordon("two", "o-2", resource="gpu")
        fleet.change(on_device, on_host)
        expect(page.locator("[data-host=one]")).to_have_attribute("aria-label", "one: 1 cordoned, 1 free")
        expect(page.locator("[data-host=two]")).to_have_attribute("aria-label", "two: 1 cordoned")
        expect(page.get_by_role("heading", level=1)).to_have_text("All is well")
        expect(page.locator(".orders li")).to_have_count(2)
        for order in (on_device, on_host):
            fleet.delete(order.key)
        expect(page.locator("[data-host=one]")).to_have_attribute("aria-label", "one: 2 free")
        expect(page.locator(".orders")).to_have_count(0)
        expect(page.get_by_role("heading", level=1)).to_have_text("Nothing urgent")


def test_a_device_that_another_resource_shows_is_cordoned_there_as_the_hosts_record_says(open_page: OpenPage) -> None:
    mig = ResourceInventory(state="reported", devices=[InventoryDevice(id="MIG-0", cordon="k3v9-01")])
    host = fleets.host("one", ["healthy"], mig=mig)
    with served([fleets.host("one", ["healthy"]), cordon("one", resource="gpu")]) as fleet:
        page = open_page(fleet.url)
        fleet.change(host)
        told = "one: gpu 1 cordoned, mig 1 cordoned"
        expect(page.locator("[data-host=one]")).to_have_attribute("aria-label", told)
        expect(page.locator("[data-host=one] .cordoned").last).to_have_attribute("title", WHY)
        page.reload()
        expect(page.locator("[data-host=one]")).to_have_attribute("aria-label", told)


def test_a_held_device_that_is_not_reported_is_cordoned_until_its_order_ends(open_page: OpenPage) -> None:
    order = cordon("one", device="GPU-one-7")
    with served([fleets.host("one", ["healthy"]), fleets.holder("one", 7, worker="w"), order]) as fleet:
        page = open_page(fleet.url)
        tile = page.locator("[data-host=one]")
        expect(tile).to_have_attribute("aria-label", "one: 1 cordoned, 1 free")
        fleet.delete(order.key)
        expect(tile).to_have_attribute("aria-label", "one: 1 unknown, 1 free")
        fleet.change(order)
        expect(tile).to_have_attribute("aria-label", "one: 1 cordoned, 1 free")


def test_devices_for_which_a_hosts_record_has_no_room_are_counted(open_page: OpenPage) -> None:
    def long(name: str) -> Any:
        host = fleets.host(name, ["healthy", "unhealthy"])
        gpus = structs.replace(host.resources["gpu"], total=300, healthy=290, cordoned=3)
        return structs.replace(host, resources={"gpu": gpus})

    held = fleets.holder("one", 77, worker="w")
    with served([long("one"), held]) as fleet:
        page = open_page(fleet.url)
        told = "one: 1 unhealthy, 9 unknown, 3 cordoned, 1 held, 286 free"
        expect(page.locator("[data-host=one]")).to_have_attribute("aria-label", told)
        expect(page.locator("[data-resource=gpu]")).to_contain_text("gpu: 286 of 300 free, 3 cordoned")
        fleet.change(long("one"))
        fleet.change(long("two"))
        expect(page.locator("[data-resource=gpu]")).to_contain_text("gpu: 573 of 600 free, 6 cordoned")
        expect(page.locator("[data-host=one]")).to_have_attribute("aria-label", told)


def test_the_buttons_of_the_filter_stay_where_they_are(open_page: OpenPage) -> None:
    with served(fleets.shapes()) as fleet:
        page = open_page(fleet.url)
        button = page.locator("button[data-only=unhealthy]")
        before = place_in_fleet(page, button)
        button.click()
        expect(page.locator(".host")).to_have_count(1)
        assert place_in_fleet(page, button) == before


def place_in_fleet(page: Page, button: Locator) -> tuple[float, float]:
    """How far from the section's corner, both at one moment: what stands above them comes and goes by itself."""
    fleet = page.locator("#fleet").element_handle()
    x, y = button.evaluate(
        """(button, fleet) => {
            const [one, other] = [button, fleet].map(node => node.getBoundingClientRect());
            return [one.x - other.x, one.y - other.y];
        }""",
        fleet,
    )
    return x, y


def test_one_model_is_shown_alone(open_page: OpenPage) -> None:
    mixed = fleets.host("mixed", [], gpu=gpus("mixed", "A100", "V100", "V100"))
    with served([*with_nics(), mixed]) as fleet:
        page = open_page(fleet.url)
        names = page.locator(".host .name")
        resource, model = page.locator("[data-resource=gpu]").first, page.locator("[data-model=V100]")
        before = place_in_fleet(page, model)
        model.click()
        expect(names).to_have_text(["mixed"])
        expect(model).to_have_attribute("aria-pressed", "true")
        expect(resource).to_have_attribute("aria-pressed", "false")
        assert place_in_fleet(page, model) == before
        expect(page.locator("[data-host=mixed] .cell")).to_have_count(2)
        expect(page.locator("button[data-only=free]")).to_contain_text("free 2")
        page.locator("[data-model=A100]").click()
        expect(names).to_have_text(["full", "mixed"])
        page.locator("[data-model=A100]").click()
        expect(names).to_have_text(["full", "ill", "mixed"])
        model.click()
        expect(names).to_have_text(["mixed"])
        fleet.change(fleets.host("mixed", [], gpu=gpus("mixed", "A100")))  # the last V100 goes
        expect(names).to_have_text(["full", "ill", "mixed"])


def devices(*properties: dict[str, str]) -> ResourceInventory:
    listed = [InventoryDevice(id=each["id"], properties=each) for each in properties]
    return ResourceInventory(state="reported", amount=1, devices=listed, healthy=len(listed))


def gpus(host: str, *models: str) -> ResourceInventory:
    """Listed in another order than the machine's."""
    found = [{"id": f"GPU-{host}-{n}", "index": f"{n}", "model": model} for n, model in enumerate(models)]
    return devices(*found[::-1])


def nics(host: str) -> ResourceInventory:
    addresses = {f"{host}-z": "0000:3b:00.0", f"{host}-a": "0000:81:00.0"}
    return devices(*({"id": name, "pci.bus_id": address} for name, address in addresses.items()))


def with_nics() -> list[Any]:
    """Two hosts with GPUs and network cards: all GPUs of `full` are held, one of `ill` is free."""
    return [
        fleets.host("full", [], gpu=gpus("full", "A100", "A100"), nic=nics("full")),
        *(fleets.holder("full", number) for number in range(2)),
        fleets.host("ill", [], gpu=gpus("ill", "H100", "H100"), nic=nics("ill")),
        fleets.holder("ill", 1),
        fleets.waiter("full", "w", 1, 1, reason="busy", reason_code="busy"),
    ]


def test_devices_are_counted_by_resource_and_by_model(open_page: OpenPage) -> None:
    with served(with_nics()) as fleet:
        page = open_page(fleet.url)
        buttons = page.locator("#fleet [data-resource]")
        expect(buttons).to_have_text(
            [
                "gpu: 1 of 4 free, 1 waits",
                "A100: 0 of 2 free",
                "H100: 1 of 2 free",
                "nic: 4 of 4 free",
            ]
        )
        expect(page.locator(".summary")).to_have_text("2 hosts, 1 of 4 gpu free, 4 of 4 nic free, 1 worker waits")
        fleet.change(fleets.holder("ill", 0))
        expect(buttons.first).to_contain_text("gpu: 0 of 4 free")
        page.locator("#find").fill("h100")
        expect(page.locator(".host")).to_have_count(1)


def test_a_tile_has_its_cells_by_resource_in_the_order_of_the_machine(open_page: OpenPage) -> None:
    with served(with_nics()) as fleet:
        page = open_page(fleet.url)
        tile = page.locator("[data-host=ill]")
        expect(tile).to_have_attribute("aria-label", "ill: gpu 1 held, 1 free, nic 2 free")
        groups = tile.locator(".cells")
        expect(groups).to_have_text(["gpu", "nic"])
        kinds = [str(cell.get_attribute("class")).split()[1] for cell in groups.first.locator(".cell").all()]
        assert kinds == ["free", "held"]
        page.goto(f"{fleet.url}#host/ill")
        rows = page.locator(".devices tbody tr")
        expect(rows.last).to_contain_text("ill-a")
        assert re.findall(r"GPU-ill-\d|ill-[az]", " ".join(rows.all_inner_texts())) == [
            "GPU-ill-0", "GPU-ill-1", "ill-z", "ill-a",
        ]  # fmt: skip
        expect(rows.first).to_contain_text("gpu 0 · H100")


def test_one_resource_is_shown_alone_and_no_button_moves(open_page: OpenPage) -> None:
    with served(with_nics()) as fleet:
        page = open_page(fleet.url)
        button, free = page.locator("[data-resource=gpu]").first, page.locator("button[data-only=free]")
        before = place_in_fleet(page, button)
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        expect(page.locator("[data-host=full] .cell")).to_have_count(2)
        expect(page.locator("[data-host=full] .free")).to_have_count(0)
        expect(free).to_contain_text("free 1")
        assert place_in_fleet(page, button) == before
        free.click()
        expect(page.locator(".host")).to_have_count(1)
        assert hosts(page) == ["ill"]
        button.click()
        expect(page.locator(".host")).to_have_count(2)

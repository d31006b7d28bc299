"""The picture follows what happens, and says how old it is when it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs
from playwright.sync_api import Page, expect

from outfitter_proto.records import Host
from outfitter_service.api.access import Guard
from support.api import follower_of
from support.console import fleets
from support.console.served import ServedFleet, served

pytestmark = pytest.mark.console

OpenPage = Callable[..., Page]
TOKEN = "a-token-of-this-test"
LOST = re.compile(r"Not live: the picture is \d+ s old")


def label_of(page: Page, host: str) -> Any:
    return page.locator(f"[data-host='{host}']")


def expect_live(page: Page) -> None:
    expect(page.locator(".live")).to_have_text("live")


def expect_lost(page: Page) -> None:
    expect(page.locator(".live")).to_have_text(LOST)


def test_each_change_is_shown_as_it_happens(open_page: OpenPage) -> None:
    with served([fleets.host("one", ["healthy"] * 2)]) as fleet:
        page = open_page(fleet.url)
        tile = label_of(page, "one")
        expect(tile).to_have_attribute("aria-label", "one: 2 free")
        fleet.change(fleets.holder("one", 0, worker="w"), fleets.waiter("one", "late", 1, 5, reason="busy"))
        expect(tile).to_have_attribute("aria-label", "one: 1 held, 1 free, 1 waiting")
        expect(page.locator(".waiting tbody tr")).to_have_count(1)
        fleet.change(structs.replace(fleets.ended("one", "w"), state="ended"), fleets.holder("one", 0, worker="late"))
        expect(tile).to_have_attribute("aria-label", "one: 1 held, 1 free")
        expect(page.get_by_text("Nobody waits.")).to_be_visible()
        fleet.delete("one/late/run-1")
        expect(tile).to_have_attribute("aria-label", "one: 2 free")
        fleet.change(fleets.host("two", ["healthy"]))
        expect(label_of(page, "two")).to_be_visible()
        fleet.delete("@host/two")
        expect(label_of(page, "two")).to_have_count(0)


def test_a_device_that_falls_ill_and_a_manager_that_stops_come_first_until_they_are_well(open_page: OpenPage) -> None:
    with served(fleets.calm()) as fleet:
        page = open_page(fleet.url)
        sentence = page.get_by_role("heading", level=1)
        expect(sentence).to_have_text("All is well")
        fleet.change(fleets.host("gpu-2", ["healthy", "unhealthy", "healthy", "healthy"], reason="Xid 79"))
        expect(sentence).to_have_text("Nothing urgent")
        expect(page.locator(".host").first).to_have_attribute("data-host", "gpu-2")
        expect(page.locator(".host").first).to_have_attribute("aria-label", "gpu-2: 1 unhealthy, 1 held, 2 free")
        fleet.change(fleets.host("gpu-1", ["healthy"] * 4, stopped=fleets.NOW))
        expect(sentence).to_have_text("Nothing urgent")
        label = page.locator("[data-host=gpu-1]")
        expect(label).to_have_attribute("aria-label", "gpu-1: no manager (stopped), 3 unknown, 1 held")
        fleet.change(fleets.waiter("gpu-1", "w", 1, 3, reason="busy", reason_code="busy"))
        expect(sentence).to_have_text("1 thing needs you")
        expect(page.locator(".host").first).to_have_attribute("data-host", "gpu-1")
        fleet.delete("gpu-1/w/1")
        fleet.change(fleets.host("gpu-1", ["healthy"] * 4), fleets.host("gpu-2", ["healthy"] * 4))
        expect(sentence).to_have_text("All is well")


def test_a_held_device_that_is_not_reported_any_more_stays_until_it_is_given_back(open_page: OpenPage) -> None:
    with served([fleets.host("one", ["healthy"] * 2), fleets.holder("one", 1, worker="w")]) as fleet:
        page = open_page(f"{fleet.url}#host/one")
        tile, panel = label_of(page, "one"), page.get_by_role("complementary")
        fleet.change(fleets.host("one", ["healthy"]))
        expect(tile).to_have_attribute("aria-label", "one: 1 unknown, 1 free")
        expect(panel).to_contain_text("its driver does not report it")
        fleet.change(fleets.ended("one", "w"))
        expect(tile).to_have_attribute("aria-label", "one: 1 free")


def long_host(listed: list[str], total: int) -> Host:
    """A host whose record has room for some devices of `total`."""
    host = fleets.host("one", listed)
    inventory: Any = structs.replace(host.resources["gpu"], total=total, healthy=total)
    return structs.replace(host, resources={"gpu": inventory})


def test_a_held_device_for_which_the_hosts_record_has_no_room_is_as_well_as_its_holders_record_says(
    open_page: OpenPage,
) -> None:
    ill = {"id": "GPU-one-2", "health": "unhealthy", "health.reason": "Xid 79"}
    with served([long_host(["healthy"], 4), fleets.holder("one", 1, worker="a")]) as fleet:
        page = open_page(fleet.url)
        tile = label_of(page, "one")
        expect(tile).to_have_attribute("aria-label", "one: 1 held, 3 free")
        fleet.change(second := fleets.holder("one", 2, worker="b"))
        expect(tile).to_have_attribute("aria-label", "one: 2 held, 2 free")
        fleet.change(structs.replace(second, resources={"gpu": [ill]}))
        expect(tile).to_have_attribute("aria-label", "one: 1 unhealthy, 1 held, 2 free")
        expect(page.locator(".troubles")).to_contain_text("Xid 79")
        fleet.change(long_host(["healthy", "healthy"], 4), fleets.ended("one", "b"))
        expect(tile).to_have_attribute("aria-label", "one: 1 held, 3 free")


def test_a_worker_that_failed_is_no_trouble_any_more_once_it_runs_again(open_page: OpenPage) -> None:
    with served([fleets.host("one", ["healthy"])]) as fleet:
        page = open_page(fleet.url)
        failed = structs.replace(fleets.ended("one", "w"), state="failed", reason="too-large")
        fleet.change(failed, structs.replace(failed, worker="w-2"))
        expect(page.locator(".troubles b")).to_have_text("2 workers failed in the last hour")
        fleet.change(fleets.holder("one", 0, worker="w", incarnation="run-2"))
        expect(page.locator(".troubles b")).to_have_text("1 worker failed in the last hour")
        page.reload()
        expect(page.locator(".troubles b")).to_have_text("1 worker failed in the last hour")


def two_names(*aliases: str) -> Host:
    """A host whose driver reports one GPU with these other names, and another resource that shows it as `0`."""
    host = fleets.host("one", ["healthy"])
    (gpu,) = host.resources["gpu"].devices
    names = [[gpu.id, *aliases]]
    gpus: Any = structs.replace(host.resources["gpu"], names=names)
    cuda: Any = structs.replace(gpus, devices=[structs.replace(gpu, id="0")])
    return structs.replace(host, resources={"gpu": gpus, "cuda": cuda} if "0" in aliases else {"gpu": gpus})


def test_a_device_with_several_names_is_held_under_all_of_them(open_page: OpenPage) -> None:
    with served([two_names("0")]) as fleet:
        page = open_page(fleet.url)
        tile = label_of(page, "one")
        expect(tile).to_have_attribute("aria-label", "one: cuda 1 free, gpu 1 free")
        holder = structs.replace(fleets.holder("one", 0, worker="w"), resources={"cuda": [{"id": "0"}]})
        fleet.change(holder)
        expect(tile).to_have_attribute("aria-label", "one: cuda 1 held, gpu 1 held")
        page.reload()
        expect(tile).to_have_attribute("aria-label", "one: cuda 1 held, gpu 1 held")
        fleet.change(fleets.ended("one", "w"))
        expect(tile).to_have_attribute("aria-label", "one: cuda 1 free, gpu 1 free")


def test_a_device_that_its_driver_renames_stays_one_and_held(open_page: OpenPage) -> None:
    holder = structs.replace(fleets.holder("one", 0, worker="w"), resources={"gpu": [{"id": "GPU-old"}]})
    with served([fleets.host("one", []), holder]) as fleet:
        page = open_page(f"{fleet.url}#device/one/GPU-old")
        tile, panel = label_of(page, "one"), page.get_by_role("complementary")
        expect(tile).to_have_attribute("aria-label", "one: 1 unknown")
        fleet.change(two_names("GPU-old"))
        expect(tile).to_have_attribute("aria-label", "one: 1 held")
        expect(panel).to_contain_text("Held byw")
        page.reload()
        expect(tile).to_have_attribute("aria-label", "one: 1 held")
        panel.get_by_role("button", name="Close").click()
        fleet.change(structs.replace(holder, state="releasing"), fleets.waiter("one", "v", 1, 1))
        expect(tile).to_have_attribute("aria-label", "one: 1 held, 1 waiting")
        fleet.change(fleets.ended("one", "w"))
        expect(tile).to_have_attribute("aria-label", "one: 1 free, 1 waiting")


def test_a_device_with_more_holders_than_are_named_says_how_many_and_the_number_follows(open_page: OpenPage) -> None:
    sharers = [structs.replace(fleets.holder("one", 0, worker=f"w{number:02}"), shared=["gpu"]) for number in range(25)]
    host = fleets.host("one", ["healthy"])
    host = structs.replace(host, resources={"gpu": structs.replace(host.resources["gpu"], sharing="shared")})
    with served([host, *sharers]) as fleet:
        page = open_page(f"{fleet.url}#device/one/GPU-one-0")
        panel = page.get_by_role("complementary")
        expect(panel).to_contain_text("w19 and 5 more")
        expect(label_of(page, "one")).to_have_attribute("aria-label", "one: 1 free")
        fleet.change(fleets.ended("one", "w24"), fleets.ended("one", "w23"))
        expect(panel).to_contain_text("w19 and 3 more")


def test_messages_that_are_refused_are_counted_with_the_last_reason(open_page: OpenPage) -> None:
    with served([fleets.host("one", ["healthy"])]) as fleet:
        fleet.add_letters(fleets.letter("one", "field `host` is missing"))
        page = open_page(fleet.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("Nothing urgent")
        fleet.add_letters(fleets.letter("one", "field `worker` is missing"))
        expect(page.locator(".troubles")).to_contain_text("2 messages were refused in the last hour")
        expect(page.locator(".troubles")).to_contain_text("field `worker` is missing")


def test_a_lost_stream_is_said_at_once_with_the_age_and_what_happened_meanwhile_comes_afterwards(
    open_page: OpenPage,
) -> None:
    with served(fleets.calm()) as fleet:
        page = open_page(fleet.url)
        expect_live(page)
        fleet.stop()
        expect_lost(page)
        expect(page.get_by_role("heading", level=1)).to_have_text("All was well")
        expect(page.get_by_role("alert")).to_contain_text("This picture is old:")
        expect(page).to_have_title("Not live: Outfitter c")
        first = page.locator(".live").inner_text()
        expect(page.locator(".live")).not_to_have_text(first)  # it grows
        expect_lost(page)
        fleet.change(fleets.holder("gpu-0", 1))
        fleet.start()
        expect_live(page)
        expect(label_of(page, "gpu-0")).to_have_attribute("aria-label", "gpu-0: 2 held, 2 free")
        expect(page.get_by_role("heading", level=1)).to_have_text("All is well")


def test_an_open_panel_says_it_as_well_because_it_covers_a_small_screen(open_page: OpenPage) -> None:
    with served(fleets.calm()) as fleet:
        page = open_page(f"{fleet.url}#host/gpu-0", viewport={"width": 320, "height": 800})
        panel = page.get_by_role("complementary")
        expect(panel).to_contain_text("Devices")
        expect(panel).not_to_contain_text("Not live")
        fleet.stop()
        expect(panel).to_contain_text(LOST)


def test_an_error_in_the_page_itself_is_said_and_does_not_look_calm(open_page: OpenPage) -> None:
    fault = "export function waitingGroups(fleet) { if (fleet.hosts.has('two')) throw new Error('planted');"
    with served([fleets.host("one", ["healthy"])]) as fleet:
        page = open_page("about:blank", allowed=("planted",))
        page.route(
            "**/waiting.js",
            lambda route: route.fulfill(
                response=(original := route.fetch()),
                body=original.text().replace("export function waitingGroups(fleet) {", fault),
            ),
        )
        page.goto(fleet.url)
        expect_live(page)
        fleet.change(fleets.host("two", ["healthy"]))
        expect(page.locator(":root")).to_have_attribute("data-broken", "")
        said = page.evaluate("getComputedStyle(document.body, '::before').content")
        assert "what you see is old" in said
        fleet.delete("@host/two")
        expect(page.locator(":root")).not_to_have_attribute("data-broken", "")


def test_the_page_tries_at_once_when_it_is_told_to(open_page: OpenPage) -> None:
    with served(fleets.calm()) as fleet:
        page = open_page("about:blank")
        page.clock.install()
        page.goto(fleet.url)
        expect_live(page)
        fleet.stop()
        expect(page.get_by_role("button", name="Try now")).to_be_visible()
        page.clock.pause_at(datetime.now(UTC) + timedelta(minutes=1))  # from here on it does not try by itself
        page.wait_for_load_state("networkidle")
        with page.expect_request("**/api/v1/events"):
            page.get_by_role("button", name="Try now").click()


def test_after_a_restart_of_the_api_all_is_read_again(open_page: OpenPage) -> None:
    with served(fleets.calm()) as fleet:
        page = open_page(fleet.url)
        expect_live(page)
        fleet.restart_with([fleets.host("other", ["healthy"])])
        expect(label_of(page, "other")).to_be_visible()
        expect(page.locator(".host")).to_have_count(1)
        expect_live(page)


def test_a_stream_that_says_nothing_is_opened_again(open_page: OpenPage) -> None:
    with served(fleets.calm()) as fleet:
        page = open_page("about:blank")
        page.clock.install()
        page.goto(fleet.url)
        expect_live(page)
        with page.expect_request("**/api/v1/events"):
            page.clock.fast_forward(40_000)
            page.clock.run_for(12_000)
        page.clock.resume()
        expect_live(page)


def test_while_the_api_cannot_read_the_bus_the_picture_counts_as_old(open_page: OpenPage) -> None:
    with served(fleets.calm()) as fleet:
        page = open_page(fleet.url)
        expect_live(page)
        fleet.say_outage("no broker answers")
        expect(page.get_by_role("heading", level=1)).to_have_text("1 thing needed you")
        expect(page.locator(".troubles")).to_contain_text("The bus cannot be read")
        expect(page.locator(".troubles")).to_contain_text("no broker answers")
        expect(page.locator(".live")).to_contain_text("Not live")
        fleet.say_outage(None)
        expect_live(page)


def test_before_the_api_has_read_the_topics_the_page_says_what_it_waits_for(open_page: OpenPage) -> None:
    with served([]) as fleet:
        fleet.stop()
        fleet.follower = follower_of(None, "reading the ledger: 40 of 100 records")
        fleet.start()
        page = open_page(fleet.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("Reading the fleet")
        expect(page.get_by_text("reading the ledger: 40 of 100 records")).to_be_visible()
        fleet.restart_with(fleets.calm())
        expect(page.get_by_role("heading", level=1)).to_have_text("All is well")


def tokens_of(page: Page) -> Any:
    return page.evaluate("[...Object.values(sessionStorage), ...Object.values(localStorage), document.cookie]")


def secured() -> Any:
    return served(fleets.calm(), Guard(token=TOKEN.encode, local=False))


def give(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Show the fleet").click()


def test_where_a_token_is_needed_the_page_asks_and_keeps_it_for_its_tab_only(open_page: OpenPage) -> None:
    with secured() as fleet:
        page = open_page(fleet.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("A token is needed")
        expect(page.get_by_label("Token")).to_be_focused()
        give(page, "wrong")
        expect(page.get_by_text("The API refused that token.")).to_be_visible()
        give(page, TOKEN)
        expect_live(page)
        page.reload()
        expect_live(page)
        assert tokens_of(page) == [TOKEN, ""]
        assert page.evaluate("Object.values(localStorage)") == []
        other = page.context.new_page()
        other.goto(fleet.url)
        expect(other.get_by_role("heading", level=1)).to_have_text("A token is needed")


def test_a_token_that_is_replaced_meanwhile_is_asked_for_again(open_page: OpenPage) -> None:
    token = TOKEN

    def current() -> bytes:
        return token.encode()

    with served(fleets.calm(), Guard(token=current, local=False)) as fleet:
        page = open_page(fleet.url)
        give(page, TOKEN)
        expect_live(page)
        token = "another-token-of-today"
        lose_stream(fleet)
        expect(page.get_by_role("heading", level=1)).to_have_text("A token is needed")
        give(page, token)
        expect_live(page)


def lose_stream(fleet: ServedFleet) -> None:
    fleet.stop()
    fleet.start()

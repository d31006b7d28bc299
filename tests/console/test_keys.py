"""Whoever has keys alone reaches everything, and no key is swallowed that the page does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from support.console import fleets
from support.console.served import served

pytestmark = pytest.mark.console

OpenPage = Callable[..., Page]


@pytest.fixture
def page(open_page: OpenPage) -> Iterator[Page]:
    """A page with eight hosts, in three columns."""
    with served([fleets.host(f"gpu-{number}", ["healthy"] * 2) for number in range(8)]) as fleet:
        page = open_page(fleet.url, viewport={"width": 660, "height": 900})
        expect(page.locator(".host")).to_have_count(8)
        yield page


SLOW_FRAMES = """
    const frame = requestAnimationFrame.bind(window);
    window.areHeld = false;
    const held = [];
    window.requestAnimationFrame = act => (window.areHeld ? held.push(act) : frame(act));
    window.release = () => { window.areHeld = false; for (const act of held.splice(0)) frame(act); };
"""
"""With `areHeld` the page draws nothing before `release`."""


def expect_focus(page: Page, host: str) -> None:
    expect(page.locator(f"[data-host='{host}']")).to_be_focused()


def test_a_slash_searches_and_is_a_letter_like_others_in_the_search(page: Page) -> None:
    page.keyboard.press("/")
    find = page.locator("#find")
    expect(find).to_be_focused()
    page.keyboard.type("gpu-3/")
    expect(find).to_have_value("gpu-3/")
    page.keyboard.press("Backspace")
    expect(page.locator(".host")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="host gpu-3")).to_be_focused()


def test_the_tiles_are_one_stop_and_arrows_move_between_them(page: Page) -> None:
    page.locator("#sort").focus()
    page.keyboard.press("Tab")
    expect_focus(page, "gpu-0")
    for key, host in (
        ("ArrowRight", "gpu-1"), ("ArrowDown", "gpu-4"), ("ArrowLeft", "gpu-3"), ("ArrowUp", "gpu-0"),
        ("ArrowUp", "gpu-0"), ("End", "gpu-7"), ("ArrowRight", "gpu-7"), ("Home", "gpu-0"), ("ArrowDown", "gpu-3"),
    ):  # fmt: skip
        page.keyboard.press(key)
        expect_focus(page, host)
    expect(page.locator(".host[tabindex='0']")).to_have_count(1)
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#sort")).to_be_focused()
    page.keyboard.press("Tab")
    expect_focus(page, "gpu-3")


def test_arrows_faster_than_a_frame_leave_one_stop(page: Page) -> None:
    page.locator("#sort").focus()
    page.keyboard.press("Tab")
    page.evaluate("""() => {
        for (const key of ["ArrowRight", "ArrowDown"])
            document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    }""")
    expect_focus(page, "gpu-4")
    expect(page.locator("[data-host='gpu-4'][tabindex='0']")).to_have_count(1)
    expect(page.locator(".host[tabindex='0']")).to_have_count(1)


def test_a_tile_is_the_stop_at_once_however_slow_the_page_is(open_page: OpenPage) -> None:
    with served([fleets.host(f"gpu-{number}", ["healthy"]) for number in range(3)]) as fleet:
        page = open_page(fleet.url, script=SLOW_FRAMES)
        expect(page.locator(".host")).to_have_count(3)
        page.locator("#sort").focus()
        page.keyboard.press("Tab")
        page.evaluate("window.areHeld = true")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect_focus(page, "gpu-2")
        page.keyboard.press("Shift+Tab")
        expect(page.locator("#sort")).to_be_focused()
        page.evaluate("window.release()")
        page.keyboard.press("Tab")
        expect_focus(page, "gpu-2")
        expect(page.locator(".host[tabindex='0']")).to_have_count(1)


def test_enter_opens_and_escape_closes_and_returns(page: Page) -> None:
    page.locator("#sort").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="host gpu-1")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("complementary")).to_have_count(0)
    expect_focus(page, "gpu-1")
    assert "#" not in page.url


def test_a_panel_that_a_link_of_a_panel_opened_returns_to_the_tile(page: Page) -> None:
    page.locator("[data-host='gpu-2']").press("Enter")
    page.get_by_role("link", name="GPU-gpu-2-1").press("Enter")
    expect(page.get_by_role("heading", name="device GPU-gpu-2-1")).to_be_focused()
    page.keyboard.press("Escape")
    expect_focus(page, "gpu-2")


def test_the_first_stop_leads_past_everything_to_the_fleet(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the fleet")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#fleet")).to_be_focused()


def test_keys_that_the_page_does_not_use_stay_the_browsers(page: Page) -> None:
    prevented = (
        """event => { window.prevented ??= []; if (event.defaultPrevented) window.prevented.push(event.key); }"""
    )
    page.evaluate(f"document.addEventListener('keydown', {prevented})")
    page.locator("[data-host='gpu-0']").focus()
    for key in ("a", "PageDown", "Tab", "Escape", "F1", "Control+/", "Alt+ArrowRight"):
        page.keyboard.press(key)
    assert page.evaluate("window.prevented ?? []") == []


def test_the_search_and_the_focus_survive_what_happens_meanwhile(open_page: OpenPage) -> None:
    with served(fleets.calm(9)) as fleet:
        page = open_page(fleet.url)
        page.keyboard.press("/")
        page.locator("[data-host='gpu-4']").focus()
        fleet.change(fleets.holder("gpu-4", 2), fleets.host("gpu-7", ["unhealthy"]))
        expect(page.locator(".host").first).to_have_attribute("data-host", "gpu-7")
        expect_focus(page, "gpu-4")

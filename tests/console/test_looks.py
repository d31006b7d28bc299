"""Everybody can read it: small and large screens, both themes, the system's own colours, no motion, a screen reader.

Each view's picture is kept in `.cache/console/`, to be looked at: no program sees what is ugly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from outfitter_service.api.access import Guard
from support.api import follower_of
from support.console import fleets
from support.console.served import ServedFleet, served
from support.documents import ROOT
from tools import tool

pytestmark = pytest.mark.console

OpenPage = Callable[..., Page]
PICTURES = ROOT / ".cache" / "console"
SIZES = {320: 800, 768: 1024, 1400: 900, 2560: 1440}

SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT_OFF = """
() => [...document.querySelectorAll("body *")].filter(each => {
  const style = getComputedStyle(each);
  const hides = style.overflowX !== "visible" && each.tagName !== "INPUT" && each.tagName !== "SELECT";
  return hides && each.scrollWidth > each.clientWidth + 1;
}).map(each => each.outerHTML.slice(0, 200))
"""
OUTSIDE = """
() => [...document.querySelectorAll("main *, header *, aside *")].filter(each => {
  const box = each.getBoundingClientRect();
  return box.width && box.height && (box.right > innerWidth + 1 || box.left < -1) && !each.closest("thead, .skip");
}).map(each => each.outerHTML.slice(0, 200))
"""


def well(fleet: ServedFleet, page: Page) -> None:
    expect(page.locator(".host").first).to_be_visible()


def lost(fleet: ServedFleet, page: Page) -> None:
    well(fleet, page)
    fleet.stop()
    expect(page.get_by_role("alert")).to_be_visible()


def asks_for_a_token(fleet: ServedFleet, page: Page) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("A token is needed")


def refused_token(fleet: ServedFleet, page: Page) -> None:
    page.get_by_label("Token").fill("wrong")
    page.get_by_label("Token").press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()


def starting(fleet: ServedFleet, page: Page) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("Reading the fleet")


def nothing_found(fleet: ServedFleet, page: Page) -> None:
    page.locator("#find").fill("nobody at all")
    expect(page.get_by_text("Look up the worker")).to_be_visible()


def selected(fleet: ServedFleet, page: Page) -> None:
    page.get_by_role("button", name="unhealthy").click()
    expect(page.locator(".host")).to_have_count(1)


def panel(fleet: ServedFleet, page: Page) -> None:
    expect(page.locator(".steps li, aside .none").first).to_be_visible()


VIEWS: dict[str, tuple[str, Callable[[ServedFleet, Page], None]]] = {
    "main": ("", well),
    "host": ("#host/ill", panel),
    "device": ("#device/ill/GPU-ill-0", panel),
    "cordoned": ("#host/out", panel),
    "waiter": ("#worker/all-held/patient", panel),
    "unknown": ("#worker//nobody", panel),
    "selected": ("", selected),
    "nothing-found": ("", nothing_found),
    "lost": ("", lost),
    "token": ("", asks_for_a_token),
    "token-refused": ("", refused_token),
    "starting": ("", starting),
}


def records_of(view: str) -> Any:
    return [] if view.startswith("token") else fleets.shapes()


@pytest.fixture
def show(open_page: OpenPage) -> Iterator[Callable[..., Page]]:
    """Shows a view; the fleet behind it is served until the test ends."""
    stack = []

    def show(view: str, **options: Any) -> Page:
        guard = {"guard": Guard(token=lambda: b"a-token-of-this-test", local=False)} if view.startswith("token") else {}
        serving = served(records_of(view), **guard)
        fleet = serving.__enter__()
        stack.append(serving)
        if view == "starting":
            fleet.stop()
            fleet.follower = follower_of(None, "reading the ledger: 40 of 100 records")
            fleet.start()
        ill = fleets.holder("ill", 0)
        if fleet.follower.fleet is not None:
            fleet.add_steps(fleets.step(ill, "register", "granted at once"))
        address, prepare = VIEWS[view]
        page = open_page(fleet.url + address, **options)
        prepare(fleet, page)
        return page

    yield show
    for serving in stack:
        serving.__exit__(None, None, None)


def keep(page: Page, name: str) -> None:
    """Keep a picture to be looked at."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("view", ["main", "host", "cordoned", "waiter", "lost", "token"])
def test_nothing_is_cut_off_or_off_the_screen(view: str, width: int, theme: str, show: Callable[..., Page]) -> None:
    page = show(view, viewport={"width": width, "height": SIZES[width]}, color_scheme=theme)
    keep(page, f"{view}-{theme}-{width}")
    assert page.evaluate(SIDEWAYS) == 0
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate(OUTSIDE) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(view: str, theme: str, show: Callable[..., Page]) -> None:
    page = show(view, color_scheme=theme, bypass_csp=True)  # axe itself is put into the page
    page.add_script_tag(path=tool("axe-core") / "axe.min.js")
    found = page.evaluate(
        "axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})"
    )
    assert found["passes"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []


def test_with_the_systems_colours_each_state_still_has_a_shape_of_its_own(show: Callable[..., Page]) -> None:
    page = show("main", forced_colors="active")
    keep(page, "forced-colors")
    looks = page.evaluate("""
        () => ["held", "free", "unhealthy", "unknown", "cordoned"].map(state => {
          const style = getComputedStyle(document.querySelector(`.legend .${state}`));
          return [style.backgroundColor, style.backgroundImage, style.borderStyle, style.borderWidth].join();
        })""")
    assert len(set(looks)) == len(looks) == 5


@pytest.mark.parametrize(("motion", "moves"), [("reduce", False), ("no-preference", True)])
def test_nothing_moves_where_less_motion_is_asked_for(motion: str, moves: bool, show: Callable[..., Page]) -> None:
    page = show("main", reduced_motion=motion)
    expect(page.locator(".live")).to_have_text("live")
    assert bool(page.evaluate("document.getAnimations().length")) == moves


def test_the_button_changes_the_theme_and_the_page_remembers_it(show: Callable[..., Page]) -> None:
    page = show("main", color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_role("button", name="Use dark colours").click()
    expect(page.get_by_role("button", name="Use light colours")).to_be_visible()
    dark = page.evaluate(colour)
    assert dark != light
    page.reload()
    expect(page.get_by_role("button", name="Use light colours")).to_be_visible()
    assert page.evaluate(colour) == dark

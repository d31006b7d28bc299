"""The whole of it: a real manager on a real bus, a real API, a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from support.kafka.broker import KafkaBroker
from support.managers.api import running
from support.managers.process import Manager, StartManager, add_device, serving_on

pytestmark = pytest.mark.console

OpenPage = Callable[..., Page]


def expect_tile(page: Page, host: str, text: str) -> None:
    expect(page.locator(f"[data-host='{host}']")).to_have_attribute("aria-label", f"{host}: {text}")


def lends(manager: Manager, page: Page) -> None:
    """Follow workers that come, wait, go and are given devices."""
    host = manager.host
    expect_tile(page, host, "1 free")
    manager.outfitter("register", "--worker", "first", "--lease", "none")
    expect_tile(page, host, "1 held")
    manager.outfitter("register", "--worker", "second", "--lease", "none")
    expect(page.locator(".waiting tbody tr")).to_contain_text("second")
    expect_tile(page, host, "1 held, 1 waiting")
    page.locator(".waiting").get_by_role("link", name="second").click()
    panel = page.get_by_role("complementary")
    expect(panel).to_contain_text(re.compile(r"Place\s*1 in the queue"))
    expect(panel.locator(".steps")).to_contain_text("pending")
    manager.outfitter("deregister", "--worker", "first")
    expect(panel.locator(".steps")).to_contain_text("pending → allocated")
    expect(panel).to_contain_text("Its devices")
    expect_tile(page, host, "1 held")
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", level=1)).to_have_text("All is well")


def stops(manager: Manager, page: Page) -> None:
    """Follow a manager that stops and comes back. Nobody misses it before somebody asks it for something."""
    manager.stop()
    expect_tile(page, manager.host, "no manager (stopped), 1 held")
    expect(page.get_by_role("heading", level=1)).to_have_text("All is well")
    manager.outfitter("register", "--worker", "late", "--resource", "gpu=1")
    expect(page.get_by_role("heading", level=1)).to_have_text("1 thing needs you")
    expect(page.locator(".troubles")).to_contain_text(f"{manager.host} has no manager")
    expect(page.locator(".troubles")).to_contain_text("1 message lies unanswered")
    manager.start()
    expect(page.get_by_role("heading", level=1)).to_have_text("All is well")


def test_it_shows_what_happens_on_the_embedded_bus(
    start_manager: StartManager, tmp_path: Path, open_page: OpenPage
) -> None:
    manager = start_manager(gpus=1)
    with running(tmp_path, manager.bus_url) as api:
        page = open_page(f"{api.wait_for_url()}/")
        lends(manager, page)
        stops(manager, page)


@pytest.mark.kafka
def test_it_shows_what_happens_on_a_broker(kafka_broker: KafkaBroker, tmp_path: Path, open_page: OpenPage) -> None:
    cluster = kafka_broker.new_cluster()
    with (
        serving_on(kafka_broker, tmp_path / "one", cluster=cluster, gpus=1) as manager,
        running(tmp_path, kafka_broker.url, "--cluster", cluster) as api,
    ):
        page = open_page(f"{api.wait_for_url()}/")
        lends(manager, page)
        stops(manager, page)


def test_a_manager_shows_its_own_host_beside_its_metrics(start_manager: StartManager, open_page: OpenPage) -> None:
    manager = start_manager(gpus=1, extra="api = true")
    page = open_page(f"{manager.url}/")
    page.get_by_role("link", name="console").click()
    lends(manager, page)
    add_device(manager.folder / "gpus", 1)
    expect_tile(page, manager.host, "1 held, 1 free")


def test_an_api_that_ends_is_missed_and_found_again(
    start_manager: StartManager, tmp_path: Path, open_page: OpenPage
) -> None:
    manager = start_manager(gpus=1)
    with running(tmp_path, manager.bus_url) as api:
        address = api.wait_for_url().removeprefix("http://")
        page = open_page(f"{api.url}/")
        expect_tile(page, manager.host, "1 free")
        api.stop()
        expect(page.locator(".live")).to_contain_text("Not live: the picture is")
        manager.outfitter("register", "--worker", "meanwhile", "--lease", "none")
        manager.wait_for_state("meanwhile", "allocated")
    with running(tmp_path, manager.bus_url, "--listen", address):
        expect(page.locator(".live")).to_have_text("live")
        expect_tile(page, manager.host, "1 held")

"""A real browser for the tests of the console."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from tools import tool

if TYPE_CHECKING:  # `make test` reads this file, and has no playwright
    from playwright.sync_api import Browser, Page

OpenPage = Callable[..., "Page"]

WITHIN_MS = 30_000
HARMLESS = ("Failed to load resource: net::ERR_", "status of 401", "status of 404", "status of 503")
"""What a browser logs by itself while the API is away or refuses."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WITHIN_MS)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=tool("chromium"), args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens an address in a context of its own. Whatever the browser complains of there fails the test."""
    contexts, complaints, harmless = [], [], [*HARMLESS]

    def note(text: str) -> None:
        if not any(part in text for part in harmless):
            complaints.append(text)

    def open_at(url: str, *, script: str = "", allowed: Sequence[str] = (), **options: Any) -> Page:
        harmless.extend(allowed)
        options.setdefault("viewport", {"width": 1400, "height": 900})
        context = browser.new_context(**options)
        contexts.append(context)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        page.set_default_timeout(WITHIN_MS)
        page.on("console", lambda message: note(message.text) if message.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: note(str(error)))
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert complaints == []

"""How long 1,000 hosts with 8 devices take. Figures are printed and asserted nowhere: any machine may pause."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from random import Random

import pytest
from playwright.sync_api import Page, expect

from support.console import fleets
from support.console.served import served

pytestmark = pytest.mark.console

OpenPage = Callable[..., Page]
HOSTS, DEVICES, UPDATES = 1_000, 8, 100

COLLECT = """
window.draws = [];
new PerformanceObserver(list => window.draws.push(...list.getEntries().filter(each => each.name === "draw")
  .map(each => [each.startTime, each.duration]))).observe({ type: "measure" });
"""
"""Collects when each drawing began, and how long it took, in milliseconds."""

BUSY = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")


def figures_of(name: str, times: list[float]) -> str:
    ordered = sorted(times)
    return f"{name}: median {statistics.median(ordered):.1f} ms, 95 % {ordered[int(len(ordered) * 0.95)]:.1f} ms"


class Thread:
    """The processor time of a page's main thread, which other programs do not lengthen."""

    def __init__(self, page: Page) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_ms(self, *names: str) -> float:
        metrics = {each["name"]: each["value"] for each in self._session.send("Performance.getMetrics")["metrics"]}
        return sum(float(metrics[name]) for name in names) * 1000


def test_a_thousand_hosts_are_shown_and_kept_current(open_page: OpenPage) -> None:
    with served(fleets.troubled(HOSTS, DEVICES)) as fleet:
        page = open_page("about:blank", script=COLLECT, bypass_csp=True)  # the test evaluates text
        thread = Thread(page)
        page.goto(fleet.url)
        expect(page.locator(".host")).to_have_count(HOSTS)
        whole = thread.busy_ms("TaskDuration")
        begun, took = max(page.evaluate("window.draws"), key=lambda draw: draw[1])
        print(f"\n{HOSTS} hosts x {DEVICES} devices")
        print(
            f"first render: {begun + took:.0f} ms after the navigation, of which its thread was busy for {whole:.0f} ms"
        )
        print(f"of that: drawing {took:.0f} ms; layout and style {thread.busy_ms(*BUSY[1:]):.0f} ms of processor time")
        random = Random(1)
        drawn, busy = [], []
        for number in range(UPDATES):
            before, busy_before = page.evaluate("window.draws.length"), thread.busy_ms(*BUSY)
            name = f"gpu-{random.randrange(HOSTS):04d}"
            fleet.change(fleets.holder(name, number % DEVICES, worker=f"new-{number}"))
            page.wait_for_function(f"window.draws.length > {before}")
            drawn += [took for _, took in page.evaluate(f"window.draws.slice({before})")]
            busy.append(thread.busy_ms(*BUSY) - busy_before)
        print(figures_of("one change, drawing", drawn))
        print(figures_of("one change, script, layout and style, processor time", busy))
        before = page.evaluate("window.draws.length")
        fleet.change(*(fleets.holder(f"gpu-{number:04d}", 1, worker=f"all-{number}") for number in range(HOSTS)))
        page.locator("#find").fill("all-999")
        expect(page.locator(".host")).to_have_count(1)
        times = [took for _, took in page.evaluate(f"window.draws.slice({before})")]
        print(f"{HOSTS} changes at once: {len(times)} drawings, the longest {max(times):.1f} ms")

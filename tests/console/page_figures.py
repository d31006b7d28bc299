"""How long 1,000 hosts with 8 devices take. Figures are printed and asserted nowhere: any machine may pause."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from random import Random

from playwright.sync_api import Page, expect

from support.console import fleets
from support.console.served import served

OpenPage = Callable[..., Page]
HOSTS, DEVICES, UPDATES = 1_000, 8, 100

COLLECT = """
window.draws = [];
new PerformanceObserver(list => window.draws.push(...list.getEntries().filter(each => each.name === "draw")
  .map(each => [each.startTime, each.duration]))).observe({ type: "measure" });
"""
"""Collects when each drawing began, and how long it took, in milliseconds."""

TIMES = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")


def figures_of(name: str, times: list[float]) -> str:
    ordered = sorted(times)
    return f"{name}: median {statistics.median(ordered):.1f} ms, 95 % {ordered[int(len(ordered) * 0.95)]:.1f} ms"


def test_a_thousand_hosts_are_shown_and_kept_current(open_page: OpenPage) -> None:
    with served(fleets.troubled(HOSTS, DEVICES)) as fleet:
        page = open_page(fleet.url, script=COLLECT, bypass_csp=True)  # the test evaluates text
        expect(page.locator(".host")).to_have_count(HOSTS)
        page.wait_for_function(
            "window.draws.some(([, took]) => took > 0) && document.querySelector('.live:not(.lost)')"
        )
        begun, took = max(page.evaluate("window.draws"), key=lambda draw: draw[1])
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
        print(f"\n{HOSTS} hosts x {DEVICES} devices")
        print(f"first paint {paint:.0f} ms; all pages read after {begun:.0f} ms; first drawing of all {took:.0f} ms")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        random = Random(1)
        drawn, whole = [], []
        for number in range(UPDATES):
            before = page.evaluate("window.draws.length")
            metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
            name = f"gpu-{random.randrange(HOSTS):04d}"
            fleet.change(fleets.holder(name, number % DEVICES, worker=f"new-{number}"))
            page.wait_for_function(f"window.draws.length > {before}")
            drawn += [took for _, took in page.evaluate(f"window.draws.slice({before})")]
            after = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
            whole.append(sum(after[key] - metrics[key] for key in TIMES) * 1000)
        print(figures_of("one change, drawing", drawn))
        print(figures_of("one change, with layout, style and this test's own questions", whole))
        before = page.evaluate("window.draws.length")
        fleet.change(*(fleets.holder(f"gpu-{number:04d}", 1, worker=f"all-{number}") for number in range(HOSTS)))
        page.locator("#find").fill("all-999")
        expect(page.locator(".host")).to_have_count(1)
        times = [took for _, took in page.evaluate(f"window.draws.slice({before})")]
        print(f"{HOSTS} changes at once: {len(times)} drawings, the longest {max(times):.1f} ms")

"""A delay that lasts is reported ever less often, whatever its reason."""

from __future__ import annotations

from outfitter_service.runtime.survivors.delay_reports import LONGEST_S, DelayReports

HOUR_S = 3600


def test_it_is_reported_at_once_and_then_after_10_20_40_seconds_and_so_on() -> None:
    now = 0.0
    reports = DelayReports(lambda: now)
    reported = []
    for second in range(HOUR_S):
        now = float(second)
        if reports.is_due:
            assert reports.report(f"process {second} (sh) of the worker still runs")
            reported.append(second)
    assert reported[:7] == [0, 10, 30, 70, 150, 310, 630]
    assert len(reported) <= 7 + HOUR_S / LONGEST_S


def test_the_same_reason_is_reported_again_and_is_not_new() -> None:
    now = 0.0
    reports = DelayReports(lambda: now)
    assert reports.report("process 7 (sh) of the worker still runs")
    now = 10.0
    assert reports.is_due
    assert not reports.report("process 7 (sh) of the worker still runs")
    assert reports.report("process 8 (sh) of the worker still runs")

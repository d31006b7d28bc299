"""`outfitter verify`: the independent checker (outfitter_verify) for operators of real clusters."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output

if TYPE_CHECKING:
    from outfitter_service.config import BusConnection
    from outfitter_verify import Report, Violation


@click.command()
@options.of_cluster
@options.since
@options.json_output
def verify(where: BusConnection, /, since: datetime | None, as_json: bool) -> int:
    """Read all committed records, and check that every promise was kept at every moment since the oldest record.

    No device is in two live allocations, each registration has one answer, tokens grow, commits have no gap, and
    history is complete. The checker shares no code with the manager, and reads Kafka with another client (the extra
    `verify`). Exit code: 0 without violations, 1 with violations, 125 if it cannot check. It skips registrations that
    its client cannot read, reports them as "not looked at", and `in full` is not yes then. With --since it still checks
    all records, but reports only violations in those that are not older.
    """
    import anyio

    from outfitter_service.cli._lib import broker_check
    from outfitter_verify import verify as check_bus

    anyio.run(broker_check.refuse_unreadable, where)  # else its client would say only that it waits
    report = check_bus(where.bus, where.cluster, login=where.login)
    earliest = -math.inf if since is None else math.floor(since.timestamp() * 1000)
    violations = [violation for violation in report.violations if violation.timestamp_ms >= earliest]
    if as_json:
        output.print_json(_as_json(report, violations))
    else:
        _print(report, violations)
    return 1 if violations else 0


def _print(report: Report, violations: list[Violation]) -> None:
    output.print_table(
        ["check", "violations", "looked at", "in full", "promise"],
        (
            (
                check.name,
                sum(violation.check == check.name for violation in violations),
                _counted(check.looked_at, check.unit),
                "; ".join(check.partial) or "yes",
                check.promise,
            )
            for check in report.checks
        ),
    )
    if violations:
        output.say("")
        output.print_table(
            ["check", "at", "violation", "see also"],
            ((item.check, item.place, item.what, ", ".join(item.records) or None) for item in violations),
        )
    counts = report.counts
    output.say("")
    output.say(
        f"{_counted(len(violations), 'violations')}; {_counted(counts['commits'], 'commits')} by "
        f"{_counted(counts['managers'], 'runs')} of managers, {_counted(counts['registrations'], 'registrations')}, "
        f"{counts['unread']} of them not read yet, {_counted(counts['unserved'], 'messages')} without a manager"
    )


def _counted(number: int, things: str) -> str:
    """`1 commit`, `2 commits`."""
    return f"{number} {things.removesuffix('s') if number == 1 else things}"


def _as_json(report: Report, violations: list[Violation]) -> dict[str, object]:
    return {
        "cluster": report.cluster,
        "ok": not violations,
        "complete": report.complete,
        "checks": [
            {
                "name": check.name,
                "promise": check.promise,
                "looked_at": check.looked_at,
                "unit": check.unit,
                "violations": sum(violation.check == check.name for violation in violations),
                "partial": check.partial,
            }
            for check in report.checks
        ],
        "violations": [
            {
                "check": item.check,
                "topic": item.place.topic,
                "partition": item.place.partition,
                "offset": item.place.offset,
                "at": datetime.fromtimestamp(item.timestamp_ms / 1000, UTC) if item.timestamp_ms else None,
                "what": item.what,
                "records": item.records,
            }
            for item in violations
        ],
        "counts": dict(report.counts),
    }

"""`outfitter verify`: the independent checker (outfitter_verify) for operators of real clusters."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.cli._lib.registration_options import Duration

if TYPE_CHECKING:
    from outfitter_verify import Report, Violation


@click.command()
@options.bus
@options.config
@options.cluster
@click.option(
    "--since",
    metavar="DURATION",
    type=Duration(),
    help="Tell violations in records of the last 30m, 2h, 7d only. All of the past is looked at nevertheless.",
)
@options.json_output
@click.pass_context
def verify(ctx: click.Context, /, config: str | None, since: float | None, as_json: bool, **_options: object) -> int:
    """Read what is committed, and check that every promise was kept, at every moment since the oldest record.

    No device in two live allocations, each registration answered once, tokens that grow, commits without a gap, a
    history that tells it all: checked by a program that shares no code with the manager, and reads Kafka with another
    client (the extra `verify`). Exit code 0 without violations, 1 with, 125 where it cannot look. Registrations
    that its client cannot read past are told as "not looked at", and it goes on behind them: `in full` is not yes then.
    """
    from outfitter_service.config import connection
    from outfitter_verify import verify as look

    where = connection(config, options.given(ctx))
    report = look(where.bus, where.cluster, login=where.login)
    earliest = 0.0 if since is None else (time.time() - since) * 1000
    found = [violation for violation in report.violations if violation.timestamp_ms >= earliest]
    if as_json:
        output.print_json(_plain(report, found))
    else:
        _tell(report, found)
    return 1 if found else 0


def _tell(report: Report, found: list[Violation]) -> None:
    output.print_table(
        ["check", "violations", "looked at", "in full", "promise"],
        (
            (
                check.name,
                sum(violation.check == check.name for violation in found),
                _counted(check.looked_at, check.unit),
                "; ".join(check.partial) or "yes",
                check.promise,
            )
            for check in report.checks
        ),
    )
    if found:
        output.say("")
        output.print_table(
            ["check", "at", "violation", "see also"],
            ((item.check, item.place, item.what, ", ".join(item.records) or None) for item in found),
        )
    counts = report.counts
    output.say("")
    output.say(
        f"{_counted(len(found), 'violations')}; {_counted(counts['commits'], 'commits')} by "
        f"{_counted(counts['managers'], 'runs')} of managers, {_counted(counts['registrations'], 'registrations')}, "
        f"{counts['unread']} of them not read yet, {_counted(counts['unserved'], 'messages')} for nobody"
    )


def _counted(number: int, things: str) -> str:
    """`1 commit`, `2 commits`."""
    return f"{number} {things.removesuffix('s') if number == 1 else things}"


def _plain(report: Report, found: list[Violation]) -> dict[str, object]:
    return {
        "cluster": report.cluster,
        "ok": not found,
        "complete": report.complete,
        "checks": [
            {
                "name": check.name,
                "promise": check.promise,
                "looked_at": check.looked_at,
                "unit": check.unit,
                "violations": sum(violation.check == check.name for violation in found),
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
            for item in found
        ],
        "counts": dict(report.counts),
    }

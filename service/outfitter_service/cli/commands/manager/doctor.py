"""`outfitter doctor`: what this machine lacks or has wrong, each with its remedy."""

from __future__ import annotations

import contextlib
import sys

import click
from msgspec import structs

from outfitter_service.cli._lib import options, output

WITHIN = 28.0
"""Seconds until all checks must have ended: longer than a stranger's open transaction stays unnamed."""


@click.command()
@options.connection
@options.json_output
@click.pass_context
def doctor(ctx: click.Context, /, config: str | None, as_json: bool, **_options: object) -> int:
    """Check what a manager needs of this machine, and say how to put right what is wrong: exit code 1 if anything is.

    It checks the configuration and its files, the drivers and what they find, the bus with its topics and rights, other
    managers, descriptors, pidfd, /proc and the clock. It changes nothing.
    """
    from outfitter_service.cli._lib.diagnosis.checks import CHECKS
    from outfitter_service.cli._lib.diagnosis.examination import examine
    from outfitter_service.cli._lib.diagnosis.finding import Grade, Machine

    with contextlib.redirect_stdout(sys.stderr):  # a driver's prints are no findings
        found = examine(CHECKS, Machine(config=config, given=options.given(ctx)), WITHIN)
    ok = not any(item.verdict is Grade.PROBLEM for items in found.values() for item in items)
    if as_json:
        checks = [
            {"check": name, "findings": [structs.asdict(item) for item in items]} for name, items in found.items()
        ]
        output.print_json({"ok": ok, "checks": checks})
        return 0 if ok else 1
    for name, items in found.items():
        if not items:
            output.say(f"{name}: ok")
        for item in items:
            output.say(f"{name}: {item.verdict}: {item.seen}")
            output.say(f"    remedy: {item.remedy}")
    return 0 if ok else 1

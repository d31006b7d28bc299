"""`python -m outfitter_verify BUS [CLUSTER]`: the checker alone, without Outfitter's command line."""

from __future__ import annotations

import os
import sys

from outfitter_verify.buses import UnreadableError
from outfitter_verify.report import Report
from outfitter_verify.sources import verify


def main(arguments: list[str]) -> int:
    """Print the report. Exit code 0: no violations; 1: violations; 2: the bus could not be read, or nothing printed."""
    if not arguments:
        sys.stderr.write("usage: python -m outfitter_verify BUS [CLUSTER]\n")
        return 2
    bus, cluster = arguments[0], arguments[1] if len(arguments) > 1 else "outfitter"
    try:
        report = verify(bus, cluster)
    except UnreadableError as error:
        sys.stderr.write(f"outfitter_verify: {error}\n")
        return 2
    try:
        _print(report)
    except (OSError, AttributeError) as error:  # AttributeError: it is closed
        why = error.strerror if isinstance(error, OSError) else "it is closed"
        sys.stderr.write(f"outfitter_verify: standard output: {why}\n")
        os._exit(2)  # Python would write once more what it could not
    return 0 if report.ok else 1


def _print(report: Report) -> None:
    for check in report.checks:
        partial = f" (in part: {'; '.join(check.partial)})" if check.partial else ""
        sys.stdout.write(f"{check.name}: {check.violations} violations, {check.looked_at} {check.unit}{partial}\n")
    sys.stdout.write(f"{report}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

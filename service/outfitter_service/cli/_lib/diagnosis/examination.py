"""Runs checks side by side, each in a thread with a deadline, so that neither an error nor a frozen broker stops the
others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from outfitter_proto.support.causes import causes
from outfitter_service.cli._lib.diagnosis.finding import Check, Finding, Grade, Machine


class _Examination(threading.Thread):
    """One check. The thread is a daemon: it does not keep the process alive if it never ends."""

    def __init__(self, check: Check, machine: Machine) -> None:
        super().__init__(daemon=True)
        self.findings: list[Finding] | None = None
        self._check = check
        self._machine = machine

    def run(self) -> None:
        found: list[Finding] = []
        try:
            found.extend(self._check(self._machine))
        except Exception as error:  # noqa: BLE001 - whatever happens to one check, the others go on
            remedy = "do what the message says, then run this again"
            texts = dict.fromkeys(str(cause) or type(cause).__name__ for cause in causes(error))
            found += [Finding(Grade.PROBLEM, text, remedy) for text in texts]
        self.findings = found


def examine(checks: Sequence[Check], machine: Machine, within: float) -> dict[str, list[Finding]]:
    """The findings by the check's name, none if all is well. `within`: seconds until the checks must have ended."""
    running = {check.__name__: _Examination(check, machine) for check in checks}
    for thread in running.values():
        thread.start()
    deadline = time.monotonic() + within
    for thread in running.values():
        thread.join(max(deadline - time.monotonic(), 0.0))
    late = [
        Finding(
            Grade.PROBLEM,
            f"no answer within {within:g} s",
            "see whether the bus, its host and the drivers answer",
        )
    ]
    return {name: late if (found := thread.findings) is None else found for name, thread in running.items()}

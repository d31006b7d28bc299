"""What the service says of its commits: metrics, log lines, and the self-check of exclusivity.

It looks at what was committed and changes nothing.
"""

from __future__ import annotations

import time

import structlog

from outfitter_proto.bus import BusError, CommitUnknownError, FencedError, TooLargeError
from outfitter_proto.records import FINAL_STATES, Allocation, ReasonCode, Transition
from outfitter_service.core.ledger import Ledger
from outfitter_service.core.states import ALLOCATED, FAILED
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.batch import Batch
from outfitter_service.runtime.census import Census
from outfitter_service.runtime.selfcheck import Holders, Violation

log = structlog.get_logger("outfitter.processor")

LOGGED = 20
"""How many transitions of one commit get a line each: a flood of workers must not become a flood of lines."""


class Telling:
    """Metrics and log lines of one processor."""

    def __init__(self, metrics: Metrics, **place: str | int) -> None:
        """`place` is what every line says: the host, or the partition."""
        self._metrics = metrics
        self._registered_ms: dict[str, int] = {}
        self._holders = Holders()
        self.census = Census(metrics.resources)
        self.log = log.bind(**place)

    def committed(self, batch: Batch) -> None:
        """Count and log a commit."""
        metrics = self._metrics
        self._registered_ms.update(batch.registered_ms)
        for kind, count in batch.kinds.items():
            metrics.events.labels(kind).inc(count)
        metrics.dead_letters.inc(len(batch.letters))
        for letter in batch.letters[:LOGGED]:
            about = batch.about.get(letter.key, {})
            self.log.warning("dead letter", reason=letter.reason, field=letter.field, source=letter.key, **about)
        now_ms = time.time() * 1000
        transitions = [step for step in batch.history if type(step) is Transition]
        grants: dict[str, int] = {}
        for step in transitions:
            self._count(step, now_ms, grants)
        for resource, count in grants.items():
            metrics.grants.labels(resource).inc(count)
        for step in transitions[:LOGGED]:
            self.log.info(
                step.to,
                host=step.host,
                worker=step.worker,
                incarnation=step.incarnation,
                event_kind=step.event,
                explanation=step.explanation,
            )
        if len(transitions) > LOGGED:
            self.log.info("and more transitions in one commit", more=len(transitions) - LOGGED)
        kept = {key: at for key, (at, _) in batch.values.items() if at is None or type(at) is Allocation}
        self.census.take(kept)
        self._complain(self._holders.take(kept))

    def _count(self, step: Transition, now_ms: float, grants: dict[str, int]) -> None:
        """Count one transition; `grants` by resource are summed up, for there are many."""
        metrics = self._metrics
        key = f"{step.host}/{step.worker}/{step.incarnation}"
        record = step.record
        if not isinstance(record, Allocation) or step.to == step.from_:
            return
        if step.to == ALLOCATED:
            registered_ms = self._registered_ms.pop(key, None)
            if registered_ms is not None:
                metrics.allocation_seconds.observe(max(0.0, now_ms - registered_ms) / 1000)
            for resource in record.resources:
                grants[resource] = grants.get(resource, 0) + 1
        elif step.to in FINAL_STATES:
            self._registered_ms.pop(key, None)
            if step.to == FAILED:
                metrics.failures.labels(record.reason_code or "").inc()
            elif step.from_ is not None:  # else it deregistered before it was registered, and held nothing
                metrics.releases.labels(record.reason_code or "").inc()
        # what others are granted because of it has the same event
        if step.event == "lease-expired" and record.reason_code == ReasonCode.LEASE_EXPIRED:
            metrics.lease_expiries.inc()

    def failed(self, error: BusError) -> None:
        """A commit failed."""
        self._metrics.commits.labels(_outcome(error)).inc()

    def replayed(self, ledger: Ledger) -> None:
        """The processor begins with this ledger."""
        self.census.replay(ledger.allocations.values())
        self._complain(self._holders.replay(ledger.allocations.values()))

    def _complain(self, violations: list[Violation]) -> None:
        for violation in violations:
            self._metrics.violations.inc()
            host, worker, incarnation = violation.key.split("/")
            self.log.critical(
                "a device is in two live allocations",
                device=violation.device,
                host=host,
                worker=worker,
                incarnation=incarnation,
                other=violation.other,
            )


def _outcome(error: BusError) -> str:
    match error:
        case FencedError():
            return "fenced"
        case CommitUnknownError():
            return "unknown"
        case TooLargeError():
            return "too-large"
        case _:
            return "unavailable"

"""Reports commits: metrics, log lines, and the self-check of exclusivity. The reporter changes nothing."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import structlog

from outfitter_proto.bus import BusError, CommitUnknownError, FencedError, TooLargeError
from outfitter_proto.keys import allocation_names
from outfitter_proto.records import FINAL_STATES, Allocation, ReasonCode
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.core.states import ALLOCATED, FAILED
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.changelog.restore import Restored
from outfitter_service.runtime.processor.commit.commit import Commit
from outfitter_service.runtime.processor.commit.effects import LOGGED
from outfitter_service.runtime.processor.reporting.exclusivity_check import ExclusivityViolation
from outfitter_service.runtime.processor.reporting.gauges import NONE, StateGauges

log = structlog.get_logger("outfitter.processor")

LINES_A_SECOND = 50
"""Log lines that one processor may write in a second."""


class LineLimiter:
    """Limits a processor's log lines per second. Lines beyond the limit are summed up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._second = 0
        self._remaining = LINES_A_SECOND

    def allow(self, lines: int) -> int:
        """How many of so many lines may be written now. They count as written."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._remaining = second, LINES_A_SECOND
        allowed = min(lines, self._remaining)
        self._remaining -= allowed
        return allowed


def subject_of(event: m.Event) -> dict[str, str]:
    """The worker, driver or host of an event, as log fields."""
    if isinstance(event, m.Incoming):
        message = event.message
        return {"host": message.host, "worker": message.worker, "incarnation": message.incarnation or ""}
    if isinstance(event, m.DriverReport | m.DriverRetry):
        return {"host": event.host, "resource": event.resource}
    if isinstance(event, m.Tick | m.Reschedule):
        return {"host": event.host}
    if isinstance(event, m.OrderRead):
        return {"host": event.order.host, "order": event.order.id}
    host, worker, incarnation = allocation_names(event.allocation)
    return {"host": host, "worker": worker, "incarnation": incarnation}


class CommitReporter:
    """Metrics and log lines of one processor."""

    def __init__(self, metrics: Metrics, **log_fields: str | int) -> None:
        """`log_fields`: the fields of every line, which name the host or the partition."""
        self._metrics = metrics
        self._registered_ms: dict[str, int] = {}
        self._warned_since = -60.0
        self._warned = 0
        self.state_gauges = StateGauges(metrics.resources)
        self.log = log.bind(**log_fields)
        self._lines = LineLimiter()
        self._unlogged = 0
        self._held_back: set[tuple[str, str]] = set()
        self._committed: list[Commit] = []
        self._counting = False

    @property
    def behind(self) -> bool:
        """Whether some commits are not reported or counted yet."""
        return bool(self._committed) or self._counting

    def committed(self, commit: Commit) -> None:
        """A commit has returned; `catch_up` will report it."""
        self._committed.append(commit)

    def catch_up(self, ledger: Ledger) -> None:
        """Report commits that have returned. Of many hosts it counts some at a time."""
        for commit in self._committed:
            self.report(commit)
        self._committed.clear()
        self._counting = self.state_gauges.catch_up(ledger)

    def report(self, commit: Commit) -> None:
        """Count and log a commit."""
        metrics = self._metrics
        self._registered_ms.update(commit.effects.registered_ms)
        for kind, count in commit.effects.kinds.items():
            metrics.events.labels(kind).inc(count)
        metrics.events.labels("register").inc(sum(map(len, commit.effects.granted.values())))
        omitted = sum(messages.count for messages in commit.omitted.values())
        metrics.dead_letters.inc(len(commit.transaction.letters) - len(commit.summed) + omitted)
        metrics.dead_letters_omitted.inc(omitted)
        for letter in commit.transaction.letters[: self._lines.allow(min(LOGGED, len(commit.transaction.letters)))]:
            about = commit.effects.about.get(letter.key, {})
            self.log.warning("dead letter", reason=letter.reason, field=letter.field, source=letter.key, **about)
        self._log_unknown_fields(commit)
        self._count(commit)
        logged = self._lines.allow(min(LOGGED, len(commit.effects.steps)))
        for _, step in commit.effects.steps[:logged]:
            self.log.info(
                step.to,
                host=step.host,
                worker=step.worker,
                incarnation=step.incarnation,
                event_kind=step.event,
                explanation=step.explanation,
            )
        for note in commit.effects.notes[: self._lines.allow(len(commit.effects.notes))]:
            self.log.info(note.event, explanation=note.explanation)
        self._unlogged += len(commit.effects.steps) - logged + commit.effects.unlogged
        if self._unlogged and self._lines.allow(1):
            self.log.info("and more transitions", more=self._unlogged)
            self._unlogged = 0
        for host in commit.effects.announced:
            self._log_held_back(host, commit.ledger)
        self._log_renamed(commit)
        self._report_violations(self.state_gauges.update(commit.effects.allocations, before=commit.effects.before))

    def _log_held_back(self, host: str, ledger: Ledger) -> None:
        """Log when the first device of a resource is held back, and when none is any more."""
        host_state = ledger.hosts.get(host)
        inventories = host_state.devices.inventories if host_state is not None else {}
        for resource, inventory in inventories.items():
            if inventory.held_back and (host, resource) not in self._held_back:
                self._held_back.add((host, resource))
                self.log.warning(
                    "devices are held back: each may be one that a worker still holds",
                    host=host,
                    resource=resource,
                    devices=len(inventory.held_back),
                    reason=str(inventory.suspect),
                )
        for resource in [resource for logged_host, resource in self._held_back if logged_host == host]:
            if resource not in inventories or not inventories[resource].held_back:
                self._held_back.discard((host, resource))
                self.log.info("no devices are held back any more", host=host, resource=resource)

    def _log_renamed(self, commit: Commit) -> None:
        """Warn of held devices whose name has changed: their ids may mean other devices now."""
        renamed: list[dict[str, str]] = []
        for key, before in commit.effects.before.items():
            record = commit.effects.allocations.get(key)
            if record is not None and record.resources != before.resources:
                host, worker, incarnation = allocation_names(key)
                holder = {"host": host, "worker": worker, "incarnation": incarnation}
                renamed += [{**names, **holder} for names in _renamed(before, record)]
        for fields in renamed[: self._lines.allow(min(LOGGED, len(renamed)))]:
            self.log.warning("a held device has another name now: its driver may mean another device", **fields)

    def _log_unknown_fields(self, commit: Commit) -> None:
        """Count all messages with unknown fields, and log some of each minute: a client that misspells a field does so
        in each message."""
        for message, warnings in commit.effects.unknown_fields:
            self._metrics.unknown_fields.labels(message.__struct_config__.tag).inc()
            now = time.monotonic()
            if now - self._warned_since >= 60:
                self._warned_since, self._warned = now, 0
            self._warned += 1
            if self._warned <= LOGGED:
                self.log.warning(
                    "a message has unknown fields",
                    host=message.host,
                    worker=message.worker,
                    incarnation=message.incarnation,
                    event_kind=message.__struct_config__.tag,
                    warnings=warnings,
                )

    def _count(self, commit: Commit) -> None:
        """Count transitions. Grants, their waits and ends are summed up first, because there are many; the commit has
        counted the fast grants."""
        waits = {resource: Counter(arrived) for resource, arrived in commit.effects.granted.items()}
        grants = defaultdict(int, {resource: len(arrived) for resource, arrived in commit.effects.granted.items()})
        ends: Counter[tuple[str, str]] = Counter()
        for key, step in commit.effects.steps:
            record = step.record
            if type(record) is not Allocation:  # it is encoded already: a fast grant
                continue
            if step.to != ALLOCATED:
                if step.to in FINAL_STATES:
                    self._registered_ms.pop(key, None)
                    if step.to == FAILED or step.from_ is not None:  # else nobody had registered what is over
                        ends[step.to, record.reason_code or ""] += 1
                # grants to others because of it have the same event
                if step.event == "lease-expired" and record.reason_code == ReasonCode.LEASE_EXPIRED:
                    self._metrics.lease_expiries.inc()
                continue
            registered_ms = self._registered_ms.pop(key, None)
            for resource in record.resources:
                grants[resource] += 1
            if registered_ms is not None:
                for resource in record.resources or (NONE,):
                    waits.setdefault(resource, Counter())[registered_ms] += 1
        now_ms = time.time() * 1000
        for resource, arrivals in waits.items():
            for arrived_ms, count in arrivals.items():
                self._metrics.allocation_seconds.observe(resource, max(0.0, now_ms - arrived_ms) / 1000, count)
        for resource, count in grants.items():
            self._metrics.grants.labels(resource).inc(count)
        for (state, reason), count in ends.items():
            (self._metrics.failures if state == FAILED else self._metrics.releases).labels(reason).inc(count)

    def answered(self, trouble: BusError | None, seconds: float) -> None:
        """The bus has answered a commit after so many seconds, with this `trouble` or none."""
        if trouble is None:
            self._metrics.commit_seconds.observe(seconds)
        self._metrics.commits.labels(_outcome(trouble)).inc()

    def input_lost(self, explanation: str) -> None:
        """Registrations were lost unread."""
        self.log.error("registrations were lost, continuing at the earliest", reason=explanation)
        self._metrics.input_lost.inc()

    def replayed(self, restored: Restored) -> None:
        """The processor starts with this ledger."""
        ledger = restored.ledger
        self._metrics.restore_seconds.set(restored.seconds)
        self._metrics.restored_records.set(restored.records)
        self._report_violations(self.state_gauges.replay(ledger.allocations, hosts=ledger.hosts))

    def _report_violations(self, violations: list[ExclusivityViolation]) -> None:
        for violation in violations:
            self._metrics.violations.inc()
            host, worker, incarnation = allocation_names(violation.key)
            self.log.critical(
                "a device is in two live allocations",
                device=violation.device,
                host=host,
                worker=worker,
                incarnation=incarnation,
                other=violation.other,
            )


def _renamed(before: Allocation, record: Allocation) -> Iterator[dict[str, str]]:
    """The devices of a holder whose property `name` has changed, as log fields."""
    for resource, infos in record.resources.items():
        names_before = {info["id"]: info.get("name") for info in before.resources.get(resource, ())}
        for info in infos:
            name_before, name = names_before.get(info["id"]), info.get("name")
            if name_before is not None and name is not None and name_before != name:
                yield {"device": info["id"], "resource": resource, "before": name_before, "now": name}


def _outcome(error: BusError | None) -> str:
    match error:
        case None:
            return "ok"
        case FencedError():
            return "fenced"
        case CommitUnknownError():
            return "unknown"
        case TooLargeError():
            return "too-large"
        case _:
            return "unavailable"

"""Promise 7: a device is granted again only after its holder deregistered, died, or was silent for its lease; and after
its driver has taken it back.

A record has the reason of its release (`reason_code`). The checker compares it with the messages and their times.
Messages have the bus's time, records the manager's. The known lag of a manager's clock counts in its favour. So does
each message that the checker's client does not show: it may have been what the manager went by.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from outfitter_verify import wire
from outfitter_verify.ledger.walk import LedgerWalk
from outfitter_verify.ledger.writers import NOTHING, Extent, VisibleCommit, Written
from outfitter_verify.logs import Log
from outfitter_verify.registrations.messages import Classified, MessageKind
from outfitter_verify.report import Findings

HONEST_MS = 2_000
"""Milliseconds by which a silence may seem shorter than its lease, because two clocks are never quite the same."""
LONG_OVER_MS = 600_000
"""Milliseconds after its end after which a manager that reads and commits must have ended a lease."""

_RELEASE_CODES = {"deregistered", "lease-expired", "owner-died", "prepare-failed"}
_CODES = _RELEASE_CODES | {"superseded"}
_SILENT = {"pending", "preparing", "allocated"}
"""States in which a worker without an owner must send messages."""


class WorkerSilence(NamedTuple):
    """A lease that was judged as over: its place, its allocation, the length of the silence, and of the lease and the
    manager's grace."""

    offset: int
    key: str
    silent_ms: int
    lease_ms: int
    grace_ms: int


class Sign(NamedTuple):
    """The offset and time of a message that proves that a worker lived, and its bytes if it is a registration."""

    offset: int
    at_ms: int
    registration: bytes | None


class Releases:
    """Checks one partition's releases, commit by commit, and at the end the missing ones."""

    def __init__(self, registrations: Log, messages: Mapping[int, Classified], findings: Findings) -> None:
        self._log = registrations
        self._findings = findings
        self._signs: defaultdict[str, list[Sign]] = defaultdict(list)
        self._deregistrations: defaultdict[str, list[int]] = defaultdict(list)
        self._runs: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self._silences: list[WorkerSilence] = []
        self._behind_ms = 0
        self._newest_ms: dict[str, int] = {}
        self._set_back: dict[str, Extent] = {}
        for record in registrations.records:
            message = messages[record.offset]
            key = message.allocation
            if message.kind is MessageKind.DEREGISTER:
                self._deregistrations[key or message.worker].append(record.offset)
            elif key is not None:
                is_heartbeat = message.kind is MessageKind.HEARTBEAT
                self._signs[key].append(
                    Sign(record.offset, record.timestamp_ms, None if is_heartbeat else record.value)
                )
                if not is_heartbeat:
                    self._runs[message.worker].append((record.offset, key))

    def commit(
        self, ledger: LedgerWalk, commit: VisibleCommit, records: list[Written], before: Extent, after: Extent
    ) -> None:
        """Check the releases of this commit, which has read to `after`; the commit before it read to `before`."""
        last, at_ms, writer = self._log.at(after.to - 1), commit.checkpoint.at_ms, commit.checkpoint.writer
        if last is not None:
            self._behind_ms = max(self._behind_ms, last.timestamp_ms - at_ms)
        if at_ms < self._newest_ms.get(writer, at_ms) - HONEST_MS:
            self._set_back[writer] = after
        self._newest_ms[writer] = at_ms
        for written in records:
            was = written.before
            if was is None or written.repeat or not was.record.holds or was.record.state == "releasing":
                continue
            if written.record.state == "releasing" or not written.record.holds:
                host = written.record.host.encode()
                self._check_release(ledger, commit, written, was, before=before.end(host), after=after.end(host))

    def _check_release(
        self, ledger: LedgerWalk, commit: VisibleCommit, written: Written, was: Written, *, before: int, after: int
    ) -> None:
        record, body = written.record, written.record.body
        if not ledger.commits.in_the_open(record.writer, was.offset, written.offset):
            self._findings.note_partial("releases", "an earlier record was compacted away")
            return
        self._findings.count("releases")
        code = record.reason_code
        if record.state in wire.FINAL and body.get("prepared"):
            ledger.wrong(
                "releases", written.offset, f"{record.key} is {record.state}, but its driver never took it back"
            )
        if record.state in wire.FINAL and was.record.body.get("resources") and record.request.waits_for_survivors:
            ledger.wrong(
                "releases",
                written.offset,
                f"{record.key} is {record.state}, but nobody looked for the processes that it left behind",
            )
        if code not in _CODES:
            self._findings.note_partial("releases", f"this version does not know the reason {code!r}")
        elif code not in _RELEASE_CODES or (code == "prepare-failed" and was.record.state != "preparing"):
            ledger.wrong("releases", written.offset, f"{record.key} is released although nothing ended it ({code})")
        elif code == "deregistered":
            self._check_deregistered(ledger, commit, written, after)
        elif code == "owner-died" and not record.request.has_owner:
            ledger.wrong(
                "releases", written.offset, f"{record.key} is released because its owner died, but it has none"
            )
        elif code == "lease-expired":
            self._was_silent(ledger, commit, written, before)

    def _check_deregistered(self, ledger: LedgerWalk, commit: VisibleCommit, written: Written, after: int) -> None:
        record, base = written.record, commit.checkpoint.base
        worker = record.key.rpartition("/")[0]
        first = record.source - base
        newer = min(self._newer_live(ledger, record, base), default=after)
        if any(first < offset < after for offset in self._deregistrations.get(record.key, ())):
            return
        if any(first < offset < min(newer, after) for offset in self._deregistrations.get(worker, ())):
            return
        if first < self._log.start:
            self._findings.note_partial("releases", "registrations were deleted by retention")
            return
        if self._misses(first, after):
            return
        ledger.wrong("releases", written.offset, f"{record.key} is deregistered, but there is no deregistration")

    def _newer_live(self, ledger: LedgerWalk, record: wire.Allocation, base: int) -> Iterator[int]:
        """The offsets of the same worker's newer live incarnations: a message without incarnation means the newest."""
        worker = record.key.rpartition("/")[0]
        for key in {key for _, key in self._runs.get(worker, ())}:
            other = ledger.now.get(key)
            if other is not None and other.record.source > record.source and other.record.state in _SILENT:
                yield other.record.source - base

    def _was_silent(self, ledger: LedgerWalk, commit: VisibleCommit, written: Written, before: int) -> None:
        record = written.record
        lease_s = record.request.lease_s
        sign = self._last_renewal(record.key, before, record.source - commit.checkpoint.base)
        if lease_s is None and not record.request.has_owner and self._newer(record.key, self._log.end) is None:
            if not self._misses(self._first(record.key), self._log.end):
                ledger.wrong("releases", written.offset, f"the lease of {record.key} is over, but it has none")
        elif lease_s is None:
            self._findings.note_partial("releases", "a lease was set by the manager's configuration")
        elif sign is None:
            self._findings.note_partial("releases", "registrations were deleted by retention")
        elif self._set_back.get(record.writer, NOTHING).covers(sign.offset, record.host.encode()):
            self._findings.note_partial("releases", "a manager's clock was set back while a worker was silent")
        elif not self._misses(self._first(record.key), sign.offset):  # of a newer run, after which this sign is none
            silent_ms = record.since_ms - sign.at_ms
            lease_ms, grace_ms = round(lease_s * 1000), commit.checkpoint.grace_ms
            self._silences.append(WorkerSilence(written.offset, record.key, silent_ms, lease_ms, grace_ms))

    def _misses(self, after: int, before: int) -> bool:
        """Whether the client does not show all messages between these offsets (both exclusive), which is noted."""
        missing = after < before and self._log.holes(after, before) > 0
        if missing:
            self._findings.note_partial("releases", "messages that its client does not show")
        return missing

    def _first(self, key: str) -> int:
        """The offset of the first message of an allocation that the client shows; before the log if it shows none."""
        signs = self._signs.get(key)
        return signs[0].offset if signs else self._log.start - 1

    def _last_renewal(self, key: str, before: int, source: int) -> Sign | None:
        """The last message before an offset that certainly renewed the allocation's lease. A registration that does not
        repeat the one at `source`, to which the allocation is the answer, may have been refused."""
        signs = self._signs_before(key, before)
        answered = next((sign.registration for sign in signs if sign.offset == source), None)
        return next((sign for sign in reversed(signs) if sign.registration in (None, answered)), None)

    def _signs_before(self, key: str, before: int, ledger: LedgerWalk | None = None) -> list[Sign]:
        """The messages before an offset that may have renewed the allocation's lease. Older incarnations renew nothing.
        `ledger`: only a newer incarnation that it knows makes this one an older one; others may have been refused."""
        newer = self._newer(key, before, ledger)
        signs = self._signs.get(key, [])
        return signs[: bisect_left(signs, before if newer is None else newer, key=lambda sign: sign.offset)]

    def _newer(self, key: str, before: int, ledger: LedgerWalk | None = None) -> int | None:
        """The offset of the worker's newer incarnation before an offset; None if there is none. `ledger`: of those that
        it knows."""
        runs = self._runs.get(key.rpartition("/")[0], [])
        if ledger is not None:
            runs = [(offset, run) for offset, run in runs if run == key or run in ledger.now or run in ledger.gone]
        own = next((offset for offset, run in runs if run == key), -1)
        return next((offset for offset, run in runs if own < offset < before and run != key), None)

    # --- at the end ------------------------------------------------------------------------------------

    def finish(self, ledger: LedgerWalk) -> None:
        """Judge the silences, now that the clocks' differences are known, and find leases that are long over."""
        for silence in self._silences:
            if silence.silent_ms + self._behind_ms + HONEST_MS < silence.lease_ms + silence.grace_ms:
                heard, lease, grace = silence.silent_ms / 1000, silence.lease_ms / 1000, silence.grace_ms / 1000
                what = f"the lease of {silence.key} is over after {heard:g} s, but it is {lease:g} s long"
                if grace:
                    what += f", and its manager waits {grace:g} s more"
                ledger.wrong("releases", silence.offset, what)
        for key, written in ledger.now.items():
            self._long_over(ledger, key, written)

    def _long_over(self, ledger: LedgerWalk, key: str, written: Written) -> None:
        """Find a silent worker without an owner whose manager has not ended it long after its lease. After an outage
        each worker has a whole new lease, so the proof needs two commits far apart."""
        request, writer = written.record.request, ledger.commits.writers.get(written.record.writer)
        if written.record.state not in _SILENT or request.has_owner or request.lease_s is None:
            return
        if writer is None or writer.last is None:
            return
        newest = writer.last
        read = max(newest.to, newest.ahead.get(written.record.host, 0))
        signs = self._signs_before(key, read, ledger)
        if not signs or self._misses(signs[-1].offset, read):
            return
        lease_ms = round(request.lease_s * 1000)
        begun = writer.instances[newest.instance]
        times = [each.checkpoint.at_ms - self._behind_ms for each in writer.commits if each.offset >= begun]
        heard_ms = max(signs[-1].at_ms, written.record.since_ms, times[0])
        later = [time for time in times if time > heard_ms + lease_ms + LONG_OVER_MS]
        if later and later[-1] - later[0] > lease_ms + LONG_OVER_MS:
            state = written.record.state
            ledger.wrong("releases", written.offset, f"the lease of {key} is long over, but it is {state}")

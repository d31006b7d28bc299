"""Takes a partition: reads the ledger, fences, and restores the ledger. It refuses to work beside another manager."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

import anyio

from outfitter_proto.bus import BusError, Entry, Writer
from outfitter_proto.codec import encode
from outfitter_proto.names import transactional_id
from outfitter_proto.records import NO_COMMIT, CommitNumber, Host, Token
from outfitter_service.runtime.changelog.numbers import beyond
from outfitter_service.runtime.changelog.restore import Restored, restore, rivals_since, unchanged
from outfitter_service.runtime.changelog.topic_layout import TopicsChangedError
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.processor import same_machine
from outfitter_service.runtime.processor.equipment import Equipment, ReopenError
from outfitter_service.runtime.processor.unrecorded_workers import SearchOfHost, refuse_unrecorded

END_WAIT_S = 20.0
"""Longer than a host writer's transaction can stay open: its 5 s time-out plus at most 10 s until the broker's next
expiry scan."""
RESTORE_REUSE_S = 60.0
"""How long a restore done before fencing may be reused. Must be below delete.retention.ms, however the topic was made.
"""


class ForeignManagerError(RuntimeError):
    """Another manager works for this writer or for its hosts. This manager gives up and does not fence back."""


class Takeover:
    """Takes one partition, also repeatedly. It keeps the ledger that it restored before fencing. It also keeps the
    number of the newest known commit: if another manager has committed since, that one has taken over. `may_fence`:
    the check before fencing has passed, so this manager and this ledger belong together."""

    def __init__(self, equipment: Equipment, *, judges_successors: bool, search: SearchOfHost) -> None:
        """`judges_successors`: whether the ledger is the only source for who works here now. In cluster scope the
        group's coordinator knows. `search` finds the processes of a host's workers."""
        assignment = self._assignment = equipment.assignment
        self._topic_check = equipment.topic_check
        self._limits = equipment.limits
        self._clock = equipment.instruments.clock
        self._log = equipment.reporter.log
        self._judges_successors = judges_successors
        self._search = search
        self._writer_identity = transactional_id(assignment.identity.cluster, assignment.identity.writer)
        self._writer: Writer | None = None
        self._early_restore: tuple[Restored, float, datetime] | None = None
        self._newest_commit: CommitNumber | None = None
        self._warned_of_names = False
        self.may_fence = False

    def note_commit(self, commit: CommitNumber) -> None:
        """The ledger was read or written up to this commit."""
        self._newest_commit = commit

    def clear(self) -> None:
        """Drop all large objects."""
        self._early_restore = None

    # --- before fencing ---

    async def check_before_fencing(self) -> None:
        """Read the ledger before fencing. So a manager on a wrong machine does not disturb the manager that serves
        these hosts. If the ledger is refused, the bus still knows its last writer at the next start.

        Raises:
            ForeignManagerError: another manager works for this writer or for its hosts.
            TopicsChangedError: the ledger was written for other topics.
            UnrecordedWorkersError: an adopted or new ledger lacks workers that still run.
            BusError: the bus did not answer.
        """
        clock = self._clock
        at, at_utc = clock.monotonic(), clock.utc()
        await self._topic_check.check()
        early = await self._read_ledger(taking=self._writer_identity)
        if early is not None:
            refuse_foreign(self._assignment, early, take_over=self._limits.take_over)
            await self._check(early, taken=False)
            self._early_restore = early, at, at_utc
        self.may_fence = True

    async def _read_ledger(self, *, taking: str | None = None) -> Restored | None:
        """The ledger before fencing, or None if a transaction keeps its end open for longer than `END_WAIT_S`.
        `taking`: a writer whose open transaction is not waited for, because fencing ends it."""
        assignment = self._assignment
        ledger = assignment.topics.allocations
        try:
            with assignment.bus.patience.limit(END_WAIT_S):
                end = await assignment.bus.stable_end(ledger, assignment.partition, taking=taking)
        except TimeoutError:
            self._log.warning("a transaction keeps the ledger's end open, taking the partition", after_s=END_WAIT_S)
            return None
        return await restore(assignment.bus, ledger, assignment.partition, assignment.scope, end=end)

    # --- taking ---

    async def fence(self) -> Writer:
        """Take the writer identity, so that its earlier holder can commit nothing more.

        Raises:
            BusError: the bus did not answer, or refuses.
        """
        assignment = self._assignment
        try:
            await self._topic_check.check()
            written = assignment.topics.written(history=self._limits.history is not None)
            writer = await assignment.bus.open_writer(self._writer_identity, assignment.partition, topics=written)
        except BusError:
            self._early_restore = None  # the topic may change until the next attempt
            raise
        self._writer = writer
        return writer

    async def restore(self, writer: Writer) -> Restored:
        """Restore the ledger after fencing, when nobody else writes to it.

        Raises:
            ForeignManagerError: another manager works for this writer or for its hosts.
            TopicsChangedError: the ledger was written for other topics, or has gone back.
            UnrecordedWorkersError: an adopted or new ledger lacks workers that still run.
            BusError: the ledger could not be read.
        """
        restored = await self._reuse_early_restore() or await self._restore()
        refuse_foreign(self._assignment, restored, take_over=self._limits.take_over)
        is_adopted = await self._check(restored, taken=True) or (self._limits.adopt and restored.checkpoint is None)
        _refuse_older(self._assignment, restored, self._newest_commit)
        if self._judges_successors:
            self._refuse_successor(restored)
        if restored.checkpoint is None:
            restored = await self._announce(writer) or restored
        if is_adopted:
            ledger = restored.ledger
            ledger.resume(commit=ledger.commits, token=Token(beyond(ledger.token, self._clock.utc())))
        return restored

    async def _check(self, restored: Restored, *, taken: bool) -> bool:
        """See `TopicCheck.check_restored`. A ledger that is adopted, or new, lacks no worker that still runs here.
        Returns whether it is adopted."""
        adopted = await self._topic_check.check_restored(restored, taken=taken)
        if adopted is not None or restored.checkpoint is None:
            await refuse_unrecorded(self._assignment, restored, adopted, self._search)
        return adopted is not None

    async def _restore(self) -> Restored:
        assignment = self._assignment
        return await restore(assignment.bus, assignment.topics.allocations, assignment.partition, assignment.scope)

    async def _reuse_early_restore(self) -> Restored | None:
        """The restore done before fencing, if nothing was written since: a long ledger is restored once."""
        if self._early_restore is None:
            return None
        (early, at, at_utc), self._early_restore = self._early_restore, None
        assignment = self._assignment
        # both clocks: one stops while the machine is suspended, somebody may set the other
        age_s = max(self._clock.monotonic() - at, abs((self._clock.utc() - at_utc).total_seconds()))
        if age_s > RESTORE_REUSE_S:
            return None
        return await unchanged(
            assignment.bus, assignment.topics.allocations, assignment.partition, assignment.scope, early
        )

    async def _announce(self, writer: Writer) -> Restored | None:
        """Write a new host's record before reading where its input begins. So either the sweeper knows of the host, or
        the host knows what the sweeper has claimed (host_registry.py)."""
        host = self._assignment.identity.host
        if host is None:
            return None
        now = self._clock.utc()
        record = Host(host=host, manager=self._assignment.manager(), since=now)
        await writer.commit([(self._assignment.topics.allocations, [Entry(record.key.encode(), encode(record))])])
        if writer.must_reopen:
            raise ReopenError("a request to the bus was retried: the writer is replaced")
        restored = await self._restore()
        refuse_foreign(self._assignment, restored, take_over=self._limits.take_over)
        return restored

    # --- other managers ---

    async def warn_of_other_names(self, restored: Restored) -> None:
        """Warn, once, if this machine has live allocations under another host name."""
        if not self._warned_of_names:
            self._warned_of_names = await same_machine.warn(self._assignment, restored)

    async def check_for_rivals(self, opened: anyio.Event, end: int) -> None:
        """Check for managers of the other scope again after the first commit (`opened`), from the restore's `end` on.
        Two managers that start at the same moment see each other only then."""
        assignment = self._assignment
        await opened.wait()
        try:
            rivals = await rivals_since(
                assignment.bus, assignment.topics.allocations, assignment.partition, assignment.scope, end
            )
        except BusError as error:
            self._log.debug("cannot check for managers of the other scope", error=str(error))
            return
        _refuse_rivals(assignment, rivals)

    async def refuse_if_replaced(self) -> None:
        """Read the ledger before fencing back, and give up if another manager has taken over.

        The manager skips this while the bus says that it holds the writer: the ledger may be long, and a failed
        transaction stays open until its time-out. If it cannot read the ledger now, it checks after fencing.
        """
        if self._newest_commit is None or await self._is_held():
            return
        with suppress(BusError):
            restored = await self._read_ledger()
            if restored is not None:
                self._refuse_successor(restored)

    async def _is_held(self) -> bool:
        """Whether the bus says that this manager was the last to take the writer identity."""
        try:
            return (
                self._writer is not None
                and await self._assignment.bus.tenure(self._writer_identity) == self._writer.tenure
            )
        except BusError:
            return False

    def _refuse_successor(self, restored: Restored) -> None:
        """Give up if another manager has written since this one did. If each fenced the other, neither could work."""
        identity, last = self._assignment.identity, restored.checkpoint
        if self._newest_commit is None or last is None or last.instance == identity.instance:
            return
        if last.commit > self._newest_commit:
            raise ForeignManagerError(
                f"another manager (instance {last.instance}, machine {last.machine_id or 'unknown'}) has taken over "
                f"host {identity.host!r} at {last.at:%Y-%m-%dT%H:%M:%SZ}; this one gives up"
            )


def _refuse_older(assignment: Assignment, restored: Restored, known: CommitNumber | None) -> None:
    """Give up if the ledger has lost commits that this manager knows: its devices would be lent again. Of a writer only
    the last commit may be undecided, so one missing commit is no sign."""
    last = restored.checkpoint.commit if restored.checkpoint is not None else NO_COMMIT
    if known is not None and last + 1 < known:
        raise TopicsChangedError(
            f"the ledger in {assignment.topics.allocations}/{assignment.partition} has gone back from commit {known} "
            f"to {last}: a broker's disk was restored from an older copy. Start no manager on it, and do what the page "
            "service/recover.md says of a disk from yesterday"
        )


def refuse_foreign(assignment: Assignment, restored: Restored, *, take_over: bool) -> None:
    """Give up if managers of the other scope, or of another machine, work for this writer's hosts. `take_over`: accept
    a ledger that another machine wrote.

    Raises:
        ForeignManagerError: they do.
    """
    identity = assignment.identity
    _refuse_rivals(assignment, restored.rivals)
    last = restored.checkpoint
    own_id = identity.machine_id
    if identity.host is None or last is None or take_over:
        return
    if not (own_id and last.machine_id) or last.machine_id == own_id:
        return
    raise ForeignManagerError(
        f"the ledger of host {identity.host!r} was written by machine {last.machine_id}, this is {own_id}: "
        "two machines must not serve one host's name. If that machine is gone for good, start with --take-over; "
        "else give this one another --host"
    )


def _refuse_rivals(assignment: Assignment, rivals: list[str]) -> None:
    """Give up if there are `rivals`: writers of the other scope."""
    identity = assignment.identity
    if rivals:
        raise ForeignManagerError(
            f"the ledger in {assignment.topics.allocations}/{assignment.partition} is written by "
            f"{', '.join(rivals[:3])} as well: managers of host scope and of cluster scope must not share topics. "
            f"This one ({identity.writer}, {identity.scope} scope) gives up; give it another --cluster, or stop "
            "the others and create the topics again"
        )

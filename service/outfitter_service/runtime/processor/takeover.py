"""Takes a partition: looks before it fences, restores the ledger, and refuses to work beside another manager."""

from __future__ import annotations

from datetime import datetime

import anyio

from outfitter_proto.bus import BusAuthorizationError, BusError, Entry, Writer
from outfitter_proto.codec import encode
from outfitter_proto.names import transactional_id
from outfitter_proto.records import CommitNumber, Host
from outfitter_service.runtime.changelog.restore import Restored, restore, rivals_since, unchanged
from outfitter_service.runtime.changelog.shape import Ground
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.processor.limits import Limits
from outfitter_service.runtime.processor.reporting.reporter import CommitReporter
from outfitter_service.runtime.processor.taken_partition import RecycledError

LOOK_WITHIN_S = 20.0
"""A host's transactions are ended by the broker sooner: 5 s, and at most 10 until it looks for such."""
SEEN_S = 60.0
"""How long what was read before the fence counts after it: no longer than tombstones stay, whoever makes the topic."""


class ForeignManagerError(RuntimeError):
    """Another manager works for this writer, or for its hosts: this one gives up instead of fencing back."""


class Takeover:
    """Takes one partition, again and again. It remembers what it has read before the fence, and the newest commit that
    it knows of: whoever has committed since then has taken over."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        ground: Ground,
        limits: Limits,
        clock: Clock,
        reporter: CommitReporter,
        judges_successors: bool,
    ) -> None:
        """`judges_successors`: the ledger says whether somebody else works here now; nobody else does."""
        self._assignment = assignment
        self._ground = ground
        self._limits = limits
        self._clock = clock
        self._log = reporter.log
        self._judges_successors = judges_successors
        self._writer_identity = transactional_id(assignment.identity.cluster, assignment.identity.writer)
        self._writer_tenure: str | None = None
        self._seen: tuple[Restored, float, datetime] | None = None
        self._newest_commit: CommitNumber | None = None

    def worked_until(self, commit: CommitNumber) -> None:
        """The ledger was read, or written to, up to this commit."""
        self._newest_commit = commit

    def clear(self) -> None:
        """Hold nothing large any more."""
        self._seen = None

    # --- looking ---

    async def look_before_fencing(self) -> None:
        """A machine that must not serve these hosts does not disturb the one that does."""
        clock = self._clock
        at, at_utc = clock.monotonic(), clock.utc()
        try:
            await self._ground.look()
            seen = await self._look(taking=self._writer_identity)
            if seen is not None:
                _refuse_foreign(self._assignment, seen, take_over=self._limits.take_over)
                await self._ground.judge(seen, taken=False)
                self._seen = seen, at, at_utc
        except BusError as error:
            # taking the partition meets that again
            self._log.debug("cannot look before the partition is taken", error=str(error))

    async def _look(self, *, taking: str | None = None) -> Restored | None:
        """What the ledger says, before anybody is fenced; None where it cannot be read: taking the partition meets that
        again, and says so. A transaction of this very writer is no reason to wait for long: taking the partition ends
        it. With `taking` it is none at all: a crash leaves one open, and whoever comes next begins at once."""
        assignment = self._assignment
        ledger = assignment.topics.allocations
        end = 0
        try:
            with anyio.move_on_after(LOOK_WITHIN_S) as waiting:
                end = await assignment.bus.stable_end(ledger, assignment.partition, taking=taking)
            if waiting.cancelled_caught:
                self._log.warning("the ledger's end stays undecided, taking the partition", after_s=LOOK_WITHIN_S)
                return None
            return await restore(assignment.bus, ledger, assignment.partition, assignment.scope, end=end)
        except BusError:
            return None

    # --- taking ---

    async def fence(self) -> Writer:
        """Take the writer identity: whoever had it cannot commit any more.

        Raises:
            BusError: the bus did not answer, or refuses.
        """
        assignment = self._assignment
        try:
            await self._ground.look()
            written = assignment.topics.written(history=self._limits.history is not None)
            writer = await assignment.bus.open_writer(self._writer_identity, assignment.partition, topics=written)
        except BusError:
            self._seen = None  # who knows what becomes of the topic meanwhile
            raise
        self._writer_tenure = writer.tenure
        return writer

    async def restore(self, writer: Writer) -> Restored:
        """Restore the ledger, now that nobody else writes to it.

        Raises:
            ForeignManagerError: another manager works for this writer or for its hosts.
            BusError: the ledger could not be read.
        """
        restored = await self._restore_what_was_seen() or await self._restore()
        _refuse_foreign(self._assignment, restored, take_over=self._limits.take_over)
        await self._ground.judge(restored, taken=True)
        if self._judges_successors:
            self._refuse_successor(restored)
        if restored.checkpoint is None:
            return await self._announce(writer) or restored
        return restored

    async def _restore(self) -> Restored:
        assignment = self._assignment
        return await restore(assignment.bus, assignment.topics.allocations, assignment.partition, assignment.scope)

    async def _restore_what_was_seen(self) -> Restored | None:
        """What the look before the fence has read, if nothing was written since: a long ledger is replayed once."""
        if self._seen is None:
            return None
        (seen, at, at_utc), self._seen = self._seen, None
        assignment = self._assignment
        # both clocks: one stands still while the machine is suspended, the other may be set
        if self._clock.monotonic() - at > SEEN_S or abs((self._clock.utc() - at_utc).total_seconds()) > SEEN_S:
            return None
        return await unchanged(
            assignment.bus, assignment.topics.allocations, assignment.partition, assignment.scope, seen
        )

    async def _announce(self, writer: Writer) -> Restored | None:
        """A host that is new to the ledger is named there before the ledger is read for where its input begins: so the
        sweeper knows of it, or it knows of what the sweeper has claimed (host_registry.py)."""
        host = self._assignment.identity.host
        if host is None:
            return None
        now = self._clock.utc()
        named = Host(host=host, manager=self._assignment.manager(), since=now)
        await writer.commit([(self._assignment.topics.allocations, [Entry(named.key.encode(), encode(named))])])
        if writer.tainted:
            raise RecycledError("a request to the bus was retried: the writer is replaced")
        restored = await self._restore()
        _refuse_foreign(self._assignment, restored, take_over=self._limits.take_over)
        return restored

    async def batch_bytes(self, writer: Writer) -> int:
        """What one commit may write: as the writer says, and no more than is taken by the topics that it writes to."""
        assignment = self._assignment
        most = writer.max_batch_bytes
        for name in assignment.topics.written(history=self._limits.history is not None):
            try:
                limit = (await assignment.bus.topic(name)).config.get("max.message.bytes")
            except BusAuthorizationError:
                continue  # the commit says which right is missing: who may write may look
            if limit is not None and name != assignment.topics.dead_letters:
                # a batch has headers, and a step in history is more than its record
                most = min(most, int(limit) * 15 // 16)
        return most

    # --- other managers ---

    async def look_for_rivals(self, opened: anyio.Event, end: int) -> None:
        """Two managers of different scopes that start at the same moment do not see each other before they have
        written: look once more after the first commit, from the `end` of what was read before it."""
        assignment = self._assignment
        await opened.wait()
        try:
            found = await rivals_since(
                assignment.bus, assignment.topics.allocations, assignment.partition, assignment.scope, end
            )
        except BusError as error:
            self._log.debug("cannot look for managers of the other scope", error=str(error))
            return
        _refuse_rivals(assignment, found)

    async def refuse_if_replaced(self) -> None:
        """Look before fencing back, unless nobody can have taken over: the ledger may be long, and a transaction that
        failed is open in it until it has timed out. What cannot be read now is looked at again once the partition is
        taken."""
        if self._newest_commit is None or await self._is_held():
            return
        seen = await self._look()
        if seen is not None:
            self._refuse_successor(seen)

    async def _is_held(self) -> bool:
        """Whether the bus says that nobody has taken the writer identity since this one did."""
        try:
            return (
                self._writer_tenure is not None
                and await self._assignment.bus.tenure(self._writer_identity) == self._writer_tenure
            )
        except BusError:
            return False

    def _refuse_successor(self, restored: Restored) -> None:
        """Somebody who wrote since this one did works here now, and goes on when it finds itself fenced by mistake."""
        identity, found = self._assignment.identity, restored.checkpoint
        if self._newest_commit is None or found is None or found.instance == identity.instance:
            return
        if found.commit > self._newest_commit:
            raise ForeignManagerError(
                f"another manager (instance {found.instance}, machine {found.machine_id or 'unknown'}) has taken over "
                f"host {identity.host!r} at {found.at:%Y-%m-%dT%H:%M:%SZ}; this one gives up"
            )


def _refuse_foreign(assignment: Assignment, restored: Restored, *, take_over: bool) -> None:
    identity = assignment.identity
    _refuse_rivals(assignment, restored.rivals)
    found = restored.checkpoint
    mine = identity.machine_id
    if identity.host is None or found is None or take_over:
        return
    if not (mine and found.machine_id) or found.machine_id == mine:
        return
    raise ForeignManagerError(
        f"the ledger of host {identity.host!r} was written by machine {found.machine_id}, this is {mine}: "
        "two machines must not serve one host's name. If that machine is gone for good, start with --take-over; "
        "else give this one another --host"
    )


def _refuse_rivals(assignment: Assignment, rivals: list[str]) -> None:
    identity = assignment.identity
    if rivals:
        raise ForeignManagerError(
            f"the ledger in {assignment.topics.allocations}/{assignment.partition} is written by "
            f"{', '.join(rivals[:3])} as well: managers of host scope and of cluster scope must not share topics. "
            f"This one ({identity.writer}, {identity.scope} scope) gives up; give it another --cluster, or stop "
            "the others and make the topics anew"
        )

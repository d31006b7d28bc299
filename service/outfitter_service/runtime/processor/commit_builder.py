"""Opens and seals the commits of a tenure. It knows when they are due, and what they write besides decisions."""

from __future__ import annotations

from outfitter_proto.records import Checkpoint, CommitNumber
from outfitter_service.core.decide import Rules
from outfitter_service.runtime.changelog.encoding import checkpoint
from outfitter_service.runtime.changelog.snapshots import Snapshots
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.processor.commit.batch import Batch
from outfitter_service.runtime.processor.commit.pending_commit import PendingCommit, Sealed
from outfitter_service.runtime.processor.commit.quotas import Quotas
from outfitter_service.runtime.processor.event_queue import EventQueue, StopRequest
from outfitter_service.runtime.processor.host_announcer import HostAnnouncer
from outfitter_service.runtime.processor.limits import Limits
from outfitter_service.runtime.processor.tenure import Tenure


class CommitBuilder:
    """The commits of one tenure. Host records, queue positions, snapshots and summaries of dead letters may be spread
    over several commits."""

    def __init__(
        self,
        tenure: Tenure,
        rules: Rules,
        limits: Limits,
        snapshots: Snapshots,
        quotas: Quotas,
        event_queue: EventQueue,
        clock: Clock,
    ) -> None:
        self._tenure = tenure
        self._rules = rules
        self._limits = limits
        self._snapshots = snapshots
        self._quotas = quotas
        self._event_queue = event_queue
        self._clock = clock
        self._announcer = HostAnnouncer(tenure.assignment, tenure.ledger, most=limits.hosts)
        self._stale_positions = set(tenure.ledger.hosts)  # the last manager may have left these to its next commit
        self._written_to = tenure.cursor.position  # the next offset after the last commit's input
        self._written_at = 0.0
        self.most_events = limits.batch_records

    def open(self, after: PendingCommit | Cursor, *, opening: bool = False) -> PendingCommit:
        """A new commit that begins where `after` ends in the input. `opening`: it is the first one of the tenure."""
        batch = Batch(
            self._tenure.ledger,
            self._rules,
            self._clock.utc(),
            base=self._tenure.cursor.base,
            on_new_host=self._announcer.on_new_host,
            history=self._limits.history is not None,
            quotas=self._quotas,
        )
        ahead = {key: offset for key, offset in after.ahead.items() if offset > after.position}
        return PendingCommit(batch=batch, position=after.position, ahead=ahead, opening=opening)

    def start_slice(self, batch: Batch) -> None:
        """Set the batch's time, announce waiting hosts and write waiting answers, as far as there is room."""
        batch.set_time(self._clock.utc())
        self._announcer.announce_waiting(batch, self.most_events)
        batch.repeat_waiting(batch.full, self.most_events)

    def is_due(self, commit: PendingCommit) -> bool:
        """Whether the commit has anything to write (heartbeats move leases in memory only)."""
        if commit.opening or not commit.batch.output.empty or self._event_queue.notes or self._snapshots.underway:
            return True
        if self._tenure.signs_of_life.is_news:
            return True
        if commit.position - self._written_to >= self._limits.checkpoint_records or self._quotas.rewrites.renewed:
            return True
        return self._clock.monotonic() - self._written_at >= self._limits.checkpoint_interval_s

    def seal(self, commit: PendingCommit, stop: StopRequest, *, unjudged_deaths: int) -> Checkpoint:
        """Complete this commit, and return its checkpoint. Its follow-ups are decided for the next commit.
        `unjudged_deaths`: how many deaths the manager has seen and not queued yet."""
        event_queue, batch, output = self._event_queue, commit.batch, commit.batch.output
        ledger, assignment, full = self._tenure.ledger, self._tenure.assignment, batch.full
        stale = self._stale_positions = self._stale_positions | batch.effects.hosts
        self._quotas.rewrites.take_renewed()
        self._stale_positions = {host for host in stale if not batch.renumber(host, full)}
        closing = False
        if stop.requested:
            batch.sum_up(self._quotas.letters.due(all_of_them=True))
            closing = self._announcer.say_stopped(batch, full, hosts=stop.mark_stopped)
        output.add_piece(self._snapshots.piece(ledger, batch.now, commit=CommitNumber(ledger.commits + 1)))
        output.add_notes(event_queue.notes)
        ended_boot_id = event_queue.ended_boot_id
        deaths_left = ended_boot_id is not None and bool(unjudged_deaths or event_queue.deaths())
        commit.seal(
            Sealed(
                notes=len(event_queue.notes), stale_positions=frozenset(stale), deaths_left=deaths_left, closing=closing
            )
        )
        event_queue.extend(batch.effects.follow_ups)
        ledger.seal()
        return checkpoint(
            assignment.identity,
            ledger,
            commit.input_position(self._tenure.cursor, assignment.partition, self._written_to),
            shape=self._tenure.shape,
            grown=assignment.scope.grown,
            at=batch.now,
            # the ended boot stays in the checkpoint until all its deaths are committed: so a crash loses none
            boot_id=ended_boot_id if deaths_left else assignment.identity.boot_id,
            snapshot=self._snapshots.newest(output.piece),
            beat_s=self._tenure.signs_of_life.say(),
            lease_grace_s=self._limits.lease_grace_s,
        )

    # --- afterwards ---

    def settled(self, commit: PendingCommit) -> None:
        """The commit succeeded, or nothing of it had to be written."""
        if commit.done:
            self._written_to, self._written_at = commit.position, self._clock.monotonic()
            self._snapshots.settle(commit.batch.output.piece, commit.batch.output.history_bytes)
        for payer, omitted in commit.batch.quota_use.omitted.items():
            self._quotas.letters.omit(payer, omitted)

    def taken_back(self, *commits: PendingCommit) -> None:
        """These commits failed: later commits write their queue positions, answers, summaries and snapshot pieces
        again."""
        self._snapshots.take_back()
        self._tenure.signs_of_life.take_back()
        for commit in commits:
            quota_use = commit.batch.quota_use
            self._quotas.letters.give_back(quota_use.used)
            self._quotas.rewrites.give_back(quota_use.rewritten)
            for host, key in quota_use.repeated:
                self._quotas.rewrites.postpone(host, key)
            for payer, omitted in quota_use.summed.items():
                self._quotas.letters.omit(payer, omitted)
            self._stale_positions |= {
                host for host in commit.sealed.stale_positions if host in self._tenure.ledger.hosts
            }
        self._announcer = HostAnnouncer(self._tenure.assignment, self._tenure.ledger, most=self._limits.hosts)

    def begin_again(self) -> None:
        """The cursor has moved to the input's new beginning."""
        self._written_to = self._tenure.cursor.position

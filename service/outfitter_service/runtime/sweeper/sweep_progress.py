"""The progress of a partition's sweeper, and its checkpoints."""

from __future__ import annotations

from msgspec import UNSET

from outfitter_proto.keys import sweeper_writer
from outfitter_proto.records import NO_COMMIT, NO_TOKEN, Checkpoint, CommitNumber, InputPosition
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.identity import Identity

CHECKPOINT_RECORDS, CHECKPOINT_S = 20_000, 600.0
"""After so many skipped registrations, or seconds, the sweeper writes its position although it has swept nothing."""


class SweepProgress:
    """How far a partition is swept."""

    def __init__(self, identity: Identity, partition: int, clock: Clock) -> None:
        self._identity = identity
        self._partition = partition
        self._clock = clock
        self._commits = NO_COMMIT
        self._written_at = 0.0
        self.position = 0
        """The input's next offset to sweep."""
        self.claimed = 0
        """The sweeper answers messages before this offset whose hosts have no manager."""
        self.input_id = ""
        """The id of the registrations topic."""
        self._ledger_id = ""

    def begin(self, last: Checkpoint | None, input_id: str, ledger_id: str) -> int | None:
        """Continue after the sweeper's `last` checkpoint. Returns the offset to read from (None: the first
        registration). `input_id`, `ledger_id`: the ids of the topics of registrations and of the ledger. A checkpoint
        for other topics counts for nothing: the managers that it relies on are not in this ledger."""
        self.input_id, self._ledger_id = input_id, ledger_id
        self._commits = last.commit if last is not None else NO_COMMIT
        self._written_at = self._clock.monotonic()
        counts = last is not None and last.input.topic_id == input_id and last.ledger_id in (UNSET, ledger_id)
        self.claimed = (last.input.claimed or last.input.to) if last is not None and counts else 0
        return last.input.to if last is not None and counts else None

    def read_from(self, position: int) -> None:
        """Reading begins at `position`."""
        self.position = position

    def skip_to(self, start: int) -> None:
        """All messages before `start` are deleted or swept."""
        self.position = self.claimed = start

    def claim(self, end: int) -> None:
        """From the next checkpoint on, the sweeper answers messages before `end`."""
        self.claimed = end

    def is_due(self, position: int) -> bool:
        """Whether this position must be written although no dead letter is due."""
        skipped = position - self.position
        if skipped >= CHECKPOINT_RECORDS:
            return True
        return skipped > 0 and self._clock.monotonic() - self._written_at >= CHECKPOINT_S

    def checkpoint(self, position: int) -> Checkpoint:
        """The next commit's checkpoint, which ends at `position`."""
        identity = self._identity
        return Checkpoint(
            writer=sweeper_writer(self._partition),
            instance=identity.instance,
            cluster=identity.cluster,
            scope="sweeper",
            commit=CommitNumber(self._commits + 1),
            token=NO_TOKEN,
            input=InputPosition(
                topic_id=self.input_id,
                partition=self._partition,
                from_=self.position,
                to=position,
                claimed=self.claimed if self.claimed > position else UNSET,
            ),
            at=self._clock.utc(),
            machine_id=identity.machine_id,
            boot_id=identity.boot_id,
            ledger_id=self._ledger_id,
        )

    def committed(self, checkpoint: Checkpoint) -> None:
        """This checkpoint is written."""
        self._commits = checkpoint.commit
        self.position = checkpoint.input.to
        self._written_at = self._clock.monotonic()

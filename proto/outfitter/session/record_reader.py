"""Reads a host's ledger records for a session, and applies those that concern its worker to the watch.

Three kinds of records matter: the worker's own, its host's, which names the manager, and for a while the manager's
checkpoints, which show how far it has read. The reader publishes nothing: the session does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from outfitter.errors import AllocationEndedError
from outfitter.session import status
from outfitter.session.host_partition import HostPartition
from outfitter.session.watch import AllocationWatch
from outfitter_proto import codec, keys
from outfitter_proto.bus.port import Message, OffsetOutOfRangeError
from outfitter_proto.records import (
    FINAL_STATES,
    HOLDING_STATES,
    Allocation,
    AllocationState,
    Checkpoint,
    Host,
    LedgerRecord,
    ManagerIdentity,
    Register,
)

_CAUGHT_UP_POLL = 0.02

log = logging.getLogger("outfitter")


class RecordReader:
    """The records of one incarnation, from the ledger to `allocation_watch`."""

    def __init__(
        self,
        host_partition: HostPartition,
        allocation_watch: AllocationWatch,
        registration: Register,
        *,
        attach: bool,
    ) -> None:
        """`registration`: the session's request. `attach`: another process registered, and keeps the lease."""
        self.new_manager = False
        """Before the first answer, a manager has appeared since the last `answer_new_manager`. It may not have read the
        registration, because messages from before it may have become dead letters."""
        self.registered_anew = False
        """The allocation is over, and the registration began another one under the same key, which nobody uses."""
        self._host_partition = host_partition
        self._watch = allocation_watch
        self._lease = allocation_watch.lease
        self._registration = registration
        self._attach = attach
        self._key = keys.allocation_key(registration.host, registration.worker, registration.incarnation).encode()
        self._host_key = keys.host_key(registration.host).encode()
        self._known_managers: set[str] = set()
        self._catch_up_to: int | None = None  # the end of the ledger when the lease was found to be over
        self._registering = False
        self._missing = False  # the ledger was made anew, and the allocation was not found there yet
        self._reached = 0  # the input offset before which the manager has read everything
        self._fetching_since = self._fetched_before = 0.0  # the beginnings of the last fetch and of the one before it
        self.watcher: ManagerIdentity | Checkpoint | None = None
        """Who says which processes the manager can watch: the newest record that shows it. None before the first
        answer's commit was read."""
        self._logged_left_out: set[str] = set()

    @property
    def record(self) -> Allocation | None:
        """The newest record of this incarnation, None before the first."""
        return self._watch.read().record

    @property
    def has_answered(self) -> bool:
        """Whether the bus has answered since its last error; see `Reader.has_answered`."""
        return self._host_partition.has_answered

    def answer_new_manager(self) -> None:
        """Note that the session has registered again because of the new manager, or need not."""
        self.new_manager = False

    # --- reading ---------------------------------------------------------------------------------------

    async def fetch(self) -> None:
        """Read the next records and apply them. May be called again after any error.

        Raises:
            BusError: the bus did not answer, or refuses to.
        """
        if self._host_partition.position is None:
            raise RuntimeError("the session is not open")
        if self._host_partition.is_check_due():
            await self.check_partition()
        await self._host_partition.follow()
        self._fetched_before, self._fetching_since = self._fetching_since, self._lease.clock()
        try:
            messages = await self._host_partition.fetch()
        except OffsetOutOfRangeError as error:
            # Compaction has deleted records that we had not read. The first record of our key is newer than ours.
            await self._host_partition.seek(error.start)
            self._catch_up_to = None
            return
        for message in messages:
            if message.key == self._key:
                if message.value is None:
                    await self.check_partition()
                    if self._host_partition.is_left:
                        return  # not deleted, but moved
                self._apply_own(message.value)
            elif message.key == self._host_key:
                self._apply_host(_decoded(message))
            elif message.key in self._host_partition.checkpoint_keys and self._needs_checkpoint:
                self._apply_checkpoint(_decoded(message))

    async def read_to(self, end: int) -> None:
        """Fetch until the offset `end`."""
        while (position := self._host_partition.position) is not None and position < end:
            await self.fetch()

    async def wait_until_caught_up(self) -> None:
        """Wait until `fetch`, in another task, has read all that was committed at the first call. May be cancelled and
        called again."""
        end = self._catch_up_to
        if end is None:
            end = self._catch_up_to = await self._host_partition.stable_end()
        while self._host_partition.is_behind(end) and not self._watch.read().over:  # noqa: ASYNC110  (no event)
            await anyio.sleep(_CAUGHT_UP_POLL)

    async def check_partition(self) -> None:
        """Compute the host's partition again: partitions may have been added, or the ledger made anew."""
        topic_id = self._host_partition.topic_id
        if await self._host_partition.has_changed():
            # records in this partition do not answer messages in the former one
            self._lease.withdraw_claims()
            self._catch_up_to = None
            self._missing = self._missing or self._host_partition.topic_id != topic_id

    # --- answers to registrations ----------------------------------------------------------------------

    @contextmanager
    def registering(self) -> Iterator[None]:
        """A context in which the session publishes a registration. Its answer may overtake the acknowledgement."""
        self._reached, self._registering = 0, True
        try:
            yield
        finally:
            self._registering = False

    def claim(self, sent_at: float, offset: int) -> None:
        """Note an acknowledged registration; see `Lease.claim`."""
        self._lease.claim(sent_at, offset)
        self._note_reached(self._reached)

    def _note_reached(self, reached: int) -> None:
        """The manager had read all before offset `reached`, and the record in the watch stood."""
        if self._lease.answer(reached):
            self._catch_up_to = None
            self._watch.touch()

    # --- applying records ------------------------------------------------------------------------------

    def _apply_host(self, record: LedgerRecord | None) -> None:
        """Before the first answer, note each new manager. After it, check whether the manager watches this process."""
        if not isinstance(record, Host):
            return
        if self._missing:
            self._lease.doubt()
        manager = record.manager
        if self._watch.read().answered:
            self.watcher = manager
            self._update_watched()
        elif manager.stopped_at is None:
            self.new_manager = self.new_manager or manager.instance not in self._known_managers
            self._known_managers.add(manager.instance)

    @property
    def _needs_checkpoint(self) -> bool:
        """Whether the session needs checkpoints now. There is one in each commit, so it skips most of them."""
        waits = self._registering or self._lease.claimed or self.watcher is None
        return not self._attach and self.record is not None and waits

    def _apply_checkpoint(self, record: LedgerRecord | None) -> None:
        """Read from a commit's checkpoint who watches this process and how far the manager had read."""
        if not isinstance(record, Checkpoint):
            return
        if self.watcher is None:
            self.watcher = record
            self._update_watched()
        if record.input.partition == self._host_partition.number:
            self._reached = max(record.input.to, (record.input.ahead or {}).get(self._registration.host, 0))
            self._note_reached(self._reached)

    def _update_watched(self) -> None:
        """Update whether the manager watches this process."""
        owner, record = self._registration.owner, self.record
        if self._attach or owner is None or self.watcher is None:
            return
        watched = self.watcher.watches(owner) and not (record is not None and record.unwatched)
        if self._lease.set_watched(watched):
            self._watch.touch()

    def _apply_own(self, value: bytes | None) -> None:
        if value is None:
            why = f"allocation {self._key.decode()} has ended"
            self._watch.close(AllocationEndedError(why, record=self.record))
            return
        try:
            record = codec.decode_ledger(value, key=self._key)
        except codec.WireError as error:
            log.warning("skipped a record that cannot be read: %s", error)
            return
        if isinstance(record, Allocation):
            self._apply_allocation(record)

    def _apply_allocation(self, record: Allocation) -> None:
        before = self.record
        if before is not None and (record.source != before.source or _is_granted_anew(before, record)):
            # the first allocation ended so long ago that the manager has deleted its record, or is in another ledger
            self.registered_anew = True
            how = "registered" if record.source != before.source else "granted"
            why = f"allocation {record.key} had ended, and was {how} anew"
            self._watch.close(AllocationEndedError(why, record=before))
            return
        if not self._attach:  # else another process keeps the lease
            self._set_lease(record.request.lease_s)
        if record.warnings and self.record is None:
            log.warning("%s: %s", record.key, "; ".join(record.warnings))
        if record.state == AllocationState.PENDING:
            log.info("%s waits: %s", record.key, record.reason)
        self._log_left_out(record)
        self._missing = False
        self._lease.trust()
        self._watch.post(record)
        self._update_watched()

    def _log_left_out(self, record: Allocation) -> None:
        left_out = status.left_out(record)
        for name in left_out.keys() - self._logged_left_out:
            log.warning("%s: variable %r of its record is not set: %s", record.key, name, left_out[name])
        self._logged_left_out |= left_out.keys()

    def _set_lease(self, seconds: float | None) -> None:
        """Set the lease's length. A worker without a lease may get one later, if the manager cannot watch its owner."""
        if seconds is not None and self._lease.seconds is None and self.record is not None:
            # At the beginning of the fetch before the last one the lease did not exist, even if the reader prefetches.
            self._lease.begin(self._fetched_before)
        self._lease.grant(seconds)


def _is_granted_anew(before: Allocation, after: Allocation) -> bool:
    """Whether a manager has read the same registration once more, without knowing its first grant: in a ledger that was
    made anew, or restored from a backup of before that grant. A grant's token never changes."""
    if before.state not in HOLDING_STATES or after.state in FINAL_STATES or after.state == AllocationState.RELEASING:
        return False
    return after.token != before.token


def _decoded(message: Message) -> LedgerRecord | None:
    """The record of another key's message; None if it was deleted or cannot be read."""
    try:
        return codec.decode_ledger(message.value, key=message.key) if message.value is not None else None
    except codec.WireError:
        return None

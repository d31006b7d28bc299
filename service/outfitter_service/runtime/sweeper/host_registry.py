"""The hosts of a partition that have a manager, according to the ledger. The sweeper checks this before it answers.

Either the host's manager or the sweeper answers a message, never both. Each first writes its intention into the ledger,
and then reads the ledger up to this record. Both write to one partition, so one of the two records comes first:

- The manager of a new host writes the host's record (`@host/…`), then reads. Its input begins where the sweeper's claim
  ends, and its first checkpoint records that for good (`InputPosition.begin`).
- The sweeper writes a claim (`InputPosition.claimed`), then reads. It answers messages of hosts without a record: a
  manager that comes later sees the claim. Messages of a host with a record but no checkpoint wait for the checkpoint.

So a host counts as having a manager from its first checkpoint on, whether that manager runs or not.
"""

from __future__ import annotations

import enum

import anyio
import structlog

from outfitter_proto.bus import Bus, Message
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_ledger
from outfitter_proto.keys import CHECKPOINT, HOST, checkpoint_key, host_of, sweeper_writer, writer_names, writer_of
from outfitter_proto.records import Checkpoint
from outfitter_service.runtime.changelog.ledger_format import refusal
from outfitter_service.runtime.changelog.restore import LedgerRefusedError
from outfitter_service.runtime.clock import Clock

log = structlog.get_logger("outfitter.sweeper")

ARRIVAL_S = 60.0
"""The most seconds between a host's record and its first checkpoint, which usually takes milliseconds. If it takes
longer, the manager was killed in between, and will write the record again."""
SLICE = 1000
"""Records in one read."""
PAUSE_S = 0.02
"""Seconds between two reads: so a ledger of any size takes little of the manager's time."""


class HostStatus(enum.Enum):
    """The state of a message's host."""

    SERVED = enum.auto()
    """Its manager answers this message, or has answered it."""
    EARLIER = enum.auto()
    """It has a manager, but that manager's input begins after this message."""
    ARRIVING = enum.auto()
    """It has a record, and its manager's first checkpoint may follow."""
    UNKNOWN = enum.auto()
    """It has no manager, as far as the ledger shows."""


class HostRegistry:
    """The hosts of one partition of the ledger, as of the last `catch_up`. `checkpoint`: the sweeper's, or None."""

    def __init__(self, bus: Bus, topic: str, partition: int, *, input_id: str, clock: Clock) -> None:
        """`topic`: the ledger's name. `input_id`: the id of the registrations topic; offsets in checkpoints for another
        topic are ignored."""
        self._bus = bus
        self._topic = topic
        self._partition = partition
        self._input_id = input_id
        self._clock = clock
        self._own_key = checkpoint_key(sweeper_writer(partition)).encode()
        self._position: int | None = None
        self._begins: dict[str, int] = {}
        """The offset at which the input of each host's manager begins."""
        self._recorded_at: dict[str, float] = {}
        """When each host's record was read, in monotonic seconds."""
        self.checkpoint: Checkpoint | None = None

    @property
    def hosts(self) -> list[str]:
        """The hosts with a manager."""
        return list(self._begins)

    def status(self, host: str, offset: int) -> HostStatus:
        """The status of a message of `host` at `offset`, as of the last `catch_up`."""
        begin = self._begins.get(host)
        if begin is not None:
            return HostStatus.SERVED if offset >= begin else HostStatus.EARLIER
        recorded_at = self._recorded_at.get(host)
        if recorded_at is not None and self._clock.monotonic() - recorded_at < ARRIVAL_S:
            return HostStatus.ARRIVING
        return HostStatus.UNKNOWN

    async def catch_up(self) -> None:
        """Read all records that were committed since the last call.

        Raises:
            LedgerRefusedError: the sweeper's checkpoint is damaged, or of a later version.
            BusError: the ledger cannot be read.
        """
        end = await self._bus.stable_end(self._topic, self._partition)
        if self._position is not None and self._position >= end:
            return
        async with await self._bus.open_reader(
            self._topic, self._partition, start=self._position, committed=True
        ) as reader:
            async for messages in read_to(reader, end, max_records=SLICE):
                self._apply(messages)
                self._position = reader.position
                if reader.position < end:
                    await anyio.sleep(PAUSE_S)

    def _apply(self, messages: list[Message]) -> None:
        prefixes = (HOST, CHECKPOINT)
        last = {message.key: message.value for message in messages if message.key and message.key.startswith(prefixes)}
        for key, value in last.items():
            if key == self._own_key:
                self.checkpoint = self._own(value)
            elif (writer := writer_of(key)) is not None:
                if (host := writer_names(writer).host) is not None:
                    self._note_served(host, value)
            elif (host := host_of(key)) is not None:
                if value is None:
                    self._recorded_at.pop(host, None)
                else:
                    self._recorded_at[host] = self._clock.monotonic()

    def _note_served(self, host: str, value: bytes | None) -> None:
        """Note where the input of a host's manager begins. `value`: the manager's last checkpoint, or a tombstone."""
        if value is None:
            self._begins.pop(host, None)
            return
        try:
            record = decode_ledger(value)
        except WireError as error:
            log.warning("a host's checkpoint cannot be read, it counts as served", host=host, error=str(error))
            record = None
        position = record.input if isinstance(record, Checkpoint) else None
        is_known = position is not None and position.topic_id == self._input_id
        self._begins[host] = (position.begin or 0) if position is not None and is_known else 0

    def _own(self, value: bytes | None) -> Checkpoint | None:
        """The sweeper's own checkpoint.

        Raises:
            LedgerRefusedError: it is damaged, or of a later version.
        """
        if value is None:
            return None
        try:
            record = decode_ledger(value, key=self._own_key)
        except WireError as error:
            raise LedgerRefusedError(f"{error}: partition {self._partition} is not swept") from error
        not_swept = f"partition {self._partition} is not swept by this one"
        if not isinstance(record, Checkpoint):
            raise LedgerRefusedError(f"{self._own_key.decode()} is of a later version: {not_swept}")
        if (reason := refusal(record)) is not None:
            raise LedgerRefusedError(f"{reason}: {not_swept}")
        return record

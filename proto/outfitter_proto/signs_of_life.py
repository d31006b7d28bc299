"""Judges whether a manager lives, by its signs of life on the bus (`Beat`). Whoever shows or uses that judges here.

Its writer's checkpoint says how often signs come. A writer whose last one is three intervals old counts as dead, also
for a reader that has just begun and finds none. A writer that promises none is unknown.

- The age of a sign that has just come counts from its receipt. That of an earlier one goes by the last sign of its
  partition or the newest of another one, else by the reader's clock.
- A clock may be set back. So the last sign of a partition is the one with the highest offset, and no sign counts as
  later than the next one. A time from the future makes no later sign look old.
- Silence counts only while the topic can be read. Whoever could not read it waits three intervals first, so that no
  outage of the bus is blamed on managers.
- Signs of another instance than the checkpoint's do not count.
- A sign names the manager's process. Where the reader can see that this process is gone, nothing is waited for.
- A silent manager whose process the reader can see, or whose lock somebody holds on the reader's machine, is dead for
  its workers, but need not be started: something keeps it from writing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

import anyio
from msgspec import UNSET, Struct, structs

from outfitter_proto import codec, keys
from outfitter_proto.bus.port import Bus, BusError, Message
from outfitter_proto.bus.reading import fetch_what_is_left, read_to
from outfitter_proto.names import managers_topic
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Beat, Checkpoint, ManagerIdentity
from outfitter_proto.support import manager_lock
from outfitter_proto.support.backoff import Backoff
from outfitter_proto.support.processes import boot_id, is_gone, pid_namespace

MISSED = 3
"""So many intervals without a sign mean that a writer is dead."""
WINDOW_MS = 180_000
"""How far back a reader begins: three of the longest intervals."""
FOLLOW_WAIT_S = 1.0
"""Time limit of one fetch while a reader waits for signs."""
MOST = 50_000
"""Most managers whose signs are remembered: the last ones."""
SLACK_MS = 10_000
"""A sign whose time is so much earlier than that of the one before says that the bus's clock was set back."""
BACKOFF_S = (0.5, 10.0)
"""The first and the longest delay between attempts to read the topic."""


class Life(StrEnum):
    """What is known of a manager. `unknown`: it promises no signs, or they cannot be read."""

    LIVES = "lives"
    STOPPED = "stopped"
    DEAD = "dead"
    UNKNOWN = "unknown"


UNSERVED = frozenset({Life.STOPPED, Life.DEAD})
"""Nobody answers."""


class Verdict(Struct, frozen=True):
    """What has become of a manager."""

    life: Life
    at: datetime | None = None
    """Since when it is stopped, or when a dead one was last heard. None: that is not known."""
    process: int | None = None
    """Of a dead one, which runs on the reader's machine all the same. 0: one that the reader cannot name. None: no such
    process."""


UNKNOWN = Verdict(Life.UNKNOWN)


def in_words(verdict: Verdict, ago: Callable[[datetime], str]) -> str:
    """What has become of a manager that is stopped or dead: `was killed, or hangs: last heard 12s ago`. `ago`: how long
    ago a moment was."""
    since = "more than 3 min ago" if verdict.at is None else ago(verdict.at)
    if verdict.life is Life.STOPPED:
        return f"was stopped {since}"
    if verdict.process is None:
        return f"was killed, or hangs: last heard {since}"
    name = f"process {verdict.process}" if verdict.process else "a process on this machine"
    return f"lives ({name}), but was last heard {since}: see its log, and whether it is stopped or on another bus"


class _Heard(NamedTuple):
    """A sign. `ms`: when it came, as a time of the bus. `said_ms`: when by the bus's own record."""

    partition: int
    ms: float
    said_ms: int
    beat: Beat


class SignsOfLife:
    """The signs that were read, and how long silence has lasted."""

    def __init__(
        self,
        *,
        now_ms: Callable[[], float] = lambda: time.time() * 1000,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now_ms = now_ms
        self.monotonic = monotonic
        self._heard: dict[tuple[str, str], _Heard] = {}
        self._last_ms: dict[int, float] = {}
        """When the last sign of each partition came."""
        self._clock = now_ms(), monotonic()
        """The time by the reader's clock, and when it was."""
        self._clocks: dict[int, tuple[float, float]] = {}
        """The same by the bus's clock, of each partition whose signs come now. Nothing moves it later."""
        self._since: dict[int, float] = {}
        """From when on silence counts, of each partition that can be read."""
        self._as_of: dict[int, float] = {}
        """Up to when each partition has been read."""
        self._dead: dict[tuple[str, str], Verdict] = {}
        self._here = boot_id(), pid_namespace()

    # --- reading ---

    def add(self, message: Message, *, live: bool = False) -> None:
        """Add a record of the topic. `live`: the bus has just taken it, so its time is the bus's time now. Otherwise
        the partition is read, or read again."""
        if message.value is None or message.unreadable is not None:
            return
        try:
            beat = codec.decode_beat(message.value, key=message.key)
        except codec.WireError:
            return  # of a later version, or somebody else's
        key, partition = (beat.writer, beat.instance), message.partition
        if live:
            then_ms, then = self._clocks.setdefault(partition, (message.timestamp_ms, self.monotonic()))
            ms = then_ms + (self.monotonic() - then) * 1000
        else:
            self._clocks.pop(partition, None)
            ms = message.timestamp_ms
        if ms < self._last_ms.get(partition, 0) - SLACK_MS:
            self._set_back(partition, ms)
        self._last_ms[partition] = ms
        self._dead.pop(key, None)
        self._heard.pop(key, None)
        heard = _Heard(partition, ms, message.timestamp_ms, beat)
        self._heard[key] = heard  # the last one in the order of the dictionary
        if len(self._heard) > MOST:
            forgotten = next(iter(self._heard))
            del self._heard[forgotten]
            self._dead.pop(forgotten, None)

    def _set_back(self, partition: int, ms: float) -> None:
        """The signs of a partition so far came no later than this, whatever the bus's clock was then."""
        for key, heard in self._heard.items():
            if heard.partition == partition and heard.ms > ms:
                self._heard[key] = heard._replace(ms=ms)

    def has_read(self, partition: int, as_of: float) -> None:
        """A partition was read to its end, as it was at this moment of the monotonic clock."""
        self._since.setdefault(partition, -math.inf)
        self._since[partition] = min(self._since[partition], as_of)
        self._as_of[partition] = as_of

    def could_not_read(self, partition: int) -> None:
        """A partition cannot be read now. Managers may be just as little able to write there."""
        self._since[partition] = math.inf

    # --- judging ---

    def of(self, checkpoint: Checkpoint, *, seen_at: float = -math.inf) -> Verdict:
        """Whether the writer of this checkpoint lives. `seen_at`: when the reader first saw a checkpoint of this
        instance, if it had begun to read signs before. See `judge`, which also knows what the host's record says."""
        verdict = self._of(checkpoint, seen_at)
        return structs.replace(verdict, process=self._process(checkpoint)) if verdict.life is Life.DEAD else verdict

    def _of(self, checkpoint: Checkpoint, seen_at: float) -> Verdict:
        if checkpoint.beat_s is UNSET:
            return UNKNOWN
        key, partition = (checkpoint.writer, checkpoint.instance), checkpoint.input.partition
        heard = self._heard.get(key)
        if heard is not None and heard.beat.stopped_at is not UNSET:
            return Verdict(Life.STOPPED, heard.beat.stopped_at)
        if key in self._dead:
            return self._dead[key]
        if heard is not None and self._is_gone(heard) is True:
            return self._dead.setdefault(key, _dead(heard))
        if partition not in self._as_of or self._since[partition] == math.inf:
            return UNKNOWN
        silence_ms = MISSED * checkpoint.beat_s * 1000
        if heard is not None and self._now_ms(partition, silence_ms) - heard.ms < silence_ms:
            return Verdict(Life.LIVES)
        if (self._as_of[partition] - self._since[partition]) * 1000 < silence_ms:
            return UNKNOWN
        if heard is None and self._as_of[partition] < seen_at:
            return UNKNOWN  # its first sign was not read yet
        verdict = _dead(heard)
        if heard is not None:  # else the writer's first sign may still come, and is not looked for here
            self._dead[key] = verdict
        return verdict

    def runs_here(self, checkpoint: Checkpoint) -> bool:
        """Whether the process of this checkpoint's writer is known to run on this machine."""
        heard = self._heard.get((checkpoint.writer, checkpoint.instance))
        return heard is not None and self._is_gone(heard) is False

    def sweepers(self, partition: int, within_s: float) -> Iterator[str]:
        """The writers whose managers sweep, by signs that are less than so many seconds old. All signs must be of this
        partition."""
        now_ms = self._now_ms(partition, within_s * 1000)
        for heard in self._heard.values():
            if heard.beat.sweeps and heard.beat.stopped_at is UNSET and now_ms - heard.ms < within_s * 1000:
                yield heard.beat.writer

    def _process(self, checkpoint: Checkpoint) -> int | None:
        """The process of a writer that runs on this machine, by its last sign, else by the machine's lock."""
        heard = self._heard.get((checkpoint.writer, checkpoint.instance))
        if heard is not None and heard.beat.process is not UNSET and self._is_gone(heard) is False:
            return heard.beat.process.pid
        host = keys.writer_names(checkpoint.writer).host
        is_here = checkpoint.boot_id is not None and checkpoint.boot_id == self._here[0]
        return manager_lock.holder(host) if is_here and host is not None else None

    def _is_gone(self, heard: _Heard) -> bool | None:
        process = heard.beat.process
        if process is UNSET or (process.boot_id, process.pid_ns) != self._here:
            return None
        return is_gone(process)

    def _now_ms(self, partition: int, silence_ms: float) -> float:
        """The time of the bus up to which a partition was read: that of the newest sign, unless all are silent. A sign
        of another partition may come from the future."""
        then_ms, then = self._clocks.get(partition, self._clock)
        now_ms = then_ms + (self._as_of[partition] - then) * 1000
        elsewhere_ms = min(now_ms, max(self._last_ms.values(), default=0))
        newest_ms = max(elsewhere_ms, self._last_ms.get(partition, 0))
        return newest_ms if now_ms - newest_ms < silence_ms else now_ms


def _dead(heard: _Heard | None) -> Verdict:
    return Verdict(Life.DEAD, None if heard is None else datetime.fromtimestamp(heard.said_ms / 1000, UTC))


def judge(
    signs: SignsOfLife,
    checkpoint: Checkpoint | None,
    manager: ManagerIdentity | None,
    *,
    seen_at: float = -math.inf,
) -> Verdict:
    """Whether a host's manager lives. `checkpoint`: of the writer that answers for the host (`responsible`).
    `manager`: by the host's record. `seen_at`: as in `SignsOfLife.of`."""
    if manager is not None and manager.stopped_at is not None:
        return Verdict(Life.STOPPED, manager.stopped_at)
    return UNKNOWN if checkpoint is None else signs.of(checkpoint, seen_at=seen_at)


def writers_of(host: str, partitions: int) -> tuple[str, str]:
    """The writers that may answer for a host: in host scope and in cluster scope."""
    return keys.host_writer(host), keys.partition_writer(partition_of(host, partitions))


def responsible(checkpoints: Mapping[str, Checkpoint], host: str, partitions: int) -> Checkpoint | None:
    """The checkpoint, among these by writer, of the manager that answers for a host."""
    found = [checkpoints[writer] for writer in writers_of(host, partitions) if writer in checkpoints]
    return max(found, key=lambda checkpoint: checkpoint.at, default=None)


# --- from the bus ---


async def read_signs(bus: Bus, cluster: str, partitions: Iterable[int]) -> SignsOfLife:
    """The signs of now in these partitions. Read the checkpoints before: later ones are of managers that these signs do
    not know. A partition that cannot be read, or is not there, tells nothing. Raises nothing."""
    signs = SignsOfLife()
    async with anyio.create_task_group() as tasks:
        for partition in partitions:
            tasks.start_soon(_read, bus, managers_topic(cluster), partition, signs)
    return signs


async def _read(bus: Bus, topic: str, partition: int, signs: SignsOfLife) -> None:
    try:
        as_of = signs.monotonic()
        start, end = await _bounds(bus, topic, partition, signs)
        async with await bus.open_reader(topic, partition, start=start, committed=False) as reader:
            async for messages in read_to(reader, end):
                for message in messages:
                    signs.add(message)
    except BusError:
        signs.could_not_read(partition)
    else:
        signs.has_read(partition, as_of)


async def _bounds(bus: Bus, topic: str, partition: int, signs: SignsOfLife) -> tuple[int, int]:
    """The offset of three minutes ago, and the end."""
    start = await bus.offset_at(topic, partition, int(signs.now_ms()) - WINDOW_MS)
    _, end = await bus.offsets(topic, partition)
    return start, end


async def follow_signs(
    bus: Bus, cluster: str, partition: int, signs: SignsOfLife, *, caught_up: Callable[[], object] = lambda: None
) -> None:
    """Add the signs of a partition as they come, until cancelled. `caught_up` is called once the signs of now are
    added, or cannot be read."""
    backoff, topic = Backoff(*BACKOFF_S), managers_topic(cluster)
    while True:
        try:
            start, end = await _bounds(bus, topic, partition, signs)
            async with await bus.open_reader(topic, partition, start=start, committed=False) as reader:
                # An answer may be as old as the beginning of the fetch before the one that gave it: readers prefetch.
                before = begun = signs.monotonic()
                while True:
                    before, begun = begun, signs.monotonic()
                    for message in await fetch_what_is_left(reader, timeout=FOLLOW_WAIT_S):
                        signs.add(message, live=message.offset >= end)
                    if reader.position >= end and reader.has_answered and not reader.late_s:
                        signs.has_read(partition, before)
                        backoff.reset()
                        caught_up()
        except BusError:  # also where the topic or a right is missing: they may come
            signs.could_not_read(partition)
        caught_up()
        await anyio.sleep(backoff.next_delay())

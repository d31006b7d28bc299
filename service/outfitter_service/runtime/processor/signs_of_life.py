"""Says on the bus that a tenure's commit loop lives, in the topic of managers.

The loop itself asks for each sign, so that a loop that hangs sends none. A task beside it only carries it to the bus:
no trouble with this topic delays a commit, or ends a manager.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
from msgspec import UNSET, UnsetType

from outfitter_proto import __version__
from outfitter_proto.bus import BusError, BusUnavailableError, Entry
from outfitter_proto.codec import encode
from outfitter_proto.names import managers_topic
from outfitter_proto.records import Beat, Owner, Utc
from outfitter_proto.support.processes import process_owner
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.instruments import Instruments

MOST_UNHEARD = 1
"""Signs that may be without an acknowledgement. With more the checkpoint says that there are none: readers take a
writer for dead three intervals after the last one that they have."""
LAST_WITHIN_S = 5.0
"""How long an orderly stop waits for the last sign."""


class SignSender:
    """The signs of one processor, in all its tenures."""

    def __init__(
        self,
        assignment: Assignment,
        instruments: Instruments,
        *,
        every_s: float | None,
        sweeps: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        """`every_s`: seconds between two signs; None: there are none. `sweeps`: whether this manager sweeps where it
        must. `wake`: called when the checkpoint has something else to say, and when `trouble` changes."""
        self._assignment = assignment
        self._instruments = instruments
        self._every_s = every_s
        self._sweeps = sweeps
        self._wake = wake
        self._asked_at = -math.inf
        self._asked = anyio.Event()
        self._unheard: int | None = None
        self._said: float | UnsetType | None = None
        self.trouble: str | None = None
        """Why the last sign could not be written into the file of a local bus, where no commit can be either; None: it
        could, or a commit could since."""

    def begin(self) -> None:
        """A tenure begins: its first sign is due at once, and its first checkpoint says whether there are any."""
        self._asked_at = -math.inf
        self._unheard = self._said = self.trouble = None

    # --- for the commit loop ---

    def ask(self) -> None:
        """The loop lives: send a sign, if one is due."""
        now = self._instruments.clock.monotonic()
        if self._every_s is not None and now - self._asked_at >= self._every_s:
            self._asked_at = now
            if self._unheard is not None:
                self._unheard += 1
            self._asked.set()

    def committed(self) -> None:
        """A commit was written: so could a sign be."""
        self.trouble = None

    @property
    def interval(self) -> float | UnsetType:
        """What the checkpoint must say of the signs: seconds between two; `UNSET`: nobody can rely on any."""
        is_heard = self._unheard is not None and self._unheard <= MOST_UNHEARD
        return self._every_s if is_heard and self._every_s is not None else UNSET

    @property
    def is_news(self) -> bool:
        """Whether the last checkpoint says something else of the signs."""
        return self._said is not None and self._said != self.interval

    def say(self) -> float | UnsetType:
        """`interval`, for a checkpoint that is written now."""
        self._said = self.interval
        return self._said

    def rollback(self) -> None:
        """That checkpoint was not written; the next one is due."""
        self._said = math.nan

    # --- to the bus ---

    async def run(self) -> None:
        """Send what the loop asks for, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = anyio.Event()
            await self._send()

    async def end(self, stopped_at: Utc) -> None:
        """Say that the manager has stopped in order, if others rely on its signs."""
        if self._unheard is not None:
            with anyio.move_on_after(LAST_WITHIN_S):
                await self._send(stopped_at)
        self._instruments.silence.drop(self._assignment.identity.writer)

    def _process(self) -> Owner | UnsetType:
        """This process, if the identity says that the manager watches processes where it runs."""
        identity, own = self._assignment.identity, process_owner()
        if own is None or (own.boot_id, own.pid_ns) != (identity.boot_id, identity.pid_ns):
            return UNSET
        return own

    async def _send(self, stopped_at: Utc | UnsetType = UNSET) -> None:
        identity, metrics, silence = self._assignment.identity, self._instruments.metrics, self._instruments.silence
        beat = Beat(
            writer=identity.writer,
            instance=identity.instance,
            version=__version__,
            sweeps=self._sweeps(),
            stopped_at=stopped_at,
            process=self._process(),
        )
        entry = Entry(beat.key.encode(), encode(beat))
        try:
            await self._assignment.bus.publish(managers_topic(identity.cluster), self._assignment.partition, entry)
        except BusError as error:
            metrics.signs_of_life.labels("lost").inc()
            if self._assignment.bus.local and isinstance(error, BusUnavailableError):
                self.trouble = str(error)
                self._wake()
            # what ails the whole bus has a line already
            if not isinstance(error, BusUnavailableError) or (
                self.interval is UNSET and not self._instruments.outage.on
            ):
                silence.met(identity.writer, error)
            return
        metrics.signs_of_life.labels("ok").inc()
        silence.passed(identity.writer)
        self._unheard = 0
        if self.is_news or self.trouble is not None:
            self.trouble = None
            self._wake()

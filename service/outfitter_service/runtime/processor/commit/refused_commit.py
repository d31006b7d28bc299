"""A commit that the bus refused for its size, because somebody lowered a limit of a topic. It is repeated until it is
written: the manager leaves nothing out, and asks for no limits while it serves."""

from __future__ import annotations

from outfitter_proto import topics
from outfitter_proto.bus import Bus, TooLargeError


class RefusedCommit:
    """The last refusal. `trouble`: the bus's answer; None: what was refused is written by now."""

    def __init__(self) -> None:
        self.trouble: TooLargeError | None = None
        self._until = 0

    def met(self, bus: Bus, trouble: TooLargeError, *, until: int) -> TooLargeError:
        """The commit of the input up to the offset `until` was refused. Returns the error with its remedy."""
        self.trouble = topics.with_remedy(bus, trouble)
        self._until = max(self._until, until)
        return self.trouble

    def passed(self, position: int, *, idle: bool) -> None:
        """A commit up to `position` succeeded. `idle`: no internal event waits, and none is decided and not
        committed."""
        if self.trouble is not None and position >= self._until and idle:
            self.forget()

    def forget(self) -> None:
        """What was refused is written, or is gone."""
        self.trouble = None
        self._until = 0

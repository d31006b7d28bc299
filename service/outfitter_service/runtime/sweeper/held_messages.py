"""The messages that a sweeper holds: each is nobody's, or may be, and is answered when it is due."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from outfitter_proto.bus import Message
from outfitter_proto.records import MAX_DEAD_LETTER_BODY
from outfitter_service.runtime.input.scope import Unroutable
from outfitter_service.runtime.sweeper.host_registry import HostRegistry, HostStatus

HELD_MESSAGES, HELD_BYTES = 4000, 16 * 1024 * 1024
"""What may wait to be answered before reading pauses."""
LETTER_EXTRA = 4096
"""What a dead letter has besides the message's body, about."""
LETTERS, LETTER_BYTES = 500, 2 * 1024 * 1024
"""Dead letters of one transaction."""


class Held(Struct, kw_only=True):
    """A message that is nobody's (`why`), or that may be (`host`). It is looked at again when it is `due`, in monotonic
    seconds."""

    message: Message
    due: float
    host: str = ""
    why: Unroutable | None = None

    def is_served(self, host_registry: HostRegistry) -> bool:
        """Whether it turned out to be somebody's."""
        return self.why is None and host_registry.standing(self.host, self.message.offset) is HostStatus.SERVED


class HeldMessages:
    """What is held of one partition, in the order of the input."""

    def __init__(self) -> None:
        self._messages: deque[Held] = deque()
        self._bytes = 0

    @property
    def first(self) -> Held | None:
        """The one that is answered next."""
        return self._messages[0] if self._messages else None

    @property
    def full(self) -> bool:
        """Whether reading has to pause."""
        return len(self._messages) >= HELD_MESSAGES or self._bytes >= HELD_BYTES

    def put(self, held: Held) -> None:
        """Hold one more, the last in the input."""
        self._messages.append(held)
        self._bytes += len(held.message.value or b"")

    def clear(self) -> None:
        """Hold nothing any more."""
        self._messages.clear()
        self._bytes = 0

    def remove(self, count: int) -> None:
        """So many, from the first one on, are answered."""
        for _ in range(count):
            self._bytes -= len(self._messages.popleft().message.value or b"")

    def drop_served(self, host_registry: HostRegistry) -> None:
        """Let go of what turned out to be somebody's."""
        self._messages = deque(held for held in self._messages if not held.is_served(host_registry))
        self._bytes = sum(len(held.message.value or b"") for held in self._messages)

    def ripe(self, host_registry: HostRegistry, now: float) -> list[Held]:
        """The first ones, as far as it is sure that they are nobody's, and as many as one transaction answers."""
        found: list[Held] = []
        size = 0
        for held in self._messages:
            if held.why is None:
                standing = host_registry.standing(held.host, held.message.offset)
                if standing is not HostStatus.EARLIER and (standing is not HostStatus.UNKNOWN or held.due > now):
                    break
            size += min(len(held.message.value or b""), MAX_DEAD_LETTER_BODY) + LETTER_EXTRA
            if found and (len(found) >= LETTERS or size > LETTER_BYTES):
                break
            found.append(held)
        return found

    def position_after(self, count: int, read_to: int) -> int:
        """The input's next offset once so many are answered, where everything before `read_to` was read."""
        return self._messages[count].message.offset if len(self._messages) > count else read_to

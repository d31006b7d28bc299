"""The messages that a sweeper holds. Each is unroutable, or may be, and gets a dead letter when it is due."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from outfitter_proto.bus import Message
from outfitter_proto.records import MAX_DEAD_LETTER_BODY
from outfitter_service.runtime.input.scope import Unroutable
from outfitter_service.runtime.sweeper.host_registry import HostRegistry, HostStatus

HELD_MESSAGES, HELD_BYTES = 4000, 16 * 1024 * 1024
"""The sweeper pauses reading while it holds so many messages or bytes."""
LETTER_EXTRA = 4096
"""About how many bytes a dead letter has besides the message's body."""
LETTERS, LETTER_BYTES = 500, 2 * 1024 * 1024
"""Most dead letters, and their bytes, in one transaction."""


class HeldMessage(Struct, kw_only=True):
    """A message that is unroutable (`why`), or whose `host` may have no manager (`why` is None). `due`: when the wait
    for a manager ends, in monotonic seconds."""

    message: Message
    due: float
    host: str = ""
    why: Unroutable | None = None

    def is_served(self, host_registry: HostRegistry) -> bool:
        """Whether the message's host has a manager by now."""
        return self.why is None and host_registry.status(self.host, self.message.offset) is HostStatus.SERVED


class HeldMessages:
    """The held messages of one partition, in the order of the input."""

    def __init__(self) -> None:
        self._messages: deque[HeldMessage] = deque()
        self._bytes = 0

    @property
    def first(self) -> HeldMessage | None:
        """The message that gets the next dead letter, or None."""
        return self._messages[0] if self._messages else None

    @property
    def full(self) -> bool:
        """Whether reading must pause."""
        return len(self._messages) >= HELD_MESSAGES or self._bytes >= HELD_BYTES

    def put(self, held: HeldMessage) -> None:
        """Hold one more message, the last in the input."""
        self._messages.append(held)
        self._bytes += len(held.message.value or b"")

    def clear(self) -> None:
        """Drop all messages."""
        self._messages.clear()
        self._bytes = 0

    def remove(self, count: int) -> None:
        """Remove the first `count` messages: their dead letters are committed."""
        for _ in range(count):
            self._bytes -= len(self._messages.popleft().message.value or b"")

    def drop_served(self, host_registry: HostRegistry) -> None:
        """Drop held messages whose host has a manager by now."""
        self._messages = deque(held for held in self._messages if not held.is_served(host_registry))
        self._bytes = sum(len(held.message.value or b"") for held in self._messages)

    def due(self, host_registry: HostRegistry, now: float) -> list[HeldMessage]:
        """The first messages that certainly have no manager at `now` (monotonic seconds), as many as one transaction
        answers."""
        due: list[HeldMessage] = []
        size = 0
        for held in self._messages:
            if held.why is None:
                status = host_registry.status(held.host, held.message.offset)
                if status is not HostStatus.EARLIER and (status is not HostStatus.UNKNOWN or held.due > now):
                    break
            size += min(len(held.message.value or b""), MAX_DEAD_LETTER_BODY) + LETTER_EXTRA
            if due and (len(due) >= LETTERS or size > LETTER_BYTES):
                break
            due.append(held)
        return due

    def position_after(self, count: int, read_to: int) -> int:
        """The input's next offset once `count` messages are answered and all messages before `read_to` are read."""
        return self._messages[count].message.offset if len(self._messages) > count else read_to

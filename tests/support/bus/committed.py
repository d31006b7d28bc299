"""What a reader of committed records sees of a topic by now."""

from __future__ import annotations

import anyio

from outfitter_proto.bus import Bus, Message

WITHIN_S = 60.0


async def committed(bus: Bus, topic: str, partition: int = 0, *, start: int | None = None) -> list[Message]:
    """All committed messages from `start` (None: the earliest) to the end that is stable now."""
    messages: list[Message] = []
    with anyio.fail_after(WITHIN_S):
        end = await bus.stable_end(topic, partition)
        async with await bus.open_reader(topic, partition, start=start, committed=True) as reader:
            while reader.position < end:
                messages += await reader.fetch(max_records=10_000, timeout=0.2)
    return messages

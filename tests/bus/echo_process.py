"""A process for tests of the bus: answers each record of one topic with one in another, until its stdin closes."""

from __future__ import annotations

import sys

import anyio
import anyio.to_thread

from outfitter_proto.bus import Entry, connect


async def echo(url: str, calls: str, answers: str) -> None:
    async with connect(url) as bus, await bus.open_reader(calls, 0, start=None, committed=True) as reader:
        while True:
            for message in await reader.fetch(timeout=10.0):
                await bus.publish(answers, 0, Entry(message.key, b"answer"))


async def main() -> None:
    async with anyio.create_task_group() as group:
        url, calls, answers = sys.argv[1:4]
        group.start_soon(echo, url, calls, answers)
        await anyio.to_thread.run_sync(sys.stdin.read)
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main)

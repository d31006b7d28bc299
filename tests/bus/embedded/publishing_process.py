"""A process for tests of the embedded bus: commits one record after another to `t` until the topic has enough.

Arguments: the bus URL, this process's key, how many records are enough. It says "ready", and starts when its
stdin is closed.
"""

from __future__ import annotations

import sys

import anyio

from outfitter_proto.bus import Entry, connect


async def main() -> None:
    url, key, enough = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
    async with connect(url) as bus:
        await bus.offsets("t", 0)
        print("ready", flush=True)
        sys.stdin.read()
        while await bus.publish("t", 0, Entry(key, b"x" * 400)) < enough:
            pass


if __name__ == "__main__":
    anyio.run(main)

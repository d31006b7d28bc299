"""A process for tests of the embedded bus: commits numbered batches to two topics until it is killed.

Arguments: the bus URL, the first number, a seed. It prints each number once its commit has returned. Batch `n` is
3 to 81 records with the body `n/i/size`, the first third in `history`, the rest in `ledger`; now and then it
does the housekeeping as well.
"""

from __future__ import annotations

import os
import random
import sys

import anyio

from outfitter_proto.bus import Entry, connect


async def main() -> None:
    url, first, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    random.seed(seed)
    async with connect(url) as bus, await bus.open_writer("writer", 0) as writer:
        number = first
        while True:
            size = random.randrange(3, 82)
            batch = [
                Entry(b"key-%d" % random.randrange(50), b"%d/%d/%d " % (number, n, size) + b"x" * 400)
                for n in range(size)
            ]
            await writer.commit([("history", batch[: size // 3]), ("ledger", batch[size // 3 :])])
            os.write(1, b"%d\n" % number)
            number += 1
            if random.random() < 0.05:
                await bus.maintain()


if __name__ == "__main__":
    anyio.run(main)

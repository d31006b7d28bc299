"""A process for tests of groups: one member. Arguments: the bus URL, group, topic, replica (or `-`), session.

It waits for a line on its stdin, joins, and prints each change as `has` and numbers. What it is told afterwards, a
line each, it does and answers: `confirm N` with `confirmed N True` (or `False`), `leave` with `left`; at `end`, or the
end of its stdin, it leaves and ends.
"""

from __future__ import annotations

import sys

import anyio
import anyio.to_thread

from outfitter_proto.bus import BusError, Membership, connect


async def tell(membership: Membership) -> None:
    while True:
        try:
            print("has", *sorted(await membership.changed()), flush=True)
        except BusError as error:
            print(type(error).__name__, flush=True)
            return


async def main() -> None:
    url, group, topic, replica, session = sys.argv[1:6]
    async with connect(url) as bus, anyio.create_task_group() as tasks:
        await anyio.to_thread.run_sync(sys.stdin.readline)
        membership = await bus.join(
            group,
            topic,
            replica=None if replica == "-" else replica,
            session_timeout=float(session),
            heartbeat_interval=0.2,
        )
        async with membership:
            tasks.start_soon(tell, membership)
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                match line.split():
                    case ["confirm", number]:
                        print("confirmed", number, await membership.confirmed(int(number)), flush=True)
                    case ["leave"]:
                        await membership.leave()
                        print("left", flush=True)
                    case ["end"]:
                        break
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main)

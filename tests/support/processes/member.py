"""A member of a group in a process of its own, to be killed and frozen (bus/member_process.py)."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

LIMIT_S = 40.0
MEMBER = Path(__file__).parents[2] / "bus" / "member_process.py"


class MemberProcess:
    """A member in a process of its own, to be killed and frozen."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self.process = process
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def heard(self, wanted: str) -> str:
        """The next line that begins with `wanted`."""
        with anyio.fail_after(LIMIT_S):
            while True:
                line = (await self._lines.receive_until(b"\n", 1000)).decode()
                if line.startswith(wanted):
                    return line

    async def has(self, wanted: frozenset[int] | None = None) -> frozenset[int]:
        """What it says it has: the next time, or as soon as that is `wanted`."""
        while True:
            told = frozenset(int(word) for word in (await self.heard("has")).split()[1:])
            if wanted is None or told == wanted:
                return told

    async def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send((" ".join(map(str, words)) + "\n").encode())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def member_process(
    url: str, group: str, topic: str, *, replica: str = "-", session: float, wait: bool = False
) -> AsyncIterator[MemberProcess]:
    """`wait`: it joins when it is told `join`."""
    arguments = [sys.executable, str(MEMBER), url, group, topic, replica, str(session)]
    process = await anyio.open_process(arguments, stdin=PIPE, stdout=PIPE, stderr=None)
    try:
        member = MemberProcess(process)
        if not wait:
            await member.tell("join")
        yield member
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()

"""`outfitter serve` where a standard stream is closed, full or not read: it serves, and counts the lines it lost."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import Entry, connect
from outfitter_proto.names import topics
from support.managers.process import OUTFITTER, Manager, StartManager
from support.processes.standard_error import redirected

ROUNDS, ASKING = 4, 30
"""So many times so many workers ask. The log lines about them are more than the pipe holds."""
PIPE_HOLDS = 4096
"""Bytes: the smallest pipe there is."""
LINES_LOST = "outfitter_log_lines_dropped_total"


def _start(start_manager: StartManager, redirections: str) -> Manager:
    """A manager with a shell's redirections. Its log may be lost, so it listens on a port that we choose."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    manager = start_manager(
        gpus=1, ready=False, program=redirected(OUTFITTER, redirections),
        arguments=["--http", f"{address[0]}:{address[1]}", "--log-format", "json"],
    )  # fmt: skip
    manager._address = address
    manager.wait_for(manager._is_ready, timeout=60)
    return manager


@pytest.mark.parametrize("redirections", ["<&-", ">&-", "<&- >&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_it_serves_and_ends_in_order_whatever_stream_is_closed_or_full(
    start_manager: StartManager, redirections: str
) -> None:
    manager = _start(start_manager, redirections)
    done = manager.outfitter("register", "--worker", "w", "--resource", "gpu=1", "--wait", "20")
    assert done.returncode == 0, done.stderr
    assert [manager._get("/livez")[0] for _ in range(3)] == [200] * 3
    lost = manager.metric(LINES_LOST)
    assert lost is not None
    assert (lost > 0) == ("2>" in redirections)
    assert manager.stop() == 0


def test_a_manager_whose_log_nobody_reads_serves_on_and_ends_in_order(
    start_manager: StartManager, tmp_path: Path
) -> None:
    unread = _pipe(tmp_path / "unread")
    try:
        manager = _start(start_manager, f"2>{tmp_path}/unread")
        _flood(manager)
        assert manager._get("/livez") == (200, "ok\n")
        assert manager._get("/readyz") == (200, "ok\n")
        assert manager.stop() == 0
    finally:
        os.close(unread)


def test_a_reader_that_comes_late_gets_each_line_in_order(start_manager: StartManager, tmp_path: Path) -> None:
    late = _pipe(tmp_path / "unread")
    try:
        manager = _start(start_manager, f"2>{tmp_path}/unread")
        _flood(manager)
        log = b""

        def read() -> bool:
            """Read on. Returns whether there was more."""
            nonlocal log
            with suppress(BlockingIOError):
                log += (more := os.read(late, 1 << 20))
                return bool(more)
            return False

        manager.wait_for(lambda: not read() and len(log) > PIPE_HOLDS)
        manager.signal(signal.SIGTERM)
        manager.wait_for(lambda: read() and b'"stopped"' in log)
        assert manager.wait() == 0
    finally:
        os.close(late)
    lines = [json.loads(line) for line in log.splitlines() if not line.startswith(b"outfitter: ")]
    told = [int(line["worker"][1:]) for line in lines if line["event"] == "failed"]
    assert told == sorted(set(told))
    assert "dropped" not in log.decode()


def _pipe(path: Path) -> int:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_HOLDS)
    return reader


def _flood(manager: Manager) -> None:
    """Ask for more than there is, in at least so many commits as there are rounds."""
    for begin in range(0, ROUNDS * ASKING, ASKING):
        anyio.run(_ask, manager, range(begin, begin + ASKING))
        manager.wait_for_state(f"w{begin + ASKING - 1}", "failed")


async def _ask(manager: Manager, numbers: range) -> None:
    async with connect(manager.bus_url) as bus:
        for number in numbers:
            body = {
                "type": "register", "host": manager.host, "worker": f"w{number}", "incarnation": "1",
                "resources": {"gpu": {"amount": 2}},
            }  # fmt: skip
            entry = Entry(manager.host.encode(), json.dumps(body).encode())
            await bus.publish(topics(manager.cluster).registrations, 0, entry)

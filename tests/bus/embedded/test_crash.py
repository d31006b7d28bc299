"""The embedded bus under SIGKILL: no torn commit, no acknowledged record lost, and the file stays sound."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from outfitter_proto.bus import Entry, TopicSpec, connect
from support.bus.committed import committed

COMMITTER = Path(__file__).parent / "committing_process.py"
KILLS = 36


def commit_until_killed(url: str, first: int, chance: random.Random) -> int:
    """Let a process commit and kill it at a random point; return the last number that it was told is committed."""
    command = [sys.executable, str(COMMITTER), url, str(first), str(chance.randrange(2**32))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(chance.randrange(1, 40))]
        time.sleep(chance.uniform(0, 0.004))  # no waiting for anything: it only moves the point of the kill
        os.killpg(process.pid, signal.SIGKILL)
        acknowledged += [line for line in process.stdout if line.endswith(b"\n")]
    assert process.returncode == -signal.SIGKILL
    return int(acknowledged[-1])


@pytest.mark.parametrize("synchronous", ["FULL", "NORMAL"])
async def test_a_kill_while_committing_tears_nothing_and_loses_nothing_that_was_acknowledged(
    tmp_path: Path, synchronous: str
) -> None:
    url = f"sqlite://{tmp_path}/bus.db?synchronous={synchronous}"
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with connect(url) as bus:
        await bus.create_topics([TopicSpec("history", 1, {}), TopicSpec("ledger", 1, {})])
    last = -1  # the last number known to be in the file
    read_to = {"history": 0, "ledger": 0}
    for _ in range(KILLS // 2):
        acknowledged = commit_until_killed(url, last + 1, chance)
        found: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        # Nobody has it open now, as after a crash of the whole service: this one recovers the log.
        async with connect(url) as bus:
            for topic, start in read_to.items():
                messages = await committed(bus, topic, start=start)
                assert [message.offset for message in messages] == list(range(start, start + len(messages)))
                read_to[topic] = start + len(messages)
                for message in messages:
                    assert message.value is not None
                    number, place, size = map(int, message.value.split(b" ")[0].split(b"/"))
                    found[number].append((topic, place, size))
        assert acknowledged in found
        assert sorted(found) == list(range(last + 1, max(found) + 1))
        for records in found.values():
            size = records[0][2]
            assert records == [("history" if n < size // 3 else "ledger", n, size) for n in range(size)]
        last = max(found)
    with sqlite3.connect(tmp_path / "bus.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


async def test_a_kill_while_compacting_leaves_the_last_record_of_every_key(embedded_url: str) -> None:
    chance = random.Random(7)
    settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("history", 1, {}), TopicSpec("ledger", 1, settings)])
        await bus.publish("ledger", 0, Entry(b"untouched", b"since the beginning"))
    first = 0
    for _ in range(6):
        commit_until_killed(embedded_url, first, chance)
        async with connect(embedded_url) as bus:
            # History keeps every batch's first records: with the ledger's offsets it tells what must be there.
            newest = max(int((m.value or b"").split(b"/")[0]) for m in await committed(bus, "history", start=0))
            kept = await committed(bus, "ledger", start=0)
            latest = {message.key: message for message in kept}
            await bus.maintain()
            compacted = await committed(bus, "ledger", start=0)
        assert {message.key: message for message in compacted} == latest
        assert len(compacted) == len(latest)
        assert b"untouched" in latest
        assert newest == max(int((m.value or b"").split(b"/")[0]) for m in compacted if m.key != b"untouched")
        first = newest + 1

"""README.md's first steps, run as they stand there: only folder, addresses, host and cluster are the test's own."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.documents import ROOT, blocks
from support.kafka.broker import KafkaBroker
from support.managers.process import environment

pytestmark = pytest.mark.slow

SHELL = [block.text for block in blocks(ROOT / "README.md") if block.language == "sh"]
EXPORT = SHELL[0]
"""What every terminal begins with."""

STOPPED_WITHIN = 30.0
KILLED = "-- the first one is killed --"


def block(containing: str) -> str:
    """The one block of shell code in which `containing` stands."""
    (found,) = [text for text in SHELL if containing in text]
    return found


class Terminal:
    """A shell that was given a block of the README."""

    def __init__(self, text: str, environment: dict[str, str]) -> None:
        self.seen: list[str] = []
        self._process = subprocess.Popen(
            ["bash", "-c", f"set -m\n{text}"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until a line has `pattern`. The test's time limit is the only one."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.seen.append(line)
            if found := re.search(pattern, line):
                return found
        pytest.fail(f"it ended without {pattern!r}:\n{''.join(self.seen)}")

    def finished(self) -> str:
        """Wait for its end; all that it printed."""
        assert self._process.stdout is not None
        self.seen += self._process.stdout
        assert self._process.wait(STOPPED_WITHIN) == 0, "".join(self.seen)
        return "".join(self.seen)

    def close(self) -> None:
        """End what still runs in it: with job control each command has a process group of its own, but the last one
        the shell's, whose place it takes."""
        running = self._process.poll() is None  # else the pid is, or will be, somebody else's
        for group in (*_children(self._process.pid), self._process.pid) if running else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)
        try:
            self._process.communicate(timeout=STOPPED_WITHIN)
        finally:
            self._process.kill()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process.wait()


def until(state: str) -> str:
    """A shell command that waits until `outfitter status` shows it."""
    return f"until outfitter status | grep -qE '{state}'; do sleep 0.1; done"


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Open]:
    """Open terminals that do what the README says; `replaced` are words that are others here."""
    opened: list[Terminal] = []
    known = environment(
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        OUTFITTER_HTTP="127.0.0.1:0",
        OUTFITTER_HOST=f"docs-{secrets.token_hex(4)}",
        HOME=str(tmp_path),
        NO_COLOR="1",
    )

    def open_terminal(text: str, replaced: dict[str, str] | None = None) -> Terminal:
        for word, other in (replaced or {}).items():
            text = text.replace(word, other)
        opened.append(Terminal(text, known))
        return opened[-1]

    yield open_terminal
    for one in reversed(opened):
        one.close()


def test_the_quick_look_shows_the_second_worker_start_when_the_first_is_killed(terminal: Open) -> None:
    assert "ok" in terminal(f"{EXPORT}{block('cat > ~/outfitter-try')}").finished().splitlines()
    terminal(f"{EXPORT}outfitter serve").until(r"\bready\b")
    # a reader waits as long as it says there, and a test until it has come to that
    replaced = {f"sleep {n};": f"{until(state)};" for n, state in ((2, "allocated"), (4, "pending"), (1, "ended"))}
    replaced["kill -KILL %1"] = f"kill -KILL %1; echo '{KILLED}'"
    replaced["sleep 100 "] = "sleep 1000 "  # neither ends by itself within the test's time limit
    told = terminal(f"{EXPORT}{block('kill -KILL %1')}\nkill %2; wait", replaced).finished()
    before, after = (re.findall(r" (allocated|pending|ended) ", part) for part in told.split(KILLED, 1))
    assert before == ["allocated", "pending"], told
    assert after == ["allocated", "ended"], told  # live ones come first


def test_the_five_minutes_with_kafka_go_as_they_are_told(terminal: Open, kafka_broker: KafkaBroker) -> None:
    cluster = kafka_broker.new_cluster()
    replaced = {
        "127.0.0.1:9092": kafka_broker.bootstrap,
        "gpu-3": f"docs-{secrets.token_hex(4)}",
        "--topic outfitter.": f"--topic {cluster}.",
    }
    export = f"export OUTFITTER_CLUSTER={cluster}\n"
    terminal(EXPORT + block("cat > ~/outfitter-try")).finished()

    manager = terminal(export + block("outfitter topics create"), replaced)
    address = manager.until(r"metrics at http://(127\.0\.0\.1:\d+)/metrics")[1]
    manager.until(r"\bready\b")
    assert f"{cluster}.allocations\n" in manager.seen

    allocated = r'^\S+/tm-17/run-1\t(.*"state":"allocated".*)'  # it may be pending before its driver has reported
    answer = terminal(export + block("console-producer"), replaced).until(allocated)[1]
    assert '"env":{"CUDA_VISIBLE_DEVICES":"0"}' in answer

    counted = f"until curl -s http://{address}/metrics | grep -q 'held\"}} 1'; do sleep 0.1; done\n"
    text = f"{export}{counted}{block('curl')}\n{until('tm-17 +ended')}"
    told = terminal(text, replaced | {"127.0.0.1:9477": address}).finished()
    assert 'outfitter_devices{resource="gpu",state="held"} 1.0' in told
    assert "1 {'CUDA_VISIBLE_DEVICES': '1'}" in told
    assert re.search(r"/tm-17/run-1  ended", told)

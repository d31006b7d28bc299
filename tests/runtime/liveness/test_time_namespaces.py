"""Workers in another time namespace (time_namespaces(7)), as some containers and restored checkpoints are.

When a process started is another number there: the kernel shifts it by the namespace of whoever reads it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.checker.verdict import verified_with_replay
from support.managers.process import Manager, StartManager

WORKER = """
from outfitter import RuntimeContext
with RuntimeContext(resources={"gpu": 1}, worker="w", lease=None) as context:
    print(context.env["CUDA_VISIBLE_DEVICES"], flush=True)
    input()
"""


@pytest.fixture
def manager(start_manager: StartManager) -> Manager:
    return start_manager(gpus=2, extra='lease = "2s"')


@pytest.fixture
def worker(manager: Manager) -> Iterator[subprocess.Popen[str]]:
    """A worker that has a device and asked for no lease."""
    mine = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    shifted = [
        "unshare",
        *mine,
        "--time",
        "--boottime",
        "100000",
        "--fork",
        "--kill-child",
        sys.executable,
        "-c",
        WORKER,
    ]
    with subprocess.Popen(
        shifted, env=manager.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as begun:
        assert begun.stdout is not None
        assert begun.stdout.readline().startswith("GPU-")
        yield begun
        begun.kill()


def test_a_live_worker_of_another_time_namespace_keeps_its_device_and_sends_heartbeats(
    manager: Manager, worker: subprocess.Popen[str]
) -> None:
    manager.wait_for(lambda: (manager.record("w") or {}).get("unwatched") == "time-namespace")
    assert manager.metric("outfitter_unwatched_owners", reason="time-namespace") == 1
    assert manager.outfitter("register", "--worker", "silent", "--resource", "gpu=1").returncode == 0
    assert manager.wait_for_state("silent", "ended")["reason_code"] == "lease-expired"
    record = manager.record("w")
    assert record is not None
    assert (record["state"], record["request"]["lease_s"]) == ("allocated", 2.0)
    verified_with_replay(manager)


def test_the_death_of_a_worker_of_another_time_namespace_is_seen_at_once(
    manager: Manager, worker: subprocess.Popen[str]
) -> None:
    """Nobody can tell whether the process is the owner; when it has ended, the owner has, too."""
    record = manager.record("w")
    assert record is not None
    os.kill(record["request"]["owner"]["pid"], 9)
    assert manager.wait_for_state("w", "ended")["reason_code"] == "owner-died"

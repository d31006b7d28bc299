"""File descriptors: however many workers name however many owners, drivers, the bus and probes have theirs, owners'
deaths are seen, and the manager starts again."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outfitter_proto.bus import Entry, connect
from outfitter_proto.support.processes import process_owner, start_ticks
from outfitter_service.runtime.liveness import descriptors
from support.manager import Manager, StartManager

OWNERS = """
import os, signal, sys
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        os.close(0), os.close(1)
        signal.pause()
    print(pid, flush=True)
for line in sys.stdin:
    os.kill(int(line), signal.SIGKILL)
    os.waitpid(int(line), 0)
    print(line, end="", flush=True)
"""
"""So many processes; those whose pid is written to it are ended."""


class Owners:
    """Lightweight processes that own workers."""

    def __init__(self, count: int) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", OWNERS, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pids = [int(self._answer()) for _ in range(count)]

    def _answer(self) -> bytes:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline()

    def end(self, pids: Iterable[int]) -> None:
        assert self._parent.stdin is not None
        for pid in list(pids):
            self._parent.stdin.write(b"%d\n" % pid)
            self._parent.stdin.flush()
            assert int(self._answer()) == pid
            self.pids.remove(pid)

    def close(self) -> None:
        self.end(self.pids)
        self._parent.communicate()


@pytest.fixture
def begin() -> Iterator[Any]:
    begun: list[Owners] = []

    def some(count: int) -> Owners:
        begun.append(Owners(count))
        return begun[-1]

    yield some
    for owners in begun:
        owners.close()


def owner(pid: int) -> dict[str, Any]:
    mine = process_owner()
    assert mine is not None
    found: dict[str, Any] = msgspec.to_builtins(mine) | {"pid": pid, "start_ticks": start_ticks(pid)}
    return found


async def register_all(manager: Manager, owners: Iterable[dict[str, Any]]) -> int:
    """One worker without a lease for each of these owners; how many."""
    entries = [
        Entry(
            manager.host.encode(),
            json.dumps(
                {
                    "type": "register", "host": manager.host, "worker": f"w{number}", "incarnation": "1",
                    "resources": {}, "lease_s": None, "owner": owned,
                }
            ).encode(),
        )
        for number, owned in enumerate(owners)
    ]  # fmt: skip
    async with connect(manager.bus_url) as bus, await bus.open_writer("test", 0) as writer:
        await writer.commit([("outfitter.registrations", entries)])
    manager.wait_for(lambda: manager.metric("outfitter_ledger_records") == len(entries))
    return len(entries)


def descriptors_of(manager: Manager) -> int:
    return len(list(Path(f"/proc/{manager.pid}/fd").iterdir()))


async def test_however_many_workers_name_one_process_it_costs_one_descriptor(start_manager: StartManager) -> None:
    manager = start_manager(descriptors=(1024, 1024))
    before = descriptors_of(manager)
    await register_all(manager, [owner(1)] * 1100)
    manager.wait_for(lambda: manager.metric("outfitter_watched_owners") == 1)
    assert descriptors_of(manager) < before + 10
    manager.kill9()
    manager.start()  # the ledger brings them all back
    manager.wait_for(lambda: manager.metric("outfitter_watched_owners") == 1)
    assert manager.metric("outfitter_ledger_records") == 1100
    assert descriptors_of(manager) < before + 10


async def test_all_workers_of_one_process_end_with_it_under_a_small_limit(
    start_manager: StartManager, begin: Any
) -> None:
    manager = start_manager(descriptors=(256, 256))
    owners = begin(1)
    await register_all(manager, [owner(owners.pids[0])] * 400)
    owners.end(owners.pids)
    manager.wait_for(lambda: manager.metric("outfitter_releases_total", reason="owner-died") == 400)


async def test_a_thousand_processes_are_watched_under_a_small_limit_and_after_a_restart(
    start_manager: StartManager, begin: Any
) -> None:
    manager = start_manager(descriptors=(256, 256))
    owners = begin(1000)
    await register_all(manager, [owner(pid) for pid in owners.pids])

    def all_watched(count: int) -> bool:
        return manager.metric("outfitter_watched_owners") == count and not manager.metric("outfitter_unwatched_owners")

    manager.wait_for(lambda: all_watched(1000))
    assert manager.metric("outfitter_polled_owners") == 1000 - 128
    assert descriptors_of(manager) < 256 - 64
    assert manager.outfitter("discover", "gpu", "--config", str(manager.config)).returncode == 0
    manager.wait_for(lambda: "not every owner process" in manager.log.read_text())
    first, last = owners.pids[:50], owners.pids[-50:]
    owners.end(first + last)
    manager.wait_for(lambda: manager.metric("outfitter_releases_total", reason="owner-died") == 100)
    assert manager.log.read_text().count("not every owner process") == 1, "one line for all of them"
    manager.kill9()
    owners.end(owners.pids[:100])
    manager.start()
    manager.wait_for(lambda: manager.metric("outfitter_releases_total", reason="owner-died") == 100)
    assert all_watched(800)
    owners.end(list(owners.pids))
    manager.wait_for(lambda: manager.metric("outfitter_releases_total", reason="owner-died") == 900)
    assert all_watched(0)


def test_the_soft_limit_is_raised_at_the_start(start_manager: StartManager) -> None:
    manager = start_manager(descriptors=(300, 3000))
    assert resource.prlimit(manager.pid, resource.RLIMIT_NOFILE) == (3000, 3000)


def test_importing_the_libraries_leaves_the_limit_alone() -> None:
    look = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "import outfitter, outfitter_service.runtime.liveness.process_watch\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before"
    )
    subprocess.run(["prlimit", "--nofile=300:3000", "--", sys.executable, "-c", look], check=True)


@pytest.mark.parametrize(
    ("limit", "most"),
    [(20, 10), (256, 128), (512, 256), (513, 257), (20_000, 19_744), (resource.RLIM_INFINITY, sys.maxsize)],
)
def test_drivers_and_probes_keep_a_reserve(monkeypatch: pytest.MonkeyPatch, limit: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert descriptors.for_owners() == most

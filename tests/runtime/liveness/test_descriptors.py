"""File descriptors: however many workers name however many owners, drivers, the bus and probes have theirs, owners'
deaths are seen, and the manager starts again."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outfitter_drivers.api import TemporaryDriverError
from outfitter_proto.bus import BusUnavailableError, Entry, connect
from outfitter_proto.support.descriptors import REMEDY
from outfitter_proto.support.processes import process_owner, start_ticks
from outfitter_service.cli.commands.worker.run import DESCRIPTORS
from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code
from outfitter_service.runtime.liveness import descriptors
from outfitter_service.runtime.outage_log import OutageLog
from support.managers.process import OUTFITTER, Manager, StartManager, environment
from support.processes.few_descriptors import descriptors_left

pytestmark = pytest.mark.slow

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
    assert manager.metric("outfitter_polled_owners") == 1000 - (256 - descriptors.FOR_PROBES) // 2
    assert descriptors_of(manager) < 256 - 64
    assert manager.outfitter("discover", "gpu", "--config", str(manager.config)).returncode == 0
    manager.wait_for(lambda: "the end of every owner process" in manager.log.read_text())
    first, last = owners.pids[:50], owners.pids[-50:]
    owners.end(first + last)
    manager.wait_for(lambda: manager.metric("outfitter_releases_total", reason="owner-died") == 100)
    assert manager.log.read_text().count("the end of every owner process") == 1, "one line for all of them"
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
    assert resource.prlimit(manager.pid, resource.RLIMIT_NOFILE) == (3000 - descriptors.FOR_PROBES, 3000)


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


# --- too few ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [8, *range(10, 31, 2), 64, descriptors.NEEDED - 1])
def test_a_manager_with_too_few_descriptors_says_so_and_how_many_it_needs(tmp_path: Path, limit: int) -> None:
    for command in ("serve", "demo"):
        ended = few(tmp_path, limit, command)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr == (
            f"outfitter: the limit of open files is too low: a manager needs at least {descriptors.NEEDED} "
            f"(RLIMIT_NOFILE: soft limit {limit}, hard limit {limit}); {REMEDY}\n"
        )


@pytest.mark.parametrize("limit", range(8, 27, 2))
def test_a_worker_with_too_few_descriptors_says_so(tmp_path: Path, limit: int) -> None:
    ended = few(tmp_path, limit, "run", "--bus", f"sqlite://{tmp_path}/bus.db", "--", "true")
    assert ended.returncode == 125
    assert ended.stderr == (
        f"outfitter: `outfitter run` needs at least {DESCRIPTORS} more: too many open files (RLIMIT_NOFILE: soft limit "
        f"{limit}, hard limit {limit}): end what holds them, or {REMEDY}\n"
    )


def test_a_manager_starts_with_as_few_as_it_needs(start_manager: StartManager) -> None:
    manager = start_manager(descriptors=(20, descriptors.NEEDED))
    manager.wait_for(lambda: manager.metric("outfitter_ready") == 1)
    assert manager.metric("outfitter_descriptors_exhausted") == 0
    assert manager.stop() == 0


def few(folder: Path, limit: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["prlimit", f"--nofile={limit}:{limit}", "--", *OUTFITTER, *arguments],
        cwd=folder, env=environment(), check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


# --- none left -------------------------------------------------------------------------------------------

LEAKING = """
import os, pathlib
import anyio
from outfitter_drivers import api

class Driver(api.ExternalResourceDriver, api.Inventory):
    async def retrieve_resource_info(self, amount, worker):
        return []

    async def inventory(self, host):
        yield [api.Device(properties={"index": "0"})]
        held = []
        while True:
            try:
                while pathlib.Path("leak").exists():
                    held.append(os.open("/", os.O_RDONLY))
            except OSError as error:
                yield [api.Device(properties={"index": "0"}, health="unhealthy", reason=str(error))]
            else:
                while held:
                    os.close(held.pop())
            await anyio.sleep(0.001)

class Factory(api.ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config):
        return Driver()
"""


def test_probes_are_answered_while_a_driver_leaks_all_descriptors(start_manager: StartManager, tmp_path: Path) -> None:
    (tmp_path / "leaking.py").write_text(LEAKING)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    manager = start_manager(
        'external-resources = ["leaky", "good"]\n[external-resource.leaky]\namount = 1\ndriver = "leaking:Factory"\n'
        '[external-resource.good]\namount = 1\ndriver = "static"\nparam.count = 1\n',
        variables={"PYTHONPATH": path},
        descriptors=(256, 256),
    )
    leak = manager.folder / "leak"
    leak.touch()
    manager.wait_for(lambda: "no file descriptor is left" in manager.log.read_text())
    assert "too many open files (RLIMIT_NOFILE: soft limit 240, hard limit 256)" in manager.log.read_text()
    for _ in range(4 * descriptors.FOR_PROBES):
        for asked in ("/livez", "/readyz"):
            assert manager._get(asked) == (200, "ok\n")
        assert manager.metric("outfitter_descriptors_exhausted") == 1
    registered = manager.outfitter("register", "--worker", "w", "--resource", "good=1", "--wait", "20")
    assert registered.returncode == 0, registered.stderr
    assert manager.log.read_text().count("no file descriptor is left") == 1, "once an outage"
    leak.unlink()
    manager.wait_for(lambda: "file descriptors are free again" in manager.log.read_text())
    manager.wait_for(lambda: manager.metric("outfitter_descriptors_exhausted") == 0)
    assert resource.prlimit(manager.pid, resource.RLIMIT_NOFILE) == (256 - descriptors.FOR_PROBES, 256)


def test_a_driver_that_may_open_nothing_says_the_limit() -> None:
    def call() -> None:
        try:
            os.open("/", os.O_RDONLY)
        except OSError as error:
            raise TemporaryDriverError("no such device") from error

    with descriptors_left(0), pytest.raises(DriverCallError) as failed, foreign_code():
        call()
    assert str(failed.value).startswith("too many open files (RLIMIT_NOFILE: soft limit ")
    assert str(failed.value).endswith(": no such device")


def test_an_outage_of_the_bus_for_want_of_descriptors_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with descriptors_left(0):
        OutageLog().met("reaching the bus", BusUnavailableError("the broker cannot be used"))
    assert "the broker cannot be used; too many open files (RLIMIT_NOFILE: soft limit " in capsys.readouterr().out

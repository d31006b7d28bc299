"""The demonstration of `outfitter demo`: a real manager and three real workers, as processes in a folder of its own.

It observes them as a user would, by `outfitter status` and `/metrics`, and prints the result of each scene. If a scene
fails, the demonstration ends with exit code 1. It ends all its processes by their pids.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from outfitter_proto.names import DEFAULT_CLUSTER
from outfitter_service.cli._lib import output
from outfitter_service.cli._lib.running.child import bound
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_proto.records import Allocation, InventoryDevice
    from outfitter_service.query.ledger_view import LedgerView

GPUS = 2
SCENE_WITHIN = 20.0
"""Time limit of a scene in seconds; a scene takes about one."""

POLL_EVERY = 0.05
"""Seconds between two looks at the ledger or the metrics."""
ENDED_WITHIN = 5.0
"""Time limit for the end of a process in seconds; then it is killed."""
_PYTHON = (sys.executable, "-c")
_OUTFITTER = (sys.executable, "-m", "outfitter_service.cli")
_ADDRESS = re.compile(r"metrics at http://([0-9.]+):([0-9]+)/")
_METRICS = re.compile(
    r"outfitter_(devices|allocations|pending|watched_owners|grants_total|releases_total|exclusivity_violations"
    r"|allocation_seconds_(sum|count))\b"
)

_SLEEP = 1000.0
_WORKER = f"""
import signal, sys, time
from outfitter import RuntimeContext

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
with RuntimeContext() as context:
    for info in context.get_external_resource_infos("gpu"):
        print(info["name"], flush=True)
    time.sleep({_SLEEP})
"""


class DemoFolder(NamedTuple):
    """The demonstration's folder, and the name of its host. No other manager on this machine has that name."""

    folder: Path
    host: str

    @property
    def bus(self) -> str:
        return f"sqlite://{self.folder}/bus.db"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of all its processes, without variables of another Outfitter."""
        foreign = {name: value for name, value in os.environ.items() if not name.startswith("OUTFITTER_")}
        return foreign | {"OUTFITTER_BUS": self.bus, "OUTFITTER_HOST": self.host}


@contextmanager
def demo_folder(*, keep: bool) -> Iterator[DemoFolder]:
    """A folder with the devices and the manager's configuration. Unless `keep`, it is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="outfitter-demo-"))
    try:
        devices = folder / "gpus"
        devices.mkdir()
        for index in range(GPUS):
            (devices / f"gpu{index}").write_text(
                f"id=GPU-demo-{index}\nmodel=Paper 100\nmemory.total_bytes={80 * 2**30}\n"
                f"env.CUDA_VISIBLE_DEVICES=GPU-demo-{index}\n"
            )
        (folder / "outfitter.toml").write_text(
            'external-resources = ["gpu"]\n\n'
            '[external-resource.gpu]\namount = 1\ndriver = "files"\nparam.path = "gpus"\n'
        )
        yield DemoFolder(folder, f"demo-{os.getpid()}")
    finally:
        if keep:
            output.say(f"Its files are in {folder}.", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Demonstration:
    """The scenes. `play` returns the exit code."""

    def __init__(self, demo: DemoFolder) -> None:
        self._demo = demo
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._address: tuple[str, int] | None = None

    def play(self) -> int:
        """Play all scenes in order.

        Raises:
            OutfitterCliError: a scene failed; the message says which.
        """
        begun = time.monotonic()
        previous = signal.signal(signal.SIGTERM, _interrupted)
        try:
            self._the_manager_starts()
            self._two_workers_get_a_gpu_each()
            self._a_third_one_waits()
            self._one_is_killed_and_the_third_one_gets_its_gpu()
            self._the_metrics_say_the_same()
            self._all_is_given_back()
        finally:
            self._end_all()
            signal.signal(signal.SIGTERM, previous)
        _say(f"\nThat was all, in {time.monotonic() - begun:.0f} s. Next: README.md has the same by hand.")
        return 0

    # --- the scenes ---------------------------------------------------------------------------------------

    def _the_manager_starts(self) -> None:
        _title(f"A manager serves host {self._demo.host}, which has {GPUS} GPUs")
        _say((self._demo.folder / "outfitter.toml").read_text().strip())
        options = "--config outfitter.toml --http 127.0.0.1:0 --log-format json"
        self._start("manager", *_OUTFITTER, "serve", *options.split())
        self._await("the manager is ready", self._is_ready)
        self._await("its driver has found the GPUs", lambda: len(self._devices()) == GPUS)
        for device in self._devices():
            _say(f"    {device.properties['name']}: {device.properties['model']}, {device.health}")

    def _two_workers_get_a_gpu_each(self) -> None:
        _title("Two workers register, and each gets a GPU of its own")
        self._start("anna", *_PYTHON, _WORKER)
        self._await("anna, a program with a RuntimeContext, has a GPU", lambda: self._state("anna") == "allocated")
        self._start("boris", *_OUTFITTER, "run", "--", "sleep", f"{_SLEEP:g}")
        self._await("boris, an `outfitter run`, has a GPU", lambda: self._state("boris") == "allocated")
        self._show()
        held = [gpu for worker in ("anna", "boris") for gpu in self._gpus(worker)]
        _check(len(held) == len(set(held)) == GPUS, f"no GPU is lent twice: {held}")

    def _a_third_one_waits(self) -> None:
        _title("A third worker wants one, too, and is queued")
        self._start("clara", *_PYTHON, _WORKER)
        self._await("clara is pending", lambda: self._state("clara") == "pending")
        self._show()

    def _one_is_killed_and_the_third_one_gets_its_gpu(self) -> None:
        anna = self._processes["anna"]
        _title(f"anna (process {anna.pid}) is killed with SIGKILL, and can tell nobody")
        lost = self._gpus("anna")
        killed = time.monotonic()
        anna.kill()
        self._await("the queue has moved on to clara", lambda: self._state("clara") == "allocated")
        took = time.monotonic() - killed
        self._show()
        _check(self._gpus("clara") == lost, f"clara has the GPU that anna had: {lost}")
        _check(self._state("boris") == "allocated", "boris was not disturbed")
        _say(f"  seen {took * 1000:.0f} ms after the kill")

    def _the_metrics_say_the_same(self) -> None:
        _title("What Prometheus sees at the manager's /metrics")
        died = 'outfitter_releases_total{reason="owner-died"} 1.0'  # counted shortly after the record is readable
        self._await("one was released because its owner died", lambda: died in self._get("/metrics"))
        metrics = self._get("/metrics")
        for line in metrics.splitlines():
            if _METRICS.match(line) and (not line.endswith(" 0.0") or "violations" in line):
                _say(f"  {line}")
        _check("outfitter_exclusivity_violations_total 0.0" in metrics, "no GPU was ever lent twice")

    def _all_is_given_back(self) -> None:
        _title("The workers are told to end, and give back what they have")
        for worker in ("boris", "clara"):
            self._processes[worker].terminate()
        self._await(
            "everything is given back", lambda: all(self._state(worker) == "ended" for worker in ("boris", "clara"))
        )
        self._show()
        manager = self._processes["manager"]
        manager.terminate()
        _check(manager.wait(SCENE_WITHIN) == 0, "the manager has ended in an orderly way")

    # --- observing ------------------------------------------------------------------------------------------

    def _ledger(self) -> LedgerView:
        """The committed ledger, as in `outfitter status` and `outfitter devices`."""
        import anyio

        from outfitter_service.config import BusConnection
        from outfitter_service.query import ledger_view

        where = BusConnection(bus=self._demo.bus, host=self._demo.host, cluster=DEFAULT_CLUSTER)

        async def read() -> LedgerView:
            async with ledger_view.opened(where) as bus:
                return await ledger_view.read(bus, where.cluster)

        with _signals_wait():
            return anyio.run(read)

    def _worker(self, name: str) -> Allocation | None:
        return next(iter(self._ledger().of_worker(name)), None)

    def _state(self, worker: str) -> str | None:
        record = self._worker(worker)
        return None if record is None else record.state

    def _gpus(self, worker: str) -> list[str]:
        record = self._worker(worker)
        return [] if record is None else [device["name"] for device in record.resources.get("gpu", [])]

    def _devices(self) -> list[InventoryDevice]:
        hosts = self._ledger().hosts.values()
        return [device for host in hosts for resource in host.resources.values() for device in resource.devices]

    def _show(self) -> None:
        """Print the workers as `outfitter status` does."""
        for record, _ in self._ledger().allocations:
            has = ", ".join(device["name"] for devices in record.resources.values() for device in devices)
            position = "" if record.queue_position is None else f"position {record.queue_position} in the queue; "
            why = f"({position}{record.reason})" if record.reason else ""
            _say(f"  {record.worker:6} {record.state:10} {has:5} {why}".rstrip())

    def _is_ready(self) -> bool:
        if self._address is None:
            match = _ADDRESS.search(self._log("manager"))
            self._address = (match[1], int(match[2])) if match else None
        try:
            return self._address is not None and self._get("/readyz") == "ok\n"
        except OSError:
            return False

    def _get(self, path: str) -> str:
        if self._address is None:
            raise OutfitterCliError("the manager has not said where it listens")
        connection = http.client.HTTPConnection(*self._address, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    # --- processes ------------------------------------------------------------------------------------------

    def _start(self, name: str, *command: str) -> None:
        """Start a process that ends at the latest with this one."""
        with (self._demo.folder / f"{name}.log").open("wb") as log, _signals_wait():
            self._processes[name] = subprocess.Popen(
                bound(command),
                env=self._demo.environment | {"OUTFITTER_WORKER": name},
                cwd=self._demo.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log(self, name: str) -> str:
        return (self._demo.folder / f"{name}.log").read_text(errors="replace")

    def _await(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll until `condition()` is true.

        Raises:
            OutfitterCliError: it is not true in time, or a process has ended unexpectedly.
        """
        deadline = time.monotonic() + SCENE_WITHIN
        while not condition():
            for name, process in self._processes.items():
                # `outfitter run` dies of the signal that ended its command
                if process.poll() not in {None, 0, -signal.SIGKILL, -signal.SIGTERM}:
                    raise OutfitterCliError(f"{name} ended with {process.returncode}: {self._log(name)[-2000:]}")
            if time.monotonic() > deadline:
                raise OutfitterCliError(f"waited {SCENE_WITHIN:g} s in vain until {what}")
            time.sleep(POLL_EVERY)
        _say(f"  {what}")

    def _end_all(self) -> None:
        """End all processes, the manager last, so that it sees the workers deregister."""
        for name in reversed(self._processes):
            process = self._processes[name]
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(ENDED_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay signals that end this process. A signal that is handled at once could leave a starting process behind, or
    raise in any task of an event loop."""
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in ours:
        signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        for signal_number in received:
            signal.raise_signal(signal_number)


def _interrupted(number: int, _frame: object) -> None:
    """End this process after a signal, with its cleanup."""
    raise SystemExit(128 + number)


def _title(text: str) -> None:
    click.echo(f"\n{click.style(text, bold=True)}")


def _say(text: str) -> None:
    for line in text.splitlines() or [""]:
        output.say(line)


def _check(is_true: bool, what: str) -> None:
    if not is_true:
        raise OutfitterCliError(f"expected, but not true: {what}")
    _say(f"  {what}")

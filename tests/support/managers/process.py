"""A real `outfitter serve` in a process of its own, for tests that look at it from outside.

    def test_something(start_manager):
        manager = start_manager(gpus=2)
        done = manager.outfitter("status", "--json")

It serves a host of its own name (one machine has one manager per host), listens on a port that the kernel picks,
and has a bus file of its own unless it is given one (`sqlite:` or `kafka:`). It is ended by its pid, and what it
printed is shown when the test fails.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_proto.bus import connect
from outfitter_service.query import ledger_view
from support.kafka.broker import KafkaBroker
from support.polling import PATIENCE_S, until

OUTFITTER = (sys.executable, "-m", "outfitter_service.cli")
"""The command line of the interpreter that runs the tests."""

READY_WITHIN = 60.0
STOPPED_WITHIN = 30.0
_ADDRESS = re.compile(r"metrics at http://([0-9.]+):([0-9]+)/metrics")


class ManagerError(Exception):
    """The manager did not do what it was told to; the message ends with the tail of its log."""


def environment(**more: str) -> dict[str, str]:
    """The environment without anything of Outfitter's in it, and with `more`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OUTFITTER_")} | more


def files_config(folder: Path, *, gpus: int = 2, amount: int = 1, extra: str = "") -> str:
    """Make `folder` with `gpus` files in it, and the TOML that makes each of them a device of resource `gpu`.

    Each device adds its name to `CUDA_VISIBLE_DEVICES`. `extra` are top-level settings, such as `lease = "1s"`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(gpus):
        add_device(folder, index)
    return (
        f'{extra}\nexternal-resources = ["gpu"]\n[external-resource.gpu]\namount = {amount}\n'
        f'driver = "files"\nparam.path = "{folder}"\nparam.poll-interval = "50ms"\n'
    )


def add_device(folder: Path, index: int, **more: str) -> Path:
    """Put device `gpu<index>` into the folder, whole from the first moment on."""
    lines = {"id": f"GPU-{index}", "env.CUDA_VISIBLE_DEVICES": f"GPU-{index}", **more}
    path, hidden = folder / f"gpu{index}", folder / f".gpu{index}"
    hidden.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    return hidden.rename(path)


class Manager:
    """`outfitter serve` with `config` (TOML text). It keeps bus, host and configuration over restarts.

    `bus` None: a file in `folder`. `host` None: a new name. `arguments` go to `serve` as they are, and so
    do the environment `variables`. `descriptors` are its soft and hard RLIMIT_NOFILE. `program` is what serves.
    """

    def __init__(
        self,
        folder: Path,
        config: str,
        *,
        bus: str | None = None,
        host: str | None = None,
        cluster: str = "outfitter",
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        descriptors: tuple[int, int] | None = None,
        program: Sequence[str] = OUTFITTER,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.bus_url = bus or f"sqlite://{folder}/bus.db?synchronous=NORMAL"
        self.host = host or f"t-{secrets.token_hex(5)}"
        self.cluster = cluster
        self.config = folder / "outfitter.toml"
        self.config.write_text(config)
        self.log = folder / f"manager-{self.host}.log"
        self._arguments = tuple(arguments)
        self._variables = dict(variables or {})
        self._descriptors = descriptors
        self._program = tuple(program)
        self._process: subprocess.Popen[bytes] | None = None
        self._address: tuple[str, int] | None = None
        self._log_begins = 0

    # --- its life ------------------------------------------------------------------------------------------

    def start(self, *arguments: str, ready: bool = True, within: float = READY_WITHIN) -> None:
        """Start it, this time with more `arguments`, and block until /readyz says 200 unless `ready` is false.

        `within`: how long that may take at most, in seconds."""
        if self._process is not None:
            raise ManagerError("the manager is running already")
        self._log_begins = self.log.stat().st_size if self.log.exists() else 0
        command = [
            *self._program, "serve", "--config", str(self.config), "--bus", self.bus_url, "--host", self.host,
            "--cluster", self.cluster, "--http", "127.0.0.1:0", "--log-format", "text", *self._arguments,
            *arguments,
        ]  # fmt: skip
        if self._descriptors is not None:
            soft, hard = self._descriptors
            command = ["prlimit", f"--nofile={soft}:{hard}", "--", *command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                env=environment(**self._variables),
                start_new_session=True,
            )  # fmt: skip
        self._address = None
        if ready:
            self._await(lambda: self.listens() and self._is_ready(), "ready", within)

    def stop(self) -> int:
        """End it in an orderly way and return its exit code. Repeatable (then 0)."""
        return self._end(signal.SIGTERM)

    def kill9(self) -> None:
        """End it as a crash would. Repeatable."""
        self._end(signal.SIGKILL)

    def restart(self, *, within: float = READY_WITHIN) -> None:
        """Start it again after whatever ended it, ending it in an orderly way if nothing has. `within`: see `start`."""
        self.stop()
        self.start(within=within)

    def change_program(self, program: Sequence[str]) -> None:
        """Have another program serve from the next start on."""
        self._program = tuple(program)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = STOPPED_WITHIN) -> int:
        """Block until it has ended by itself; return its exit code."""
        if self._process is None:
            raise ManagerError("the manager is not running")
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise ManagerError(f"the manager runs on after {timeout:g} s\n{self.log_tail()}") from error
        self._process = None
        return code

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ManagerError("the manager is not running")
        return self._process.pid

    # --- what it says ----------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where its HTTP is: `http://127.0.0.1:PORT`. Another one after each start."""
        if self._address is None:
            raise ManagerError("the manager is not running")
        return f"http://{self._address[0]}:{self._address[1]}"

    def metrics(self) -> str:
        """What Prometheus would scrape."""
        status, body = self._get("/metrics")
        if status != 200:
            raise ManagerError(f"/metrics says {status}: {body}")
        return body

    def metric(self, name: str, **labels: str) -> float | None:
        """The sum of the samples of `name` whose labels include `labels`, None without any."""
        found = [
            float(value)
            for line in self.metrics().splitlines()
            if (match := re.fullmatch(r"([A-Za-z0-9_:]+)(?:\{(.*)\})? (\S+)", line)) and match[1] == name
            for value in [match[3]]
            if labels.items() <= dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")).items()
        ]
        return sum(found) if found else None

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else "(it wrote no log)"

    def readiness(self) -> str:
        """What its readiness probe says."""
        return self._get("/readyz")[1]

    # --- commands against it -----------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to find this manager."""
        return environment(OUTFITTER_BUS=self.bus_url, OUTFITTER_HOST=self.host, OUTFITTER_CLUSTER=self.cluster)

    def outfitter(
        self, *arguments: str, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of `outfitter` to its end."""
        return subprocess.run(
            [*OUTFITTER, *arguments], env={**self.environment, **(env or {})}, cwd=self.folder, check=False,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def popen(self, *arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a command of `outfitter`, its output in pipes; the caller ends it."""
        return subprocess.Popen(
            [*OUTFITTER, *arguments],
            **{
                "env": {**self.environment, **(env or {})}, "cwd": self.folder, "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options,
            },
        )  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """The worker records, as `outfitter status --json` prints them, without a process for each look."""

        async def look() -> list[dict[str, Any]]:
            async with connect(self.bus_url) as bus:
                found = await ledger_view.read(bus, self.cluster)
            return [json.loads(stored.wire) for stored in found.allocations]

        with ThreadPoolExecutor(1) as apart:  # the caller may have an event loop of its own
            return apart.submit(anyio.run, look).result()

    def record(self, worker: str) -> dict[str, Any] | None:
        """The newest record of `worker`, None without any."""
        return next((record for record in reversed(self.records()) if record["worker"] == worker), None)

    def wait_for(self, condition: Callable[[], object], *, timeout: float = PATIENCE_S) -> None:
        """Block until `condition` holds, looking again and again; what it looks at is another process's doing."""
        until(condition, self.log_tail, within_s=timeout)

    def wait_for_state(self, worker: str, state: str, *, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """Block until the newest record of `worker` is in `state`; return it."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            record = self.record(worker)
            found[:] = [record] if record else []
            return record is not None and record["state"] == state

        self.wait_for(look, timeout=timeout)
        return found[0]

    # --- inside ------------------------------------------------------------------------------------------------

    def listens(self) -> bool:
        """Whether it has said where it listens. Before that it has no `readiness`."""
        if self._address is None:
            with self.log.open("rb") as log:
                log.seek(self._log_begins)
                match = _ADDRESS.search(log.read().decode(errors="replace"))
            self._address = (match[1], int(match[2])) if match else None
        return self._address is not None

    def _is_ready(self) -> bool:
        try:
            return self._get("/readyz")[0] == 200
        except OSError:  # it has just ended; the next look at the process says so
            return False

    def _get(self, path: str) -> tuple[int, str]:
        if self._process is None or not self.listens() or self._address is None:
            raise ManagerError("the manager is not running, or has not said yet where it listens")
        connection = http.client.HTTPConnection(*self._address, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def _await(self, condition: Callable[[], object], what: str, within: float = READY_WITHIN) -> None:
        def look() -> object:
            if self._process is None or self._process.poll() is not None:
                code = None if self._process is None else self._process.returncode
                self._process = None
                raise ManagerError(f"the manager ended with {code} before it was {what}\n{self.log_tail()}")
            return condition()

        try:
            until(look, self.log_tail, within_s=within)
        except AssertionError as error:
            self.kill9()
            raise ManagerError(f"the manager was not {what} within {within:g} s\n{self.log_tail()}") from error

    def _end(self, number: int) -> int:
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self.wait()
        except ManagerError:
            if self._process is not None:
                self._process.kill()
                self.wait()
            raise
        finally:
            self._address = None


StartManager = Callable[..., Manager]


@pytest.fixture
def start_manager(tmp_path: Path) -> Iterator[StartManager]:
    """Start managers: `start_manager(config=None, *, gpus=2, amount=1, extra="", **options of Manager)`.

    Without `config` it serves a resource `gpu` of `gpus` files in `manager.folder / "gpus"`.
    """
    started: list[Manager] = []

    def start(
        config: str | None = None,
        *,
        gpus: int = 2,
        amount: int = 1,
        extra: str = "",
        ready: bool = True,
        **options: Any,
    ) -> Manager:
        folder = tmp_path / f"manager-{len(started)}"
        if config is None:
            config = files_config(folder / "gpus", gpus=gpus, amount=amount, extra=extra)
        manager = Manager(folder, config, **options)
        started.append(manager)
        manager.start(ready=ready)
        return manager

    try:
        yield start
    finally:
        for manager in started:
            manager.kill9()
            print(f"--- {manager.log}\n{manager.log_tail()}")


@contextmanager
def serving_on(
    broker: KafkaBroker, folder: Path, *, gpus: int = 1, config: str = "", partitions: int = 3, **options: Any
) -> Iterator[Manager]:
    """A manager on a broker whose topics it has made, with `config` or else for a host with `gpus` `files` GPUs.
    `options` of Manager, such as `cluster`, which a shared broker needs."""
    manager = Manager(folder, config or files_config(folder / "gpus", gpus=gpus), bus=broker.url, **options)
    created = manager.outfitter("topics", "create", "--partitions", str(partitions), "--replication", "1")
    assert created.returncode == 0, created.stderr
    try:
        manager.start()
        yield manager
    finally:
        manager.kill9()
        print(f"--- {manager.log}\n{manager.log_tail()}")


@pytest.fixture(scope="module")
def shared_manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A manager of a host with two `files` GPUs for the tests of one module: leave nothing behind, stop nothing."""
    folder = tmp_path_factory.mktemp("manager")
    manager = Manager(folder, files_config(folder / "gpus"))
    try:
        manager.start()
        manager.wait_for(lambda: manager.metric("outfitter_devices", resource="gpu"))  # its driver has reported
        yield manager
    finally:
        manager.kill9()
        print(f"--- {manager.log}\n{manager.log_tail()}")


@pytest.fixture
def manager(start_manager: StartManager) -> Manager:
    """A manager of a host with two `files` GPUs, one of which each worker gets unless it asks for more."""
    return start_manager()

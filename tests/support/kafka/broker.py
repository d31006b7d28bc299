"""A real Kafka broker for tests, from the jars that deploy/kafka resolves. No mock, and no skip without it.

`kafka_broker` is one broker for the whole run, shared by xdist's workers: use topics of your own
(`KafkaBroker.new_cluster`) and never stop it. `own_broker` is one for a single test, to be stopped, killed and
frozen. `OUTFITTER_TEST_KAFKA=host:port` makes the first one an existing broker; the second is always started here.
Its transactions are of version 2 (KIP-890). `version_1_broker` and `old_kafka_broker` are shared, too.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

LAUNCHER = Path(__file__).resolve().parents[3] / "deploy" / "kafka" / "local_kafka.py"
READY_WITHIN = 90.0
"""Seconds. A node killed with -9 waits up to 15 s for its own old session; the machine may be busy besides."""

OLD, NEW = "3.9.1", "4.3.1"
"""The releases of Kafka that are tested; the second is what deploy/kafka/pom.xml names."""
VERSION_1 = "--feature", "transaction.version=1"
"""The option of a broker whose transactions are of version 1."""

QUICK_RETURN = {"broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "300"}
"""How long a killed node waits for its own old session before it comes back."""


class BrokerError(Exception):
    """The broker could not be started; the message ends with the tail of its log."""


class KafkaBroker:
    """The address of a broker."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    @property
    def url(self) -> str:
        """The bus URL of this broker."""
        return f"kafka://{self.bootstrap}"

    @staticmethod
    def new_cluster() -> str:
        """A cluster name that nobody has used: its topics are the caller's own."""
        return f"t-{secrets.token_hex(5)}"


class Broker(KafkaBroker):
    """A broker that this process started and may ill-treat. It keeps its port and its data over restarts.

    `settings` are broker settings by Kafka's names, in addition to those of deploy/kafka. `options` go to its
    launcher (`--kafka 3.9.1`, `--heap 256m`), and the launcher is an argument of `within`, if there is such.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, str] | None = None,
        *,
        port: int | None = None,
        options: Sequence[str] = (),
        within: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.log = folder / "broker.log"
        controller = free_port()
        self._settings = {
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}",
        } | (settings or {})
        self._options = tuple(options)
        self._within = tuple(within)
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: subprocess.Popen[bytes] | None = None
        super().__init__(f"127.0.0.1:{self.port}")

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BrokerError("the broker is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started, and has not ended by itself."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and block until it answers. In async tests use `restarted`, which does not block the loop."""
        self.launch()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Block until it answers after `launch`."""
        deadline = time.monotonic() + READY_WITHIN
        while not self._ready(deadline):
            time.sleep(0.05)

    async def restarted(self) -> None:
        """Start it again and wait until it answers."""
        self.launch()
        deadline = time.monotonic() + READY_WITHIN
        while not self._ready(deadline):  # noqa: ASYNC110  (a process of another kind sets no event of ours)
            await anyio.sleep(0.05)

    def stop(self) -> None:
        """End it in an orderly way. Repeatable."""
        self._end(signal.SIGTERM)

    def kill9(self) -> None:
        """End it as a power cut would."""
        self._end(signal.SIGKILL)

    def await_end(self, within: float = 60.0) -> None:
        """Wait until it has ended by itself."""
        if self._process is None:
            raise BrokerError("the broker is not running")
        self._process.wait(within)
        self.kill9()

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on. Repeatable, while it runs."""
        os.kill(self.pid, signal.SIGCONT)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else "(it wrote no log)"

    def launch(self) -> None:
        """Start it without waiting until it answers."""
        if self._process is not None:
            raise BrokerError("the broker is running already")
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            *self._within, sys.executable, str(LAUNCHER), "broker", "--port", str(self.port),
            "--data", str(self.folder / "data"), *self._options,
        ]  # fmt: skip
        for name, value in self._settings.items():
            command += ["--set", f"{name}={value}"]
        with self.log.open("ab") as log:
            # A session, hence a process group, of its own: Ctrl-C is ours, and whatever it starts ends with it.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        # When this process dies in whatever way, the pipe closes and the lifeline ends the broker.
        self._lifeline = subprocess.Popen(
            ["sh", "-c", 'read -r _; kill -KILL -- "-$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _ready(self, deadline: float) -> bool:
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            self._end(signal.SIGKILL)
            raise BrokerError(f"the broker ended with status {code} instead of starting:\n{self.log_tail()}")
        if answers(self.bootstrap):
            return True
        if time.monotonic() > deadline:
            self._end(signal.SIGKILL)
            raise BrokerError(f"the broker did not answer within {READY_WITHIN:.0f} s:\n{self.log_tail()}")
        return False

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            lifeline.kill()  # first: later the broker's number may be somebody else's
            lifeline.communicate()
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, number)
            if number is not signal.SIGKILL:
                os.killpg(process.pid, signal.SIGCONT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def answers(bootstrap: str) -> bool:
    """Whether somebody accepts connections at `host:port`."""
    host, _, port = bootstrap.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def kafka_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KafkaBroker:
    """One real broker for the whole run. If there is none, the tests that want it fail and say why."""
    given = os.environ.get("OUTFITTER_TEST_KAFKA")
    if given:
        if not answers(given):
            pytest.fail(f"OUTFITTER_TEST_KAFKA={given}: nobody accepts connections there", pytrace=False)
        return KafkaBroker(given)
    return _shared(request, tmp_path_factory, "kafka")


@pytest.fixture(scope="session")
def version_1_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KafkaBroker:
    """One broker for the whole run whose transactions are of version 1."""
    return _shared(request, tmp_path_factory, "version-1", VERSION_1)


@pytest.fixture(scope="session")
def old_kafka_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KafkaBroker:
    """One broker of the oldest Kafka that is tested, for the whole run. It knows transactions of version 1 only."""
    return _shared(request, tmp_path_factory, "old-kafka", ("--kafka", OLD))


def _shared(
    request: pytest.FixtureRequest, folders: pytest.TempPathFactory, name: str, options: Sequence[str] = ()
) -> KafkaBroker:
    root = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    shared = shared_broker(root, name, options)
    broker = shared.__enter__()
    # at the end of the session: it waits for the tests of other processes, which is no part of this one's last test
    request.config.add_cleanup(lambda: shared.__exit__(None, None, None))
    return broker


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker of the test's own, started; to be killed, frozen and restarted at will."""
    broker = Broker(tmp_path / "kafka", QUICK_RETURN)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


@contextmanager
def shared_broker(root: Path, name: str = "kafka", options: Sequence[str] = ()) -> Iterator[KafkaBroker]:
    """The broker of that name of the processes that share `root`: whoever comes first starts it and stays until the
    last is done. `options`: see `Broker`.

    The address file exists while the broker runs; each user but the starter holds a shared lock on it.
    """
    address = root / f"{name}-address"
    with (root / f"{name}-lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if address.exists():
            with address.open() as use:
                fcntl.flock(use, fcntl.LOCK_SH)
                fcntl.flock(turn, fcntl.LOCK_UN)
                yield KafkaBroker(use.read())
            return
        broker = Broker(root / name, options=options)
        try:
            broker.start()
            address.write_text(broker.bootstrap)
            fcntl.flock(turn, fcntl.LOCK_UN)
            yield broker
        finally:
            fcntl.flock(turn, fcntl.LOCK_EX)
            _wait_for_users(address)
            address.unlink(missing_ok=True)
            broker.stop()


def _wait_for_users(address: Path, within: float = 1000.0) -> None:
    if not address.exists():
        return
    deadline = time.monotonic() + within
    with address.open() as use:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return


def free_port() -> int:
    """A free TCP port outside the range of outgoing connections, so that it is still free after a restart.

    None is given out twice: those who run tests beside each other take theirs from different parts of the range.
    """
    share = 10_000 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = 20_000 + share * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = first + secrets.randbelow(share)
        if port in _given_out:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given_out.add(port)
        return port


_given_out: set[int] = set()

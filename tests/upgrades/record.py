"""Records what a version writes, for the tests of later ones: `python tests/upgrades/record.py CHECKOUT NAME`.

It plays one story with the command line of another checkout, on an embedded bus: `golden/NAME.db.gz` is that bus's
file, as the version left it, and `golden/NAME.json` says what is in it. Run it as root, so that no machine-id is
written down, whenever a release is made, and never change a file afterwards.

    git worktree add ../v0.1 v0.1.0 && python tests/upgrades/record.py ../v0.1 0.1.0
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
MANY = "many"
"""The cluster of the manager in cluster scope; the other ones have the default."""
PORT = 19_477
MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_PARTS = "FROM part JOIN topic ON topic.id = part.topic WHERE part = 0"


class Recording:
    """One version at work in `folder`."""

    def __init__(self, checkout: Path, name: str, folder: Path) -> None:
        self.folder = folder
        self.hosts = [f"{name.replace('.', '-')}-{letter}" for letter in "ab"]
        self.database = folder / "bus.db"
        path = os.pathsep.join(str(checkout / part) for part in ("proto", "drivers", "service"))
        own = {key: value for key, value in os.environ.items() if not key.startswith("OUTFITTER_")}
        self.environment = own | {"PYTHONPATH": path, "OUTFITTER_BUS": f"sqlite://{self.database}"}

    def run(self, *arguments: str, host: str = "") -> str:
        """A command of that version, to its end; what it printed."""
        done = subprocess.run(
            self._command(arguments), env=self.environment | ({"OUTFITTER_HOST": host} if host else {}),
            cwd=self.folder, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{arguments} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    @contextmanager
    def serving(self, *arguments: str, end: signal.Signals = signal.SIGTERM) -> Iterator[None]:
        """A manager of that version, from when it is ready. `end`: what ends it."""
        command = self._command(["serve", "--http", f"127.0.0.1:{PORT}", *arguments])
        manager = subprocess.Popen(command, env=self.environment, cwd=self.folder, stderr=subprocess.DEVNULL)
        try:
            self._await(self._is_ready, "the manager was not ready")
            yield
            manager.send_signal(end)
            manager.wait(30)
        finally:
            manager.kill()
            manager.wait()

    @staticmethod
    def _is_ready() -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=5).close()
        except OSError:
            return False
        return True

    @staticmethod
    def _await(condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"{otherwise} within 30 s")
            time.sleep(0.1)

    def configure(self, host: str, gpus: int) -> str:
        """A configuration file for a host with so many devices."""
        devices = self.folder / host
        devices.mkdir()
        for number in range(gpus):
            (devices / f"gpu{number}").write_text(f"id=GPU-{number}\nenv.CUDA_VISIBLE_DEVICES=GPU-{number}\n")
        path = self.folder / f"{host}.toml"
        path.write_text(
            f'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "files"\n'
            f'param.path = "{devices}"\nparam.poll-interval = "50ms"\n'
        )
        return str(path)

    def say(self, host: str, body: dict[str, object] | str, cluster: str = "outfitter") -> None:
        """Publish a message of a client in another language, which has only the wire contract."""
        value = body if isinstance(body, str) else json.dumps({**body, "host": host})
        with closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            query = f"SELECT topic, next {_PARTS} AND name = ?"
            topic, end = connection.execute(query, (f"{cluster}.registrations",)).fetchone()
            row = (topic, end, time.time_ns() // 1_000_000, host.encode(), value.encode())
            connection.execute("INSERT INTO record (topic, part, off, time, key, value) VALUES (?, 0, ?, ?, ?, ?)", row)
            connection.execute("UPDATE part SET next = next + 1 WHERE topic = ?", (topic,))

    def ledger(self, cluster: str = "outfitter") -> dict[str, Any]:
        """The last record of each key of the ledger."""
        query = "SELECT key, value FROM record JOIN topic ON topic.id = topic WHERE name = ? ORDER BY off"
        last = {key.decode(): value for key, value in self._rows(query, f"{cluster}.allocations")}
        return {key: json.loads(value) for key, value in last.items() if value is not None}

    def until(self, host: str, worker: str, state: str, cluster: str = "outfitter") -> None:
        """Wait until a worker is in this state."""
        key = f"{host}/{worker}/1"
        self._await(lambda: self.ledger(cluster).get(key, {}).get("state") == state, f"{key} was not {state}")

    def ends(self) -> dict[str, int]:
        """The next offset of each topic of the default cluster."""
        return dict(self._rows(f"SELECT name, next {_PARTS} AND name LIKE ?", "outfitter.%"))

    def _rows(self, query: str, *values: str) -> list[Any]:
        with closing(sqlite3.connect(self.database)) as connection:
            return connection.execute(query, values).fetchall()

    @staticmethod
    def _command(arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "outfitter_service.cli", *arguments]


def register(worker: str, gpu: int = 1) -> dict[str, object]:
    amounts = {"gpu": {"amount": gpu}}
    return {"type": "register", "worker": worker, "incarnation": "1", "lease_s": None, "resources": amounts}


def story(at: Recording) -> dict[str, Any]:
    """What happens, and what is in the file afterwards."""
    first, second = at.hosts
    # a host whose manager was stopped
    with at.serving("--config", at.configure(first, 3), "--host", first):
        for worker in ("kept", "left", "ended"):
            at.say(first, register(worker))
            at.until(first, worker, "allocated")
        at.say(first, {"type": "deregister", "worker": "ended"})
        at.until(first, "ended", "ended")
        at.say(first, register("waits", gpu=2))
        at.until(first, "waits", "pending")
        at.say(first, "{")
        at.say(first, {"type": "heartbeat", "worker": "nobody", "incarnation": "1"})
        at.say(first, {"type": "deregister", "worker": "waits", "incarnation": "of another run"})
        at.say(first, register("last", gpu=3))
        at.until(first, "last", "pending")
    # a host whose manager was killed; while it served, the first one's had a later version already
    with at.serving("--config", at.configure(second, 3), "--host", second, end=signal.SIGKILL):
        at.say(second, register("kept"))
        at.until(second, "kept", "allocated")
        mark = at.ends()
        at.say(second, register("later"))
        at.until(second, "later", "allocated")
        at.say(second, {"type": "deregister", "worker": "later"})
        at.until(second, "later", "ended")
    # what clients said while no manager served: two of the wire alone, and one of that version
    at.say(first, {"type": "deregister", "worker": "left", "incarnation": "1", "reason": "done"})
    at.say(second, register("new"))
    at.run("register", "--worker", "client", "--lease", "1h", "--resource", "gpu=1", "--label", "a=b", host=second)
    # cluster scope
    config = at.folder / "cluster.toml"
    config.write_text(
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "static"\n'
        'param.devices = "GPU-0;GPU-1"\n'
    )
    with at.serving("--config", str(config), "--scope", "cluster", "--cluster", MANY):
        for worker in ("kept", "left"):
            at.say(first, register(worker), MANY)
            at.until(first, worker, "allocated", MANY)
    return {
        "version": at.run("--version").split()[-1],
        "hosts": at.hosts,
        "mark": mark,
        "ledger": {cluster: at.ledger(cluster) for cluster in ("outfitter", MANY)},
    }


def main(checkout: str, name: str) -> None:
    shown = [path for path in MACHINE_IDS if Path(path).exists() and Path(path).read_text().strip()]
    if shown:
        hidden = "; ".join(["set -e", *(f"mount --bind /dev/null {path}" for path in shown), 'exec "$0" "$@"'])
        command = ["unshare", "--mount", "sh", "-c", hidden, sys.executable, __file__, checkout, name]
        raise SystemExit(subprocess.run(command, check=False).returncode)
    with tempfile.TemporaryDirectory() as folder:
        at = Recording(Path(checkout).resolve(), name, Path(folder))
        told = story(at)
        with closing(sqlite3.connect(at.database)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / f"{name}.db.gz").write_bytes(gzip.compress(at.database.read_bytes(), mtime=0))
        (GOLDEN / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A broker that comes back under another advertised address: whoever worked with it finds it, and loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.kafka.broker import QUICK_RETURN, Broker, KafkaBroker, free_port
from support.managers.api import running
from support.managers.process import Manager, serving_on

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


class Movable:
    """A broker that is reached first at one address, and that advertises another one each time it runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own, self._first, self._controller = (free_port() for _ in range(3))
        self.first = KafkaBroker(f"127.0.0.1:{self._first}")

    @contextmanager
    def advertised_anew(self) -> Iterator[None]:
        new = free_port()
        ports = {"OWN": self._own, "FIRST": self._first, "NEW": new, "CONTROLLER": self._controller}
        settings = QUICK_RETURN | {
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller}",
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items()),
            "advertised.listeners": f"OWN://127.0.0.1:{self._own},FIRST://127.0.0.1:{new},NEW://127.0.0.1:{new}",
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in ports),
            "inter.broker.listener.name": "OWN",
        }
        broker = Broker(self._folder, settings, port=self._own)
        try:
            broker.start()
            yield
        finally:
            broker.stop()


def test_manager_api_and_workers_find_it(tmp_path: Path) -> None:
    broker = Movable(tmp_path / "kafka")
    with ExitStack() as stack:
        with broker.advertised_anew():
            manager = stack.enter_context(serving_on(broker.first, tmp_path / "manager", gpus=2))
            api = stack.enter_context(running(tmp_path, broker.first.url))
            manager.wait_for(lambda: api.is_ready)
            holder = manager.popen("hold", "--no-stdin", "--lease", "none", "--resource", "gpu=1")
            stack.callback(holder.kill)
            assert holder.stdout is not None
            assert '"allocation"' in holder.stdout.readline()
        with broker.advertised_anew():
            _run(manager)
            holder.terminate()
            assert "could not deregister" not in holder.communicate()[1]
            _run(manager)
            manager.wait_for(lambda: len(api.get("/api/v1/history")[1]["items"]) > 6)


def _run(manager: Manager) -> None:
    done = manager.outfitter("run", "--resource", "gpu=1", "--wait", "60s", "--", "true")
    assert done.returncode == 0, done.stderr

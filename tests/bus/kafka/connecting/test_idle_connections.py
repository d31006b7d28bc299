"""Connections that something on the way has forgotten while they were idle: nobody believes them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import Bus, Entry, TopicSpec, connect
from outfitter_proto.bus.kafka.connecting import connection as connection_module
from outfitter_proto.bus.kafka.connecting.connection import Connector
from outfitter_proto.bus.kafka.connecting.login import login_of
from support.kafka.broker import KafkaBroker
from support.kafka.forgetful_proxy import ForgetfulProxy, broker_behind
from support.managers.fleet import CONFIG
from support.managers.process import Manager, serving_on

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

FORGETS_AFTER_S = 15.0

Behind = tuple[KafkaBroker, ForgetfulProxy]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    with broker_behind(tmp_path_factory.mktemp("behind")) as pair:
        yield pair


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every idle connection is asked before it is used."""
    monkeypatch.setattr(connection_module, "IDLE_S", 0.0)


@pytest.mark.usefixtures("asked")
async def test_a_writer_commits_on_new_connections(behind: Behind) -> None:
    broker, proxy = behind
    async with connect(broker.url) as bus:
        topic = await _topic(bus)
        async with await bus.open_writer(topic, 0) as writer:
            for number in range(3):
                await writer.commit([(topic, [Entry(b"k", str(number).encode())])])
                proxy.forget()
            assert not writer.must_reopen
        assert await _values(bus, topic) == [b"0", b"1", b"2"]


@pytest.mark.usefixtures("asked")
async def test_everything_else_goes_on_as_well(behind: Behind) -> None:
    broker, proxy = behind
    async with connect(broker.url) as bus:
        topic = await _topic(bus)
        async with await bus.open_reader(topic, 0, start=0, committed=False) as reader:
            for number in range(3):
                await bus.publish(topic, 0, Entry(b"k", str(number).encode()))
                proxy.forget()
                assert (await bus.topic(topic)).partitions == 1
                proxy.forget()
                assert await bus.stable_end(topic, 0) == number + 1
                proxy.forget()
                assert await bus.tenure(topic) is None
                proxy.forget()
            with anyio.fail_after(60):
                found: list[bytes | None] = []
                while len(found) < 3:
                    found += [message.value for message in await reader.fetch()]
        assert found == [b"0", b"1", b"2"]


async def test_the_kernel_asks_as_well(behind: Behind) -> None:
    broker, _ = behind
    connector = Connector(login_of(broker.url))
    connection = await connector.connect(connector.login.nodes[0], timeout=3)
    try:
        of_kernel = connection._writer.get_extra_info("socket")
        assert of_kernel.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert of_kernel.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 10
        assert of_kernel.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0
    finally:
        connection.close()


def test_a_worker_after_a_quiet_time_is_answered(behind: Behind, tmp_path: Path) -> None:
    broker, proxy = behind
    with serving_on(broker, tmp_path / "manager") as manager:
        _run(manager)
        proxy.idle_s = FORGETS_AFTER_S
        manager.wait_for(lambda: proxy.has_idle(FORGETS_AFTER_S + 1))
        _run(manager)
        assert "the bus is away" not in manager.log.read_text()


def test_cluster_scope_and_a_holder_outlive_a_quiet_time(behind: Behind, tmp_path: Path) -> None:
    broker, proxy = behind
    proxy.idle_s = None
    scope = "--scope", "cluster", "--replica", "one"
    with serving_on(broker, tmp_path / "manager", cluster="quiet", config=CONFIG, arguments=scope) as manager:
        holder = manager.popen("hold", "--lease", "15s", "--no-stdin", "--resource", "gpu=1")
        try:
            assert holder.stdout is not None
            assert '"allocation"' in holder.stdout.readline()
            _run(manager)
            proxy.idle_s = FORGETS_AFTER_S
            manager.wait_for(lambda: proxy.has_idle(FORGETS_AFTER_S + 1))
            _run(manager)
            proxy.forget()
            _run(manager)
            assert holder.poll() is None
        finally:
            holder.terminate()
            holder.communicate()
        assert holder.returncode == 0
        assert manager.log.read_text().count("partitions assigned") == 1
        assert manager.log.read_text().count("the bus is away") == 0


def _run(manager: Manager) -> None:
    done = manager.outfitter("run", "--resource", "gpu=1", "--wait", "60s", "--", "true")
    assert done.returncode == 0, done.stderr


async def _topic(bus: Bus) -> str:
    name = KafkaBroker.new_cluster()
    await bus.create_topics([TopicSpec(name, 1, {})])
    return name


async def _values(bus: Bus, topic: str) -> list[bytes | None]:
    end = await bus.stable_end(topic, 0)
    found = []
    async with await bus.open_reader(topic, 0, start=0, committed=True) as reader:
        while reader.position < end:
            found += [message.value for message in await reader.fetch()]
    return found

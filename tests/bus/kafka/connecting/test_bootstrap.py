"""Bootstrap addresses that refuse or say nothing: the living one is found, and no time-out is waited for."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import anyio
import pytest

from outfitter_proto.bus import Bus, BusUnavailableError, Entry, TopicSpec, connect
from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka import adapter, membership
from outfitter_proto.bus.kafka.connecting import cluster
from outfitter_proto.bus.kafka.connecting.broker_directory import BrokerDirectory
from support.kafka.broker import KafkaBroker, free_port

NEVER_S = 1000.0


@contextmanager
def silent() -> Iterator[str]:
    """An address where nothing answers a SYN, as of a machine that is off: the listener's backlog is full."""
    with ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", free_port()))
        listener.listen(0)
        for _ in range(4):
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def address(kind: str) -> Iterator[str]:
    if kind == "silent":
        with silent() as where:
            yield where
    else:
        yield f"127.0.0.1:{free_port()}"


@pytest.mark.kafka
@pytest.mark.parametrize(
    "dead",
    [["refuses"] * 6, ["silent"] * 2, ["silent"] * 6, ["silent", "refuses", "silent"]],
    ids=["six refuse", "two are silent", "six are silent", "mixed"],
)
async def test_the_living_address_is_found_behind_dead_ones(
    kafka_broker: KafkaBroker, dead: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cluster, adapter, membership):
        monkeypatch.setattr(module, "REQUEST_TIMEOUT", NEVER_S)
    monkeypatch.setattr(adapter, "TAKE_WITHIN", NEVER_S)
    with ExitStack() as stack:
        addresses = [stack.enter_context(address(kind)) for kind in dead]
        with anyio.fail_after(100):
            async with connect(f"kafka://{','.join(addresses)},{kafka_broker.bootstrap}") as bus:
                await _use(bus)


async def _use(bus: Bus) -> None:
    topic = KafkaBroker.new_cluster()
    await bus.create_topics([TopicSpec(topic, 1, {})])
    async with await bus.open_writer(topic, 0) as writer:
        await writer.commit([(topic, [Entry(b"k", b"v")])])
    assert (await bus.offsets(topic, 0))[0] == 0
    async with await bus.open_reader(topic, 0, start=0, committed=True) as reader:
        while not await reader.fetch():
            pass
    member = await bus.join(topic, topic, replica=None, session_timeout=10, heartbeat_interval=1)
    while not member.partitions:  # noqa: ASYNC110  (the broker tells it in its own time)
        await anyio.sleep(0.01)
    await member.leave()


async def test_of_only_dead_addresses_each_is_named() -> None:
    ports = [free_port() for _ in range(7)]
    with pytest.raises(BusUnavailableError) as raised:
        async with connect("kafka://" + ",".join(f"127.0.0.1:{port}" for port in ports)):
            pass
    assert all(f"127.0.0.1:{port} refuses" in str(raised.value) for port in ports)


def test_addresses_of_the_url_have_no_vote_and_replaced_ones_are_forgotten() -> None:
    url, old, new, other = Node("url", 1), Node("old", 1), Node("new", 1), Node("other", 1)
    found = BrokerDirectory([url])
    found.learn({1: old, 2: other})
    assert found.brokers() == [old, other]
    found.learn({1: new, 2: other})
    assert found.brokers() == [new, other]
    assert found.address(1) == new
    found.answered(other, before=[url])
    assert found.order() == [other, new, url]
    found.answered(old)
    assert old not in found.order()

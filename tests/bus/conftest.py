"""What the tests of both adapters share: a bus of each kind, and topics of one's own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from outfitter_proto.bus import Bus, TopicSpec, connect

MakeTopic = Callable[..., Awaitable[str]]


@pytest.fixture
def embedded_url(tmp_path: Path) -> str:
    """A new embedded bus's URL. NORMAL: no test cuts the power."""
    return f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"


BROKERS = {
    "kafka": "kafka_broker",
    "transactions of version 1": "version_1_broker",
    "old kafka": "old_kafka_broker",
}
SLOW = [pytest.mark.kafka, pytest.mark.slow]


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("kafka", marks=pytest.mark.kafka),
        pytest.param("transactions of version 1", marks=SLOW),
        pytest.param("old kafka", marks=SLOW),
    ]
)
def bus_url(request: pytest.FixtureRequest, embedded_url: str) -> str:
    """The URL of a bus of each kind; the broker is started by the first test that asks for it."""
    if request.param == "embedded":
        return embedded_url
    return str(request.getfixturevalue(BROKERS[request.param]).url)


@pytest.fixture
async def bus(bus_url: str) -> AsyncIterator[Bus]:
    async with connect(bus_url) as bus:
        yield bus


@pytest.fixture
def make_topic(bus: Bus) -> MakeTopic:
    """Makes a topic that no other test knows; takes settings by Kafka's names with `_` for `.`."""

    async def make(*, partitions: int = 1, **settings: str) -> str:
        name = f"contract-{secrets.token_hex(6)}"
        config = {setting.replace("_", "."): value for setting, value in settings.items()}
        assert await bus.create_topics([TopicSpec(name, partitions, config)]) == [name]
        return name

    return make

"""A bus of each kind for the tests of the API, with the topics of a cluster of one's own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, connect
from support.api import PARTITIONS


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def bus_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a bus of each kind."""
    if request.param == "embedded":
        return f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    return str(request.getfixturevalue("kafka_broker").url)


@pytest.fixture
def cluster() -> str:
    return f"api-{secrets.token_hex(4)}"


@pytest.fixture
async def bus(bus_url: str, cluster: str) -> AsyncIterator[Bus]:
    """A bus with the cluster's topics."""
    async with connect(bus_url) as bus:
        await all_topics.create(bus, cluster, partitions=PARTITIONS, replication=1)
        yield bus

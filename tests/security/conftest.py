"""What the tests of this folder share: the broker, and topics of one's own on it."""

from __future__ import annotations

import secrets

import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import connect
from support.kafka.secure_broker import SecureBroker, secure_broker

__all__ = ["secure_broker"]


@pytest.fixture
async def cluster(secure_broker: SecureBroker) -> str:
    """A cluster of the test's own, whose topics an administrator has made; nobody has any right there yet."""
    name = f"t-{secrets.token_hex(4)}"
    async with connect(secure_broker.at("open"), secure_broker.administrator()) as bus:
        await all_topics.create(bus, name, partitions=1)
    return name

"""The version of transactions is raised and lowered while writers are open: each finds out when it is taken anew."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import Bus, BusError, Entry, TopicSpec, Writer, connect
from support.bus.committed import committed
from support.kafka.broker import LAUNCHER, VERSION_1, Broker
from support.kafka.transactions import held_by

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

WITHIN = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "kafka", options=VERSION_1)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


async def set_version(broker: Broker, version: int) -> None:
    """As an administrator does."""
    verb = {1: "downgrade", 2: "upgrade"}[version]
    arguments = ["--bootstrap-server", broker.bootstrap, verb, "--feature", f"transaction.version={version}"]
    done = await anyio.run_process([sys.executable, str(LAUNCHER), "features", *arguments], check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def opened(bus: Bus, topic: str, version: int) -> Writer:
    """A writer, once the broker knows the version."""
    with anyio.fail_after(WITHIN):
        while True:
            writer = await bus.open_writer(topic, 0, topics=[topic])
            if held_by(writer).version == version:
                return writer
            await writer.aclose()


async def test_a_version_that_is_raised_or_lowered_costs_no_commit(broker: Broker) -> None:
    topic, values = broker.new_cluster(), iter(range(100))
    committed_values: list[bytes] = []
    async with connect(broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])

        async def commit(writer: Writer) -> None:
            value = b"%d" % next(values)
            await writer.commit([(topic, [Entry(b"k", value)])])
            committed_values.append(value)

        for version in (1, 2, 1, 2):
            async with await opened(bus, topic, version) as writer:
                await commit(writer)
                await set_version(broker, 3 - version)
                with suppress(BusError):  # that this version is none any more
                    for _ in range(5):
                        await commit(writer)
        seen = [message.value for message in await committed(bus, topic)]
        assert seen == committed_values
        assert len(seen) > 4

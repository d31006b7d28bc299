"""Operators give, double, end and lose orders while workers come and go, brokers are away and managers are killed."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from chaos.harm import Harmed
from chaos.scene import Note, Scene, playing
from outfitter_proto import topics as wanted
from outfitter_proto.bus import Entry, UnknownTopicError, connect
from outfitter_proto.codec import encode
from outfitter_proto.names import control_topic
from outfitter_proto.records import Cordon, CordonOrder
from outfitter_service.query import ledger_view
from support.polling import until

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]


class Operator:
    """Gives orders for one device or a host of a scene."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._url = f"kafka://{scene.broker.direct}"

    def says(self, name: str, host: str, **fields: Any) -> None:
        """Write an order."""
        order = CordonOrder(id=name, host=host, author="chaos", reason="a fault", at=datetime.now(UTC), **fields)

        async def publish() -> None:
            async with connect(self._url) as bus:
                topic = control_topic(self._scene.cluster)
                await bus.publish(topic, 0, Entry(order.key.encode(), encode(order)))

        anyio.run(publish)

    def ends(self, name: str, host: str) -> None:
        """End an order."""
        self.says(name, host, ended_at=datetime.now(UTC), ended_by="chaos")

    def in_effect(self, host: str) -> set[str]:
        """The orders that the ledger has of a host."""

        async def read() -> set[str]:
            async with connect(self._url) as bus:
                ledger = await ledger_view.read(bus, self._scene.cluster, host)
                return {cordon.order for cordon in ledger.of(Cordon, host)}

        return anyio.run(read)

    def awaits(self, host: str, orders: set[str]) -> None:
        """Block until exactly these orders are in effect on a host."""
        until(lambda: self.in_effect(host) == orders, lambda: f"{self.in_effect(host)}, not {orders}", within_s=90)

    def loses_all(self) -> None:
        """Delete the control topic, and make it anew once it is gone."""

        async def lose() -> None:
            async with connect(self._url) as bus:
                topic = control_topic(self._scene.cluster)
                before = (await bus.topic(topic)).id
                self._scene.broker.admin.delete_topics([topic])[topic].result(30)
                while True:
                    try:
                        if (await bus.topic(topic)).id != before:
                            return
                    except UnknownTopicError:
                        await wanted.create(bus, self._scene.cluster, partitions=2)
                    await anyio.sleep(0.2)

        anyio.run(lose)


def test_orders_are_followed_whatever_happens_to_managers_and_brokers(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    with playing(harmed.broker, tmp_path, "orders", note) as scene:
        operator = Operator(scene)
        first, second, third = scene.hosts
        with scene.fault("an order, doubled, while its manager is killed") as trouble:
            operator.says("o1", first, resource="gpu", device="gpu:0")
            scene.managers[first].kill9()
            trouble.begin()
            operator.says("o1", first, resource="gpu", device="gpu:0")
            operator.says("o2", first, device="gpu:0")
            scene.managers[first].start(ready=False)
            operator.awaits(first, {"o1", "o2"})
        with scene.fault("an order ended while the broker is away") as trouble:
            operator.ends("o1", first)
            operator.says("o3", third, device="gpu:1", until=datetime.now(UTC) + timedelta(seconds=8))
            harmed.broker.brokers[1].kill9()
            trouble.begin()
            time.sleep(2)
            harmed.broker.restart(1)
            operator.awaits(first, {"o2"})
            operator.awaits(third, set())
        with scene.fault("the control topic deleted and made anew, managers killed") as trouble:
            trouble.begin()
            operator.loses_all()
            scene.managers[first].kill9()
            scene.managers[first].start(ready=False)
            operator.says("o4", second, device="gpu:2")
            operator.awaits(second, {"o4"})
            assert operator.in_effect(first) == {"o2"}, "a lost topic has ended an order"
            operator.ends("o2", first)
            operator.awaits(first, set())

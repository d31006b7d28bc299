"""A manager follows operators' orders as a level: from the topic's start, before it grants anything, and without the
topic if need be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from outfitter_proto import topics as wanted
from outfitter_proto.bus import Bus, BusAuthorizationError, BusError, BusUnavailableError, Entry, connect
from outfitter_proto.codec import encode
from outfitter_proto.names import control_topic
from outfitter_proto.records import CordonOrder
from outfitter_service.core import model as m
from outfitter_service.runtime.processor import order_reader
from support.bus.faulty_bus import FaultyBus, no_faults
from support.checker.verdict import verdict
from support.kafka.broker import KafkaBroker
from support.managers.in_process import CLUSTER, HOST, InProcessManager, deregister, register, serving, static

CHECKPOINT = f"@checkpoint/host/{HOST}"
Ordering = Callable[..., Awaitable[int]]


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def bus_of_each_kind(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Bus]:
    async with connect(url if request.param == "embedded" else request.getfixturevalue("kafka_broker").url) as bus:
        yield bus


async def order(bus: Bus, name: str = "o1", *, cluster: str = CLUSTER, host: str = HOST, **fields: Any) -> int:
    """Write an order, as `outfitter cordon` does."""
    order = CordonOrder(id=name, host=host, author="ada", reason="dust", at=datetime.now(UTC), **fields)
    return await bus.publish(control_topic(cluster), 0, Entry(order.key.encode(), encode(order)))


def in_effect(records: dict[str, dict[str, Any]]) -> set[str]:
    return {record["order"] for key, record in records.items() if key.startswith("@cordon/")}


def cordoned(records: dict[str, dict[str, Any]]) -> list[str]:
    devices = records[f"@host/{HOST}"]["resources"].get("gpu", {}).get("devices", [])
    return [device["id"] for device in devices if "cordon" in device]


async def until(manager: InProcessManager, orders: set[str]) -> dict[str, dict[str, Any]]:
    """Wait until exactly these orders are in effect."""
    await manager.until(lambda records: CHECKPOINT in records and in_effect(records) == orders)
    return await manager.records()


async def test_an_order_that_was_given_before_is_in_effect_before_the_first_grant(
    bus_of_each_kind: Bus, tmp_path: Path
) -> None:
    bus, cluster = bus_of_each_kind, KafkaBroker.new_cluster()
    await wanted.create(bus, cluster, partitions=1)
    await order(bus, cluster=cluster)
    await order(bus, "elsewhere", cluster=cluster, host="another")
    async with serving(bus, static(), tmp_path, cluster=cluster) as manager:
        await manager.say(register("w", gpu=1))
        waiting = await manager.state("w", "pending")
        assert waiting["reason_code"] in ("cordoned", "not-reported")
        await manager.until(lambda records: records[f"{HOST}/w/1"]["reason_code"] == "cordoned")
        records = await until(manager, {"o1"})
        assert len(cordoned(records)) == 2
        assert records[CHECKPOINT]["needs"] == ["orders"]
        assert records[CHECKPOINT]["orders"]["to"] == 2
        await order(bus, cluster=cluster, ended_at=datetime.now(UTC), ended_by="bob")
        await manager.state("w", "allocated")
        assert (await until(manager, set()))[CHECKPOINT]["orders"]["to"] == 3
        notes = [entry for entry in await manager.history() if entry["type"] == "note"]
        assert [note["event"] for note in notes if "cordon" in note["event"]] == ["cordoned", "uncordoned"]
        assert (await verdict(bus.url, cluster)).violations == ()


async def test_an_order_is_taken_while_the_manager_serves_and_ends_by_itself(bus: FaultyBus, tmp_path: Path) -> None:
    async with serving(bus, static(1), tmp_path) as manager:
        await manager.say(register("holder", gpu=1))
        held = await manager.state("holder", "allocated")
        device = held["resources"]["gpu"][0]["id"]
        await order(bus, device=device, until=datetime.now(UTC) + timedelta(seconds=2))
        await until(manager, {"o1"})
        await manager.say(deregister("holder"), register("w", gpu=1))
        await manager.until(lambda records: records.get(f"{HOST}/w/1", {}).get("reason_code") == "cordoned")
        await manager.state("w", "allocated")
        assert in_effect(await manager.records()) == set()


async def test_what_was_taken_out_stays_out_after_a_restart_and_without_the_topic(
    bus: FaultyBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(bus, static(1), tmp_path) as manager:
        await order(bus)
        await until(manager, {"o1"})

    async def hide(topic: str) -> Any:
        if topic == control_topic(CLUSTER):
            raise BusAuthorizationError("Read on topic 'outfitter.control' is not granted")
        return await found(topic)

    found = bus.topic
    monkeypatch.setattr(bus, "topic", hide)
    with capture_logs() as said:
        async with serving(bus, static(1), tmp_path) as manager:
            await manager.say(register("w", gpu=1), register("none"))
            await manager.until(lambda records: records.get(f"{HOST}/w/1", {}).get("reason_code") == "cordoned")
            trouble = (await manager.records())[CHECKPOINT]["orders_unread"]
            assert trouble == "Read on topic 'outfitter.control' is not granted"
            assert manager.metric("outfitter_orders_unread", partition="0") == 1
            await order(bus, ended_at=datetime.now(UTC), ended_by="ada")
            monkeypatch.undo()
            await manager.state("w", "allocated")
            await manager.until(lambda records: "orders_unread" not in records[CHECKPOINT])
            assert manager.metric("outfitter_orders_unread", partition="0") == 0
    warnings = [line["event"] for line in said if line["log_level"] == "warning"]
    assert warnings == ["operators' orders cannot be read, those in effect stay"]


async def test_a_topic_that_is_made_anew_ends_no_order_and_new_ones_are_taken(
    bus: FaultyBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_reader, "LOOK_S", 0.05)
    async with serving(bus, static(2), tmp_path) as manager:
        await order(bus, "lost")
        first = (await until(manager, {"lost"}))[CHECKPOINT]["orders"]
        found = bus.topic

        async def another(topic: str) -> Any:
            info = await found(topic)
            return info._replace(id="made-anew") if topic == control_topic(CLUSTER) else info

        monkeypatch.setattr(bus, "topic", another)
        with anyio.fail_after(20):
            while manager.processor._equipment.orders.position.topic_id != "made-anew":  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await order(bus, "new")
        records = await until(manager, {"lost", "new"})
        assert (first["to"], records[CHECKPOINT]["orders"]) == (1, {"topic_id": "made-anew", "to": 2})


async def test_a_topic_that_is_made_anew_while_it_is_opened_is_not_taken_for_the_one_before(
    bus: FaultyBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, opened, take = bus.topic, bus.open_reader, order_reader.OrderReader._take
    is_anew, taken = False, []

    async def of_now(topic: str) -> Any:
        info = await found(topic)
        return info._replace(id="gone") if topic == control_topic(CLUSTER) and not is_anew else info

    async def make_anew(topic: str, partition: int, **more: Any) -> Any:
        nonlocal is_anew
        is_anew = is_anew or topic == control_topic(CLUSTER)
        return await opened(topic, partition, **more)

    def note(self: order_reader.OrderReader, messages: Any, topic_id: str, position: int) -> None:
        taken.append(topic_id)
        take(self, messages, topic_id, position)

    monkeypatch.setattr(bus, "topic", of_now)
    monkeypatch.setattr(bus, "open_reader", make_anew)
    monkeypatch.setattr(order_reader.OrderReader, "_take", note)
    async with serving(bus, static(2), tmp_path) as manager:
        await order(bus)
        await until(manager, {"o1"})
    assert "gone" not in taken


async def test_orders_that_nobody_understands_are_counted_and_others_count(bus: FaultyBus, tmp_path: Path) -> None:
    await wanted.create(bus, CLUSTER, partitions=1)
    topic = control_topic(CLUSTER)
    for key, value in ((b"a", b"{"), (b"b", b'{"type":"drain-order","id":"b"}'), (b"c", None), (b"d", b"")):
        await bus.publish(topic, 0, Entry(key, value))
    await order(bus)
    await order(bus, "e")
    await bus.publish(topic, 0, Entry(b"e", b"{"))  # behind a version that counts
    async with serving(bus, static(1), tmp_path) as manager:
        await until(manager, {"o1", "e"})
        assert manager.metric("outfitter_orders_unreadable", partition="0") == 4
        later = CordonOrder(id="b", host=HOST, author="ada", reason="dust", at=datetime.now(UTC))
        await bus.publish(topic, 0, Entry(b"b", encode(later)))
        await until(manager, {"o1", "e", "b"})
        assert manager.metric("outfitter_orders_unreadable", partition="0") == 3


@pytest.mark.parametrize("error", [BusUnavailableError("no leader")], ids=["no-leader"])
async def test_a_bus_that_does_not_show_the_orders_keeps_nobody_waiting_for_long(
    bus: FaultyBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BusError
) -> None:
    monkeypatch.setattr(order_reader, "FIRST_WITHIN_S", 0.2)
    hangs = anyio.Event()
    found = bus.topic

    async def hang(topic: str) -> Any:
        if topic == control_topic(CLUSTER) and not hangs.is_set():
            await hangs.wait()
            raise error
        return await found(topic)

    monkeypatch.setattr(bus, "topic", hang)
    with capture_logs() as said:
        async with serving(bus, static(1), tmp_path) as manager:
            await manager.say(register("w", gpu=1))
            await manager.state("w", "allocated")
            await order(bus)
            hangs.set()
            await until(manager, {"o1"})
    # one failure of the kind that an outage has is left to the outage's line
    assert not [line for line in said if line["event"].startswith("operators' orders")]


async def test_an_order_of_a_commit_that_fails_is_taken_by_the_next_tenure(bus: FaultyBus, tmp_path: Path) -> None:
    failed = anyio.Event()

    async def fail(point: str) -> None:
        if point == "commit:before" and not failed.is_set():
            failed.set()
            raise BusUnavailableError("no")

    async with serving(bus, static(1), tmp_path) as manager:
        await manager.ready()
        bus.script = fail
        await order(bus)
        await until(manager, {"o1"})
        bus.script = no_faults
        assert failed.is_set()
        assert (await manager.records())[CHECKPOINT]["orders"]["to"] == 1


async def test_nothing_is_granted_before_the_orders_of_now_are_read(
    bus: FaultyBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wanted.create(bus, CLUSTER, partitions=1)
    await order(bus)
    read, found = anyio.Event(), bus.topic

    async def late(topic: str) -> Any:
        if topic == control_topic(CLUSTER):
            await read.wait()
        return await found(topic)

    monkeypatch.setattr(bus, "topic", late)
    monkeypatch.setattr(order_reader, "FIRST_WITHIN_S", 60.0)
    async with serving(bus, static(1), tmp_path, ready=False) as manager:
        await manager.say(register("w", gpu=1))
        with anyio.fail_after(20):
            while not (  # noqa: ASYNC110 - it tells nobody
                any(type(event) is m.DriverReport for event in manager.processor.event_queue.queue)
                or f"{HOST}/w/1" in await manager.records()
            ):
                await anyio.sleep(0.01)
        read.set()
        await manager.until(lambda records: records.get(f"{HOST}/w/1", {}).get("reason_code") == "cordoned")
        assert not [entry for entry in await manager.history() if entry.get("to") == "allocated"]

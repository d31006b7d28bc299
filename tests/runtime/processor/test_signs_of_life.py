"""A manager says on the bus that it lives, and no trouble with that costs it anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from outfitter_proto import topics as wanted
from outfitter_proto.bus import (
    Bus,
    BusAuthorizationError,
    BusError,
    BusUnavailableError,
    Entry,
    UnknownTopicError,
    connect,
)
from outfitter_proto.names import control_topic, managers_topic
from outfitter_service.runtime.processor.limits import Limits
from support.bus.committed import committed
from support.bus.faulty_bus import FaultyBus, no_faults
from support.kafka.broker import KafkaBroker
from support.managers.in_process import CLUSTER, HOST, InProcessManager, register, serving, static

LIMITS = Limits(lease_grace_s=0.1, beat_s=0.05)
CHECKPOINT = f"@checkpoint/host/{HOST}"
LOST: list[BusError] = [
    UnknownTopicError("there is no topic 'outfitter.managers'; make it with `outfitter topics create`"),
    BusAuthorizationError("Write on topic 'outfitter.managers' is not granted to User:m: kafka-acls --add"),
    BusUnavailableError("the broker is slow"),
]


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def bus_of_each_kind(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Bus]:
    async with connect(url if request.param == "embedded" else request.getfixturevalue("kafka_broker").url) as bus:
        yield bus


async def signs(bus: Bus, cluster: str = CLUSTER) -> list[dict[str, Any]]:
    found = await committed(bus, managers_topic(cluster))
    assert {message.key for message in found} <= {f"host/{HOST}".encode()}
    return [json.loads(message.value or b"") for message in found]


async def until(manager: InProcessManager, beats: float | None) -> None:
    """Wait until the checkpoint says that signs come so often; None: that there are none."""
    await manager.until(lambda records: CHECKPOINT in records and records[CHECKPOINT].get("beat_s") == beats)


async def test_signs_come_again_and_again_and_the_last_one_says_that_the_manager_stopped(
    bus_of_each_kind: Bus, tmp_path: Path
) -> None:
    bus, cluster = bus_of_each_kind, KafkaBroker.new_cluster()
    async with serving(bus, static(), tmp_path, cluster=cluster, limits=LIMITS) as manager:
        await until(manager, 0.05)
        with anyio.fail_after(20):
            while len(found := await signs(bus, cluster)) < 3:  # noqa: ASYNC110 - no event says it
                await anyio.sleep(0.02)
        same = {"type": "beat", "writer": f"host/{HOST}", "instance": manager.processor.instance, "sweeps": False}
        assert all(sign | same == sign and "stopped_at" not in sign for sign in found)
        await manager.stop()
    last = (await signs(bus, cluster))[-1]
    record = (await manager.records())[f"@host/{HOST}"]
    assert last["instance"] == manager.processor.instance
    assert datetime.fromisoformat(last["stopped_at"]) >= datetime.fromisoformat(record["manager"]["stopped_at"])


async def test_a_manager_that_was_killed_leaves_no_word_of_a_stop(bus: FaultyBus, tmp_path: Path) -> None:
    async with serving(bus, static(), tmp_path, limits=LIMITS) as manager:
        await until(manager, 0.05)
    assert "stopped_at" not in (await signs(bus))[-1]


async def test_a_manager_whose_successor_is_expected_does_not_say_that_it_stopped(
    bus: FaultyBus, tmp_path: Path
) -> None:
    async with serving(bus, static(), tmp_path, limits=LIMITS) as manager:
        await until(manager, 0.05)
        manager.processor.stop(mark_stopped=False)
        with anyio.fail_after(20):
            await manager.ended.wait()
    assert "stopped_at" not in (await signs(bus))[-1]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_signs_that_are_lost_are_said_once_and_the_checkpoint_says_that_there_are_none(
    bus: FaultyBus, tmp_path: Path, error: BusError
) -> None:
    async def lose(point: str) -> None:
        if point == "beat:before":
            raise error

    with capture_logs() as said:
        async with serving(bus, static(), tmp_path, limits=LIMITS) as manager:
            await until(manager, 0.05)
            bus.script = lose
            await until(manager, None)
            await manager.say(register("w", gpu=1))
            await manager.state("w", "allocated")
            bus.script = no_faults
            await until(manager, 0.05)
            await manager.stop()
    lines = [line for line in said if "manager lives" in line["event"]]
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "others cannot see that this manager lives"),
        ("info", "others see again that this manager lives"),
    ]
    assert lines[0]["error"] == str(error)
    assert manager.metric("outfitter_signs_of_life_total", outcome="lost") > 0


async def test_a_manager_that_can_write_no_sign_into_its_file_is_not_ready_until_one_or_a_commit_is_written(
    bus: FaultyBus, tmp_path: Path
) -> None:
    """An idle manager writes nothing else, so only this tells that it could answer nobody."""

    async def refuse(point: str) -> None:
        if point == "beat:before":
            raise BusUnavailableError("the disk is full")

    async with serving(bus, static(), tmp_path, limits=LIMITS) as manager:
        await until(manager, 0.05)
        for _ in range(2):
            bus.script = refuse
            with anyio.fail_after(20):
                while manager.processor.condition != "cannot write: the disk is full":  # noqa: ASYNC110
                    await anyio.sleep(0.005)
            bus.script = no_faults
            await manager.ready()
        assert manager.processor.condition == "serving"


async def test_without_the_topic_a_manager_starts_and_serves_and_says_which_command_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wanted, "optional", lambda cluster: {control_topic(cluster): wanted.CONTROL})
    with capture_logs() as said:
        async with (
            connect(f"sqlite://{tmp_path}/bus.db") as bus,
            serving(bus, static(), tmp_path, limits=LIMITS) as manager,
        ):
            await manager.say(register("w", gpu=1))
            await manager.state("w", "allocated")
            with anyio.fail_after(20):
                while manager.metric("outfitter_signs_of_life_total", outcome="lost") < 3:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            assert all("beat_s" not in record for record in (await manager.records()).values())
            monkeypatch.undo()
            await wanted.create(bus, CLUSTER, partitions=1)
            await until(manager, 0.05)
            await manager.stop()
    warnings = [line for line in said if line["log_level"] == "warning"]
    assert [line["event"] for line in warnings] == ["others cannot see that this manager lives"]
    assert "outfitter topics create" in warnings[0]["error"]


async def test_a_sign_that_hangs_holds_up_neither_answers_nor_the_end(bus: FaultyBus, tmp_path: Path) -> None:
    async def hang(point: str) -> None:
        if point == "beat:before":
            await anyio.sleep_forever()

    bus.script = hang
    async with serving(bus, static(), tmp_path, limits=LIMITS) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        assert "beat_s" not in (await manager.records())[CHECKPOINT]
        await manager.stop()


async def test_only_the_commit_loop_sends_signs(
    bus: FaultyBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that hangs sends none, although everything beside it goes on."""
    from outfitter_service.runtime.processor import commit_loop

    async with serving(bus, static(), tmp_path, limits=LIMITS) as manager:
        await until(manager, 0.05)
        hangs = anyio.Event()

        async def hang(_: object) -> None:
            hangs.set()
            await anyio.sleep_forever()

        monkeypatch.setattr(commit_loop.CommitLoop, "_wait", hang)
        with anyio.fail_after(20):
            await hangs.wait()
        asked_at = manager.processor._signs_of_life._asked_at
        for _ in range(20):
            await bus.publish(manager.topics.registrations, 0, Entry(HOST.encode(), b"{}"))
        assert manager.processor._signs_of_life._asked_at == asked_at


async def test_without_an_interval_there_are_no_signs(bus: FaultyBus, tmp_path: Path) -> None:
    async with serving(bus, static(), tmp_path, limits=Limits(lease_grace_s=0.1, beat_s=None)) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        await manager.stop()
        assert "beat_s" not in (await manager.records())[CHECKPOINT]
    assert await signs(bus) == []

"""What a manager reads before it fences anybody counts afterwards, unless something was written in between."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from outfitter_proto.bus import Entry, Reader
from outfitter_proto.codec import encode
from outfitter_service.runtime.changelog.restore import Restored, restore, unchanged
from outfitter_service.runtime.input.scope import HostScope
from outfitter_service.runtime.processor import same_machine, takeover
from outfitter_service.runtime.processor.takeover import ForeignManagerError
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.managers.in_process import HOST, TOPICS, another, register, static
from support.managers.scripted import host_record


class Counting(FaultyBus):
    """An embedded bus that counts how often the ledger is read from its beginning."""

    whole = 0

    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        self.whole += topic == TOPICS.allocations and start is None
        return await super().open_reader(topic, partition, start=start, committed=committed, lenient=lenient)


@pytest.fixture
async def counting(url: str) -> AsyncIterator[Counting]:
    async with Counting(url) as bus:
        yield bus


async def test_a_restart_reads_the_ledger_once(counting: Counting, serve: Serve) -> None:
    async with serve(static(2)) as manager:
        await manager.say(register("a", gpu=1), register("b", gpu=1))
        await manager.state("b", "allocated")
    async with serve(static(2), on=counting, identity=another()) as manager:
        assert counting.whole == 1
        await manager.say(register("c", gpu=1))
        await manager.state("c", "pending")
    assert (await verdict(counting.url)).violations == ()


async def test_what_its_predecessor_wrote_between_the_look_and_the_fence_counts(
    counting: Counting, serve: Serve
) -> None:
    async with serve(static(2), identity=another(instance="first")) as first:
        await first.say(register("a", gpu=1))
        await first.state("a", "allocated")
        looked = False

        async def one_more(point: str) -> None:
            nonlocal looked
            if point == "open_writer:before" and not looked:
                looked = True
                await first.say(register("b", gpu=1))
                await first.state("b", "allocated")

        counting.script = one_more
        async with serve(static(2), on=counting, identity=another(instance="second")) as second:
            assert counting.whole == 2
            await second.say(register("c", gpu=1))
            await second.state("c", "pending")
    assert (await verdict(counting.url)).violations == ()


async def test_what_others_wrote_between_the_look_and_the_fence_is_known(
    bus: FaultyBus, counting: Counting, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(static(2)):
        pass
    other = host_record("other")
    known: list[dict[bytes, bytes]] = []

    async def look(_: object, restored: Restored) -> bool:
        known.append(dict(restored.neighbours))
        return True

    monkeypatch.setattr(same_machine, "warn", look)

    async def one_more(point: str) -> None:
        if point == "open_writer:before":
            await bus.publish(TOPICS.allocations, 0, Entry(other.key.encode(), encode(other)))

    counting.script = one_more
    async with serve(static(2), on=counting, identity=another()):
        assert counting.whole == 1
        assert known == [{other.key.encode(): encode(other)}]


async def test_a_rival_that_came_between_the_look_and_the_fence_is_found(
    bus: FaultyBus, counting: Counting, serve: Serve
) -> None:
    async with serve(static(2)):
        pass

    async def one_more(point: str) -> None:
        if point == "open_writer:before":
            await bus.publish(TOPICS.allocations, 0, Entry(b"@checkpoint/partition/0", b"{}"))

    counting.script = one_more
    async with serve(static(2), on=counting, identity=another(), ready=False) as manager:
        await manager.ended_by(ForeignManagerError)


async def test_a_log_that_ends_before_what_was_read_is_another_one(bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(2)) as manager:
        await manager.say(register("a", gpu=1))
        await manager.state("a", "allocated")
    scope = HostScope(HOST, "host/h")
    seen = await restore(bus, TOPICS.allocations, 0, scope)
    assert await unchanged(bus, TOPICS.allocations, 0, scope, seen) == seen
    longer = structs.replace(seen, end=seen.end + 1)
    assert await unchanged(bus, TOPICS.allocations, 0, scope, longer) is None


async def test_what_was_read_long_before_the_fence_is_read_again(
    counting: Counting, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tombstones may be gone by then."""
    monkeypatch.setattr(takeover, "RESTORE_REUSE_S", -1.0)
    async with serve(static(2)) as manager:
        await manager.say(register("a", gpu=1))
        await manager.state("a", "allocated")
    async with serve(static(2), on=counting, identity=another()):
        assert counting.whole == 2

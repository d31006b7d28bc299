"""A ledger may be gigabytes: what nobody needs any more is gone at once, and not when a collector comes to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from outfitter_proto.bus import BusUnavailableError, CommitUnknownError
from outfitter_service.core.ledger import Ledger
from service.conftest import Serve
from service.test_taking_anew import TaintedBus
from support.faulty_bus import FaultyBus
from support.house import register, static


@pytest.fixture
def ledgers() -> Iterator[Callable[[], int]]:
    """How many ledgers there are that this test has made. The collector does nothing meanwhile."""

    def count() -> int:
        return sum(type(each) is Ledger for each in gc.get_objects())

    gc.collect()
    before = count()
    gc.disable()
    yield lambda: count() - before
    gc.enable()


async def _lose(error: type[Exception]) -> None:
    """Raise `error`, with a cause as an adapter's have."""
    try:
        raise OSError("the connection is gone")
    except OSError as cause:
        raise error("lost") from cause


@pytest.mark.parametrize("error", [CommitUnknownError, BusUnavailableError])
@pytest.mark.parametrize(
    "failing",
    [
        ["commit:before"],
        ["commit:after"],
        ["commit:before"] * 3,
        ["commit:before", "open_writer:after"],
        ["commit:before", "stable_end:after", "stable_end:after"],
        ["commit:before", "topic:after"],
    ],
    ids=" ".join,
)
async def test_the_ledger_of_a_tenure_that_failed_is_gone_when_the_next_one_has_its_own(
    bus: FaultyBus, serve: Serve, ledgers: Callable[[], int], failing: list[str], error: type[Exception]
) -> None:
    async with serve(static(3)) as house:
        await house.say(register("first", gpu=1))
        await house.state("first", "allocated")
        due = [*failing]

        async def fail(point: str) -> None:
            if due and point == due[0]:
                due.pop(0)
                await _lose(error)

        bus.script = fail
        await house.say(register("second", gpu=1))
        await house.state("second", "allocated")
        await house.say(register("third", gpu=1))
        await house.state("third", "allocated")
        await house.ready()
        assert not due
        assert ledgers() == 1


async def test_the_ledger_of_a_tainted_writer_is_gone_when_the_next_one_has_its_own(
    url: str, serve: Serve, ledgers: Callable[[], int]
) -> None:
    async with TaintedBus(url) as bus, serve(static(3), on=bus) as house:
        await house.say(register("first", gpu=1))
        await house.state("first", "allocated")
        bus.taints = True
        await house.say(register("second", gpu=1))
        await house.state("second", "allocated")
        bus.taints = False
        opened = bus.opened
        with anyio.fail_after(20):
            while bus.opened == opened:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        await house.say(register("third", gpu=1))
        await house.state("third", "allocated")
        await house.ready()
        assert ledgers() == 1


@pytest.mark.usefixtures("ledgers")
async def test_nothing_is_left_of_a_processor_that_has_ended(serve: Serve) -> None:
    async with serve(static(3)) as house:
        await house.say(register("first", gpu=1), register("second", gpu=5))
        await house.state("first", "allocated")
        await house.ready()
        processor: Any = house.processor
        parts = (processor, processor.ledger, processor._cycle, processor._station.telling.census)
        kept = [weakref.ref(part) for part in parts]
        processor.stop()
        with anyio.fail_after(20):
            await house.ended.wait()
    del parts, processor, house.processor, house.drivers
    assert [part() for part in kept] == [None] * 4

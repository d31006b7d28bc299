"""A clock that stands still while a bus holds us back."""

from __future__ import annotations

import anyio.lowlevel
import pytest

from outfitter_proto.bus.patience import Patience


async def test_time_for_which_a_part_is_held_back_counts_in_no_limit_of_the_whole() -> None:
    whole = Patience()
    one, another = Patience(whole), Patience(whole)
    begun, started = anyio.current_time(), whole.now()
    with pytest.raises(TimeoutError):
        await _held_back_twice(whole, one, another)
    assert anyio.current_time() - begun >= 0.44
    assert whole.now() - started >= 0.05
    assert anyio.current_time() - begun - (whole.now() - started) >= 0.39


async def _held_back_twice(whole: Patience, one: Patience, another: Patience) -> None:
    with whole.limit(0.05):
        one.throttle(0.2)
        another.throttle(0.4)
        await anyio.sleep(60)


async def test_a_limit_that_begins_while_it_stands_still_begins_to_count_afterwards() -> None:
    clock = Patience()
    clock.throttle(0.3)
    begun = anyio.current_time()
    with pytest.raises(TimeoutError), clock.limit(0.05):
        await anyio.sleep(60)
    assert anyio.current_time() - begun >= 0.34


async def test_time_that_is_held_back_again_and_again_ends_a_limit_all_the_same() -> None:
    clock = Patience()
    with anyio.fail_after(60), pytest.raises(TimeoutError):
        await _held_back_for_ever(clock)


async def _held_back_for_ever(clock: Patience) -> None:
    with clock.limit(0.1):
        while True:
            clock.throttle(0.02)
            await anyio.sleep(0.03)


async def test_a_part_that_is_gone_holds_back_nobody() -> None:
    whole = Patience()
    one, another = Patience(whole), Patience(whole)
    one.throttle(3600)
    another.throttle(0.2)
    begun = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.held_back)
        await anyio.lowlevel.checkpoint()
        one.release()
    assert whole.is_held_back
    with pytest.raises(TimeoutError), whole.limit(0.05):
        await anyio.sleep(60)
    assert anyio.current_time() - begun >= 0.24
    assert not whole.is_held_back


async def test_a_shorter_throttling_does_not_end_a_longer_one() -> None:
    clock = Patience()
    clock.throttle(0.3)
    begun = anyio.current_time()
    clock.throttle(0.01)
    await clock.held_back()
    assert anyio.current_time() - begun >= 0.29

"""Drivers that prepare devices and take them back, through the real runtime: write down, act, write down."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from outfitter_drivers.api import CannotTell, Grant, PermanentDriverError, TemporaryDriverError
from outfitter_proto.bus import CommitUnknownError
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus, no_faults
from support.checker.verdict import verdict
from support.drivers.preparing import BENCHES, Bench
from support.managers.in_process import deregister, preparing, register, static

TIMEOUT = 'driver-timeout = "200ms"'


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    BENCHES[str(tmp_path)] = found = Bench(str(tmp_path), 1)
    return found


class Gate:
    """Holds a call until it is opened."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self.open = anyio.Event()

    async def __call__(self, _: Grant) -> None:
        self.reached.set()
        await self.open.wait()


class Failing:
    """Fails the first `times` calls."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left = times
        self.error = error

    async def __call__(self, _: Grant) -> None:
        if self.left > 0:
            self.left -= 1
            raise self.error


async def test_a_grant_is_prepared_before_it_is_allocated_and_taken_back_before_it_is_lent_again(
    serve: Serve, bench: Bench
) -> None:
    gate = bench.preparing = Gate()
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1), register("next", gpu=1))
        record = await manager.state("w", "preparing")
        assert record["token"] == 1
        gate.open.set()
        await manager.state("w", "allocated")
        assert bench.ready_for == {bench.ids[0]: "h/w/1"}
        await manager.say(deregister("w"))
        await manager.state("next", "allocated")
        assert [(call.what, call.allocation, call.token) for call in bench.calls] == [
            ("prepare", "h/w/1", 1), ("unprepare", "h/w/1", 1), ("prepare", "h/next/1", 2),
        ]  # fmt: skip
        assert bench.violations == []
        ended = next(step for step in await manager.history() if step.get("to") == "ended")
        assert ended["confirmed"] is True


async def test_nothing_is_prepared_before_the_grant_is_committed(bus: FaultyBus, serve: Serve, bench: Bench) -> None:
    async with serve(preparing(bench.name)) as manager:
        await manager.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"])

        async def fail(point: str) -> None:
            if point.startswith("commit"):
                assert bench.calls == []
                bus.script = no_faults
                raise CommitUnknownError("lost")

        bus.script = fail
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        assert len(bench.called("prepare")) == 1


async def test_a_prepare_that_fails_fails_the_allocation_after_it_was_taken_back(serve: Serve, bench: Bench) -> None:
    bench.preparing = Failing(1, PermanentDriverError("the mode cannot be set"))
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1), register("next", gpu=1))
        record = await manager.state("w", "failed")
        assert record["reason_code"] == "prepare-failed"
        assert "the mode cannot be set" in record["reason"]
        await manager.state("next", "allocated")
        assert [call.what for call in bench.calls] == ["prepare", "unprepare", "prepare"]
        assert manager.metric("outfitter_driver_failures_total", resource="gpu", call="prepare") == 1
        assert bench.violations == []


async def test_a_prepare_that_hangs_is_given_up_at_its_limit(serve: Serve, bench: Bench) -> None:
    bench.preparing = Gate()
    async with serve(preparing(bench.name, TIMEOUT)) as manager:
        await manager.say(register("w", gpu=1))
        record = await manager.state("w", "failed")
        assert record["reason_code"] == "prepare-failed"
        assert "0.2 s" in record["reason"]


async def test_a_call_that_does_not_end_at_its_limit_keeps_its_devices_out_of_use_until_it_has(
    serve: Serve, bench: Bench
) -> None:
    gate = Gate()

    async def stubborn(grant: Grant) -> None:
        with anyio.CancelScope(shield=True):
            await gate(grant)

    bench.preparing = stubborn
    async with serve(preparing(bench.name, TIMEOUT)) as manager:
        await manager.say(register("w", gpu=1), register("next", gpu=1))
        await gate.reached.wait()
        await manager.state("next", "pending")
        await anyio.sleep(0.4)  # twice the limit
        assert (await manager.records())["h/w/1"]["state"] == "preparing"
        assert (await manager.records())["h/next/1"]["state"] == "pending"
        gate.open.set()
        await manager.state("w", "allocated")  # late, but well
        await manager.say(deregister("w"))
        await manager.state("next", "allocated")
        assert bench.violations == []


async def test_an_unprepare_that_fails_is_repeated_and_the_device_is_lent_to_nobody_meanwhile(
    serve: Serve, bench: Bench
) -> None:
    failing, gate = Failing(2, TemporaryDriverError("still warm", delay=0.01)), Gate()

    async def at_the_third_time(grant: Grant) -> None:
        await failing(grant)
        await gate(grant)

    bench.unpreparing = at_the_third_time
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1), register("next", gpu=1))
        await manager.state("w", "allocated")
        await manager.say(deregister("w"))
        await gate.reached.wait()
        await manager.state("w", "releasing")
        assert (await manager.records())["h/next/1"]["state"] == "pending"
        gate.open.set()
        await manager.state("next", "allocated")
        assert failing.left == 0
        assert len(bench.called("unprepare")) == 3
        assert bench.violations == []


async def test_a_device_that_somebody_still_uses_is_not_lent_before_nobody_does(serve: Serve, bench: Bench) -> None:
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1), register("next", gpu=1))
        await manager.state("w", "allocated")
        bench.users[bench.ids[0]] = "process 4711"
        await manager.say(deregister("w"))
        await manager.state("w", "releasing")
        record = await manager.until(lambda records: "delayed_by" in records["h/w/1"] and records["h/w/1"])
        assert record["delayed_by"] == "the driver of gpu says: still in use by process 4711"
        assert record["reason"] == f"deregistered; {record['delayed_by']}"
        assert (await manager.records())["h/next/1"]["state"] == "pending"
        bench.users.clear()
        await manager.state("next", "allocated")
        record = await manager.state("w", "ended")
        assert ("delayed_by" in record, record["reason"]) == (False, "deregistered")
        assert (await verdict(manager.bus.url)).violations == ()


async def test_a_device_of_which_nobody_can_tell_is_lent_again_and_history_says_why(serve: Serve, bench: Bench) -> None:
    bench.users[bench.ids[0]] = CannotTell("the library is too old")
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1), register("next", gpu=1))
        await manager.state("w", "allocated")
        await manager.say(deregister("w"))
        await manager.state("next", "allocated")
        ended = next(step for step in await manager.history() if step.get("to") == "ended")
        assert ended["confirmed"] is False
        assert ended["explanation"] == "released (unconfirmed: the library is too old)"


async def test_words_that_change_at_each_try_do_not_fill_the_ledger(serve: Serve, bench: Bench) -> None:
    tries = 0

    async def fail(_: Grant) -> None:
        nonlocal tries
        tries += 1
        if tries < 60:
            raise TemporaryDriverError(f"warm: {tries}", delay=0.001)

    bench.unpreparing = fail
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        await manager.say(deregister("w"))
        await manager.state("w", "ended")
        told = [step for step in await manager.history() if step.get("event") == "release-delayed"]
        assert 1 <= len(told) < 10  # 60 tries take some four seconds


async def test_that_its_driver_is_not_configured_any_more_is_said_of_what_stays_held(
    serve: Serve, bench: Bench
) -> None:
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
    async with serve(static(name="fpga")) as manager:
        await manager.say(deregister("w"))
        record = await manager.until(lambda records: "delayed_by" in records["h/w/1"] and records["h/w/1"])
        assert "the driver of gpu must take them back, but is not configured" in record["reason"]


async def test_a_restart_with_a_driver_that_takes_nothing_back_names_whoever_has_devices_of_the_other_one(
    serve: Serve, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1), register("next", gpu=1))
        await manager.state("w", "allocated")
    async with serve(preparing(bench.name)):
        assert "which was to take them back" not in capsys.readouterr().out
    async with serve(static(1)) as manager:
        said = capsys.readouterr().out
        assert "devices were granted by another driver, which was to take them back, and this one will not" in said
        assert f"devices={{'h/w': ['{bench.ids[0]}']}}" in said
        assert "workers=1" in said
        await manager.say(deregister("w"))
        await manager.state("w", "ended")


async def test_a_driver_that_prepares_is_refused_for_a_resource_that_is_shared(serve: Serve, bench: Bench) -> None:
    """Taking the devices back from one of their workers would take them from all."""
    async with serve(preparing(bench.name, 'sharing = "shared"')) as manager:
        await manager.say(register("w", gpu=1))
        record = await manager.state("w", "failed")
        assert record["reason_code"] == "misconfigured"
        assert "sharing = exclusive" in record["reason"]
        assert bench.calls == []


async def test_an_in_use_check_is_told_whether_the_worker_itself_has_given_the_devices_back(
    serve: Serve, bench: Bench
) -> None:
    """The owner whose lease ended may go on using them."""
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("silent", gpu=1, lease_s=1.0))
        await manager.state("silent", "ended")
        await manager.say(register("polite", gpu=1))
        await manager.state("polite", "allocated")
        await manager.say(deregister("polite"))
        await manager.state("polite", "ended")
    assert bench.given_back == {"h/silent/1": False, "h/polite/1": True}


async def test_what_was_shared_is_taken_back_from_nobody_by_a_driver_that_prepares_since_then(
    serve: Serve, bench: Bench
) -> None:
    """The other sharer goes on using it."""
    [device] = bench.ids
    shared = static(1, extra=f'sharing = "shared"\nparam.device.0.id = "{device}"')
    async with serve(shared) as manager:
        await manager.say(register("w", gpu=1), register("other", gpu=1))
        await manager.state("w", "allocated")
        await manager.state("other", "allocated")
    bench.users[device] = "the other"
    async with serve(preparing(bench.name)) as manager:
        await manager.say(deregister("w"), register("next", gpu=1))
        await manager.state("w", "ended")
        await manager.state("next", "pending")
        assert bench.calls == []
        await manager.say(deregister("other"))
        await manager.state("next", "allocated")
    assert [call.what for call in bench.calls] == ["prepare"]


async def test_a_restart_while_preparing_issues_the_command_again_with_the_same_token(
    serve: Serve, bench: Bench
) -> None:
    gate = bench.preparing = Gate()
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1))
        await gate.reached.wait()
    async with serve(preparing(bench.name)) as manager:
        gate.open.set()
        await manager.state("w", "allocated")
    assert [(call.what, call.token) for call in bench.calls] == [("prepare", 1), ("prepare", 1)]
    assert bench.violations == []


async def test_a_restart_while_releasing_issues_the_command_again(serve: Serve, bench: Bench) -> None:
    gate = bench.unpreparing = Gate()
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        await manager.say(deregister("w"))
        await gate.reached.wait()
    async with serve(preparing(bench.name)) as manager:
        assert (await manager.records())["h/w/1"]["state"] == "releasing"
        gate.open.set()
        await manager.state("w", "ended")
        assert len(bench.called("unprepare")) == 2


async def test_taking_the_partition_anew_does_not_begin_a_call_twice(
    bus: FaultyBus, serve: Serve, bench: Bench
) -> None:
    """The call that is under way answers for both; a second one would come when the device is another's."""
    gate = bench.unpreparing = Gate()
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1), register("next", gpu=1))
        await manager.state("w", "allocated")
        await manager.say(deregister("w"))
        await gate.reached.wait()
        failed = anyio.Event()

        async def fail(point: str) -> None:
            if point == "commit:after" and not failed.is_set():
                failed.set()
                raise CommitUnknownError("lost")

        bus.script = fail
        await manager.say(register("third", gpu=1))
        await failed.wait()
        await manager.state("third", "pending")
        await manager.ready()
        gate.open.set()
        await manager.state("next", "allocated")
        await manager.say(deregister("third"), deregister("next"))
        await manager.state("next", "ended")
        assert [call.allocation for call in bench.called("unprepare")] == ["h/w/1", "h/next/1"]
        assert bench.stale == 0
        assert bench.violations == []
        assert (await verdict(manager.bus.url)).violations == ()


async def test_an_answer_that_waits_for_its_commit_is_not_asked_for_again(
    bus: FaultyBus, serve: Serve, bench: Bench
) -> None:
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", gpu=1), register("next", gpu=1))
        await manager.state("w", "allocated")
        failures = 3

        async def fail(point: str) -> None:
            nonlocal failures
            if point == "commit:before" and bench.called("unprepare") and failures:
                failures -= 1
                raise CommitUnknownError("lost")

        bus.script = fail
        await manager.say(deregister("w"))
        await manager.state("next", "allocated")
        assert failures == 0
        assert len(bench.called("unprepare")) == 1
        assert bench.violations == []


async def test_logs_of_calls_name_the_worker(serve: Serve, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.preparing = Failing(1, PermanentDriverError("the mode cannot be set"))
    async with serve(preparing(bench.name)) as manager:
        await manager.say(register("w", "i-7", gpu=1))
        await manager.state("w", "failed", "i-7")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "prepare failed" in line]
    assert "worker=w" in line
    assert "incarnation=i-7" in line
    assert "host=h" in line

"""A driver that hangs, floods, dies or lies costs its own resource only, and its workers are told what happened."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from outfitter_drivers.api import (
    Device,
    DriverParams,
    ExternalResourceDriver,
    ExternalResourceDriverFactory,
    ExternalResourceInfo,
    Inventory,
    NotEnoughDevicesError,
    TemporaryDriverError,
    Worker,
)
from outfitter_service import config as configuration
from outfitter_service.core import model as m
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.drivers import loading
from outfitter_service.runtime.drivers.building import inspected
from outfitter_service.runtime.drivers.pool import DriverPool
from outfitter_service.runtime.drivers.supervisor import LONGEST_SHORTAGE_S, Loaded, Supervisor
from outfitter_service.runtime.drivers.translation import AT_A_STRETCH, MOST_DEVICES, SHORTEST_DELAY_S, known_devices
from runtime.conftest import Serve
from runtime.drivers.odd_errors import ENDINGS, RAISED, WordlessError
from simulation.loop import running
from support.managers.in_process import another, register


def test_a_configured_driver_timeout_is_the_drivers_own_limit_too(tmp_path: Path) -> None:
    """Some drivers bound their later looks themselves: the manager only waits for the first."""
    path = tmp_path / "outfitter.toml"
    path.write_text(
        'external-resources = ["a", "b"]\n'
        f'[external-resource.a]\namount = 1\ndriver = "files"\nparam.path = "{tmp_path}"\ndriver-timeout = "7s"\n'
        f'[external-resource.b]\namount = 1\ndriver = "files"\nparam.path = "{tmp_path}"\n'
    )
    loaded = loading.load(configuration.load(path, environment={}).resources)
    assert [each.served.driver.call_timeout for each in loaded.values() if each.served is not None] == [7.0, 30.0]
    assert [each.served.timeout_s for each in loaded.values() if each.served is not None] == [7.0, 30.0]


class Odd(ExternalResourceDriver, Inventory):
    """Does what the parameter says, the first time it is looked at."""

    call_timeout = 0.2

    def __init__(self, how: str) -> None:
        self.how = how
        self.asked = 0

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        return []

    async def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        self.asked += 1
        while self.how == "never waits":
            self.asked += 1
            yield [Device(properties={"index": "0", "asked": str(self.asked)})]
        if self.how == "always yields what is no text":
            yield [Device(properties={"index": 7})]  # type: ignore[dict-item]
        if self.how.startswith("sets "):
            yield [Device(properties={"index": "7"}, env={self.how.removeprefix("sets "): "x"})]
        if self.asked == 1:
            if self.how in RAISED:
                raise RAISED[self.how]()
            match self.how:
                case "raises":
                    raise TemporaryDriverError("not now", delay=0.01)
                case "hangs":
                    await anyio.sleep_forever()
                case "yields no devices":
                    yield [None, 7]  # type: ignore[list-item]
                case "yields devices without a name":
                    yield [Device(properties={})]
                case "yields what is no text":
                    yield [Device(properties={"index": 0})]  # type: ignore[dict-item]
                case "yields half characters":
                    yield [Device(properties={"index": "0", "path": os.fsdecode(b"/dev/\xff")})]
                case "raises half characters":
                    raise OSError("no such device: " + os.fsdecode(b"/dev/\xff"))
                case "ends":
                    yield []
                    return
                case "ends before it begins":
                    return
                case "yields too many devices":
                    yield [Device(properties={"index": str(index)}) for index in range(MOST_DEVICES + 1)]
                case "is cancelled from within":
                    yield []
                    forgotten = asyncio.ensure_future(anyio.sleep_forever())
                    forgotten.cancel()
                    await forgotten
        yield [Device(properties={"index": "0"})]
        await anyio.sleep_forever()


class WithProperties(Odd):
    """What it says of itself is its own code."""

    def __init__(self, **properties: object) -> None:
        super().__init__("works")
        self.properties = properties

    def __getattribute__(self, name: str) -> Any:
        properties = super().__getattribute__("__dict__").get("properties", {})
        if name not in properties:
            return super().__getattribute__(name)
        if isinstance(properties[name], BaseException):
            raise properties[name]
        return properties[name]


class ReadOnce(Odd):
    """Answers the first look at what it says of itself, and wants to end the process at each further one."""

    def __init__(self, name: str) -> None:
        super().__init__("works")
        self.__dict__.update(once=name, reads=0)

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__("__dict__")
        if name == own.get("once"):
            own["reads"] += 1
            if own["reads"] > 1:
                raise SystemExit(f"no {name} any more")
        return super().__getattribute__(name)


class OddFactory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config: DriverParams) -> Odd:
        if config["how"] == "cannot be built":
            raise RuntimeError("no such bus")
        if config["how"] == "ends the process":
            raise SystemExit("a vendor's library wants to end this process")
        if config["how"] in ENDINGS:
            raise ENDINGS[config["how"]]
        if config["how"] == "has no words":
            raise WordlessError
        if config["how"] == "has a hint that ends the process":
            return WithProperties(not_granted_hint=SystemExit("no hint ever"))
        if config["how"] == "has a hint that fails":
            return WithProperties(not_granted_hint=RuntimeError("no hint today"))
        if config["how"] in PROPERTIES:
            return WithProperties(**PROPERTIES[config["how"]])
        if config["how"].startswith("once says its "):
            return ReadOnce(config["how"].removeprefix("once says its "))
        if config["how"] == "has an odd time-out":
            return WithProperties(call_timeout="soon")
        if config["how"] == "is none":
            return cast("Odd", None)
        return Odd(config["how"])


PROPERTIES: dict[str, dict[str, object]] = {
    "has a hint of half characters": {"not_granted_hint": os.fsdecode(b"/dev/\xff")},
    "has a time-out that ends the process": {"call_timeout": SystemExit("no time-out ever")},
    "has a time-out beyond all numbers": {"call_timeout": 10**400},
    "does not know whether it knows": {"knows_holders": KeyboardInterrupt("no answer")},
}


def odd(how: str) -> str:
    return (
        'external-resources = ["odd", "good"]\n'
        '[external-resource.good]\namount = 1\ndriver = "static"\nparam.count = 2\n'
        '[external-resource.odd]\namount = 1\ndriver = "runtime.drivers.test_driver_faults:OddFactory"\n'
        f'param.how = "{how}"\n'
    )


@pytest.mark.parametrize(
    "how",
    [
        "raises",
        "raises half characters",
        "hangs",
        "yields no devices",
        "yields devices without a name",
        "yields what is no text",
        "yields half characters",
        "ends",
        "ends before it begins",
        "yields too many devices",
        "is cancelled from within",
        *RAISED,
    ],
)
async def test_an_inventory_that_fails_once_is_opened_again(serve: Serve, how: str) -> None:
    async with serve(odd(how)) as manager:
        await manager.say(register("g", good=1))
        await manager.state("g", "allocated")
        await manager.until(
            lambda records: (
                records["@host/h"]["resources"]["odd"]["state"] == "reported"
                and records["@host/h"]["resources"]["odd"]["devices"]
            )
        )
        await manager.say(register("w", odd=1))
        assert (await manager.state("w", "allocated"))["resources"]["odd"][0]["id"] == "odd:0"
        assert manager.metric("outfitter_driver_failures_total", resource="good", call="inventory") == 0


async def test_an_inventory_that_never_waits_leaves_its_manager_time_for_others(serve: Serve) -> None:
    async with serve(odd("never waits")) as manager:
        await manager.say(register("g", good=1), register("w", odd=1))
        await manager.state("g", "allocated")
        await manager.state("w", "allocated")


class Busy(Odd):
    """Has other devices each time, or fails and wants no delay, five times, at once. `asked_at` is when, in seconds."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.asked_at: list[float] = []

    async def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        while len(self.asked_at) < 5:
            self.asked_at.append(anyio.current_time())
            if self.how == "fails":
                raise TemporaryDriverError("again", delay=0.0)
            yield [Device(properties={"index": str(len(self.asked_at))})]
        await anyio.sleep_forever()


@pytest.mark.parametrize("how", ["yields", "fails"])
def test_a_driver_that_never_waits_is_asked_again_after_a_pause(how: str) -> None:
    """In virtual time: a busy machine cannot stretch the pause."""
    driver = Busy(how)
    supervisor = Supervisor(
        Loaded(spec=m.ResourceSpec(name="busy"), served=inspected(driver)),
        host="h",
        emit=lambda _: None,
        metrics=Metrics(),
    )

    async def look() -> None:
        with anyio.move_on_after(10.0):
            await supervisor.keep_inventory(driver)

    with running(0) as loop:
        loop.run_until_complete(look())
    pauses = [after - before for before, after in pairwise(driver.asked_at)]
    assert pauses == pytest.approx([SHORTEST_DELAY_S] * 4)
    assert SHORTEST_DELAY_S == 0.05


async def test_the_many_devices_of_a_report_are_looked_at_in_several_turns() -> None:
    looked_at = 0
    by_turn: list[int] = []

    def devices() -> Iterator[Device]:
        nonlocal looked_at
        for index in range(MOST_DEVICES):
            looked_at += 1
            yield Device(properties={"index": str(index)})

    async def count() -> None:
        while True:
            by_turn.append(looked_at - sum(by_turn))
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        assert len(await known_devices("gpu", devices())) == MOST_DEVICES
        tasks.cancel_scope.cancel()
    assert AT_A_STRETCH == 500
    assert max(by_turn) == AT_A_STRETCH


async def test_devices_that_are_no_text_are_refused_and_leave_a_ledger_that_can_be_replayed(serve: Serve) -> None:
    async with serve(odd("always yields what is no text")) as manager:
        state = await manager.until(
            lambda records: records["@host/h"]["resources"]["odd"]["state"] != "not-reported" and records["@host/h"]
        )
        assert state["resources"]["odd"]["state"] == "driver-failed"
        assert "'odd:7'" in state["resources"]["odd"]["reason"]
    async with serve(odd("works"), identity=another()) as manager:
        await manager.say(register("w", odd=1))
        await manager.state("w", "allocated")


@pytest.mark.parametrize("name", ["PATH", "LD_PRELOAD", "PYTHONPATH", "OUTFITTER_BUS", "A=B"])
async def test_a_driver_that_sets_a_variable_that_decides_which_code_runs_is_refused(serve: Serve, name: str) -> None:
    async with serve(odd(f"sets {name}")) as manager:
        state = await manager.until(
            lambda records: records["@host/h"]["resources"]["odd"]["state"] != "not-reported" and records["@host/h"]
        )
        assert state["resources"]["odd"]["state"] == "driver-failed"
        assert f"with variable {name!r}, which no driver may set" in state["resources"]["odd"]["reason"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cannot be built", "no such bus"),
        ("is none", "no ExternalResourceDriver but None"),
        ("ends the process", "a vendor's library wants to end this process"),
        ("has no words", "its message cannot be read"),
        ("is interrupted", "its driver cannot be built: KeyboardInterrupt"),
        ("is closed as a generator", "its driver cannot be built: GeneratorExit"),
        ("panics", "its driver cannot be built: Unrelated: unwrap of None"),
        ("is cancelled", "its driver cannot be built: CancelledError: a task of its own"),
        ("has a hint that ends the process", "SystemExit: no hint ever"),
        ("has a hint that fails", "no hint today"),
        ("has an odd time-out", "call_timeout is 'soon'"),
        ("has a time-out that ends the process", "SystemExit: no time-out ever"),
        ("has a time-out beyond all numbers", "valid is a number of seconds above 0"),
        ("does not know whether it knows", "KeyboardInterrupt: no answer"),
    ],
)
async def test_a_driver_that_cannot_be_built_leaves_the_others_served(serve: Serve, how: str, said: str) -> None:
    async with serve(odd(how)) as manager:
        await manager.say(register("w", odd=1), register("g", good=1))
        await manager.state("g", "allocated")
        record = await manager.state("w", "failed")
        assert record["reason_code"] == "misconfigured"
        assert "external-resource.odd" in record["reason"]
        assert said in record["reason"]


@pytest.mark.parametrize("name", ["call_timeout", "knows_holders", "not_granted_hint"])
async def test_what_a_driver_says_of_itself_is_read_once(serve: Serve, name: str) -> None:
    async with serve(odd(f"once says its {name}")) as manager:
        await manager.say(register("g", good=1), register("w", odd=1))
        await manager.state("g", "allocated")
        await manager.state("w", "allocated")


async def test_a_hint_of_half_characters_can_be_written(serve: Serve) -> None:
    async with serve(odd("has a hint of half characters")) as manager:
        await manager.say(register("w", odd=1))
        await manager.state("w", "allocated")
        await manager.say(register("x", odd=1), register("g", good=1))
        await manager.state("x", "pending")
        await manager.state("g", "allocated")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('amount = "many"\ndriver = "static"\nparam.count = 2', "amount"),
        ('amount = 1\ndriver = "statik"\nparam.count = 2', "static"),
        ('amount = 1\ndriver = "static"\nparam.cuont = 2', "cuont"),
        ('amount = 1\ndriver = "gpu"\nparam.discovery-script.path = "/no/such/script"', "/no/such/script"),
    ],
)
async def test_one_wrong_resource_in_the_configuration_answers_with_its_key_and_the_others_are_served(
    serve: Serve, wrong: str, said: str
) -> None:
    config = (
        'external-resources = ["wrong", "good"]\n'
        '[external-resource.good]\namount = 1\ndriver = "static"\nparam.count = 2\n'
        f"[external-resource.wrong]\n{wrong}\n"
    )
    async with serve(config) as manager:
        await manager.say(register("w", wrong=1), register("g", good=1))
        await manager.state("g", "allocated")
        record = await manager.state("w", "failed")
        assert "external-resource.wrong" in record["reason"]
        assert said in record["reason"]
        assert (await manager.records())["@host/h"]["resources"]["wrong"]["state"] != "reported"


async def test_a_host_that_is_left_before_its_devices_are_looked_at_is_not_looked_at() -> None:
    driver = Odd("works")
    pool = DriverPool({"odd": Loaded(spec=m.ResourceSpec(name="odd"), served=inspected(driver))}, metrics=Metrics())

    class LeftAtOnce(anyio.Event):
        """Set in the same turn of the event loop in which the pool has begun with its host."""

        def __new__(cls) -> LeftAtOnce:
            return object.__new__(cls)

        def set(self) -> None:
            pool.stop_host("h")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(pool.run, lambda _: None, started=LeftAtOnce(), host="h"))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert driver.asked == 0


class Refusing(ExternalResourceDriver):
    """Asked on demand, it fails for now."""

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        raise TemporaryDriverError(f"not {amount}")


class Short(ExternalResourceDriver):
    """It never has enough, and leaves out what others hold."""

    knows_holders = True

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        raise NotEnoughDevicesError(f"not {amount}")


@pytest.mark.parametrize("held", [0, 1])
def test_a_shortage_is_permanent_unless_others_hold_devices_and_then_soon_asked_about_again(held: int) -> None:
    said: list[m.Event] = []
    loaded = Loaded(spec=m.ResourceSpec(name="bad", on_demand=True), served=inspected(Short()))
    with running(1) as loop:
        supervisor = Supervisor(loaded, host="h", emit=said.append, metrics=Metrics())
        question = m.Discover(host="h", resource="bad", amount=held + 1, least=1, held=held, allocation="h/w/1")

        async def ask() -> list[float]:
            took = []
            for _ in range(8):
                begun = loop.time()
                await supervisor.discover(question, None)
                took.append(loop.time() - begun)
            return took

        took = loop.run_until_complete(ask())
    reports = [event for event in said if isinstance(event, m.DriverReport)]
    assert {report.failure is not None and report.failure.permanent for report in reports} == {held == 0}
    if held:
        assert took == pytest.approx([0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0], rel=0.5)
        assert max(took) <= LONGEST_SHORTAGE_S + 0.01
    else:
        assert max(took) < 0.01


async def test_failures_with_several_amounts_have_a_driver_asked_again_once() -> None:
    said: list[m.Event] = []
    loaded = Loaded(spec=m.ResourceSpec(name="bad", on_demand=True), served=inspected(Refusing()))
    supervisor = Supervisor(loaded, host="h", emit=said.append, metrics=Metrics())
    async with anyio.create_task_group() as tasks:
        for amount in (3, 2, 1):
            question = m.Discover(host="h", resource="bad", amount=amount, least=amount, allocation="h/w/1")
            tasks.start_soon(supervisor.discover, question, None)
    failures = [event.failure for event in said if isinstance(event, m.DriverReport) and event.failure is not None]
    assert [failure.at_least for failure in failures] == [3, 2, 1]
    assert sum(isinstance(event, m.DriverRetry) for event in said) == 1

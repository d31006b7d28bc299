"""A driver that does not answer, again and again: nobody calls its devices healthy, and whoever holds one keeps it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence

import anyio
import pytest

from outfitter_drivers.api import (
    Device,
    ExternalResourceDriver,
    ExternalResourceInfo,
    Inventory,
    PermanentDriverError,
    TemporaryDriverError,
    Worker,
)
from outfitter_drivers.polling import PollingDriver
from outfitter_proto.records import Health
from outfitter_service.core import model as m
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.drivers import silence
from outfitter_service.runtime.drivers.building import inspected
from outfitter_service.runtime.drivers.supervisor import Loaded, Supervisor
from runtime.conftest import Serve
from simulation.loop import START_S, running
from support.drivers.reporting import SOURCES, Source, reporting
from support.managers.in_process import deregister, register

DEVICES = (
    Device(id="a", properties={"index": "0"}),
    Device(id="b", properties={"index": "1"}, health=Health.UNHEALTHY, reason="ECC"),
)
HEALTHY = [(Health.HEALTHY, None), (Health.UNHEALTHY, "ECC")]
Seen = list[tuple[Health, str | None]]


def now_s() -> float:
    """The virtual seconds since the beginning."""
    return anyio.current_time() - START_S


class Looking(ExternalResourceDriver, Inventory):
    """At each time of a plan it answers, or fails with that error, until the next one."""

    def __init__(self, *plan: tuple[float, Exception | None]) -> None:
        self._plan = plan

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        raise NotImplementedError

    async def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        while True:
            now = now_s()
            begun, error = max((each for each in self._plan if each[0] <= now), key=lambda each: each[0])
            if error is not None:
                raise error
            yield DEVICES
            await anyio.sleep(min([at for at, _ in self._plan if at > begun], default=1e9) - now)


def reports(driver: ExternalResourceDriver, *, within_s: float) -> list[tuple[float, m.DriverReport]]:
    """What the core is told in so many seconds of virtual time, and when."""
    said: list[tuple[float, m.DriverReport]] = []

    def emit(event: m.Event) -> None:
        assert isinstance(event, m.DriverReport)
        said.append((now_s(), event))

    loaded = Loaded(spec=m.ResourceSpec(name="gpu"), served=inspected(driver))
    supervisor = Supervisor(loaded, host="h", emit=emit, metrics=Metrics())

    async def look() -> None:
        assert isinstance(driver, Inventory)
        with anyio.move_on_after(within_s):
            await supervisor.keep_inventory(driver)

    with running(0) as loop:
        loop.run_until_complete(look())
    return said


def seen(report: m.DriverReport) -> Seen:
    return [(device.health, device.reason) for device in report.devices]


def unknown(report: m.DriverReport) -> bool:
    return any(device.health == Health.UNKNOWN for device in report.devices)


BROKEN = TemporaryDriverError("nvidia-smi did not end within 10 s")


@pytest.mark.parametrize("seconds", [1.0, 9.0])
def test_devices_stay_healthy_through_a_short_silence(seconds: float) -> None:
    """Nine seconds are several looks, and the first of many that fail at once comes long before."""
    driver = Looking((0, None), (20, BROKEN), (20 + seconds, None))
    said = [report for _, report in reports(driver, within_s=60)]
    assert [seen(report) for report in said if report.devices] == [HEALTHY, HEALTHY]
    assert any(report.failure for report in said)


def test_two_failed_looks_make_no_device_unknown_however_far_apart_they_are() -> None:
    driver = Looking((0, None), (60, TemporaryDriverError("no answer", delay=20)), (95, None))
    said = [report for _, report in reports(driver, within_s=200)]
    assert any(report.failure for report in said)
    assert not any(map(unknown, said))


@pytest.mark.parametrize("error", [BROKEN, PermanentDriverError("no nvidia-smi"), OSError("stale handle")])
def test_devices_of_a_driver_that_fails_again_and_again_are_unknown_until_it_answers(error: Exception) -> None:
    driver = Looking((0, None), (20, error), (200, None))
    said = reports(driver, within_s=300)
    first = next(at for at, report in said if unknown(report))
    assert 20 + silence.SILENT_S <= first <= 20 + 2 * silence.SILENT_S + 10
    failing = [report for at, report in said if first <= at < 200]
    assert failing
    for report in failing:
        (health, reason), ill = seen(report)
        assert (health, ill) == (Health.UNKNOWN, (Health.UNHEALTHY, "ECC"))
        assert reason is not None
        assert reason.startswith("its driver has not answered since 2")
        assert str(error) in reason
        assert report.failure is not None
        assert report.failure.permanent == isinstance(error, PermanentDriverError)
    assert seen(said[-1][1]) == HEALTHY
    assert said[-1][1].failure is None


def test_words_that_change_at_each_look_change_no_devices() -> None:
    class CountingError(TemporaryDriverError):
        looks = 0

        def __str__(self) -> str:
            type(self).looks += 1
            return f"look {self.looks} failed"

    said = reports(Looking((0, None), (20, CountingError(""))), within_s=300)
    failures = {report.failure.reason for _, report in said if report.failure is not None}
    assert len(failures) > 5
    assert len({tuple(seen(report)) for _, report in said if unknown(report)}) == 1


def test_a_reason_that_each_device_repeats_is_short() -> None:
    said = reports(Looking((0, None), (20, TemporaryDriverError("x" * 1900))), within_s=60)
    _, last = said[-1]
    assert max(len(device.reason or "") for device in last.devices) < silence.LONGEST_WORDS + 80


def test_a_driver_that_wants_to_be_asked_in_an_hour_is_silent_at_once() -> None:
    said = reports(Looking((0, None), (20, TemporaryDriverError("rebooting", delay=3600))), within_s=60)
    assert [(round(at), unknown(report)) for at, report in said] == [(0, False), (20, True)]


def test_a_driver_that_has_named_nothing_yet_fails_as_before() -> None:
    said = reports(Looking((0, BROKEN)), within_s=60)
    assert {report.devices for _, report in said} == {()}


class Hanging(PollingDriver):
    """Its first look answers, and no other one ends."""

    call_timeout = 30.0

    def __init__(self) -> None:
        super().__init__(poll_interval=1.0)
        self._looks = 0

    async def look(self) -> list[Device]:
        self._looks += 1
        if self._looks > 1:
            await anyio.sleep_forever()
        return list(DEVICES)

    def shortage(self, amount: int, *, healthy: int, known: int) -> str:
        raise NotImplementedError


def test_a_look_of_a_polling_driver_has_a_time_limit_however_often_it_has_answered() -> None:
    said = reports(Hanging(), within_s=300)
    assert seen(said[0][1]) == HEALTHY
    last = said[-1][1]
    assert unknown(last)
    assert last.failure is not None
    assert "its driver did not answer within 35 s" in {report.failure.reason for _, report in said if report.failure}


# --- with a manager ---------------------------------------------------------------------------------------


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    """The devices of the resource `gpu`."""
    monkeypatch.setattr(silence, "SILENT_S", 0.2)
    SOURCES["gpu"] = Source()
    SOURCES["gpu"].report(*DEVICES)
    return SOURCES["gpu"]


async def test_nobody_loses_or_gets_a_device_of_a_silent_driver_and_who_waits_is_granted_afterwards(
    serve: Serve, source: Source
) -> None:
    async with serve(reporting("gpu", extra='min-healthy-time = "0s"\n')) as manager:
        await manager.say(register("holder", gpu=1))
        token = (await manager.state("holder", "allocated"))["token"]
        source.fail(TemporaryDriverError("the bus is gone", delay=0.05))
        await manager.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"][0]["health"] == "unknown")
        host = (await manager.records())["@host/h"]["resources"]["gpu"]
        assert (host["state"], host["reason"], host["healthy"]) == ("driver-failed", "the bus is gone", 0)
        said = host["devices"][0]["reason"]
        assert said.startswith("its driver has not answered since 2")
        assert said.endswith(": the bus is gone")
        assert host["devices"][1]["reason"] == "ECC"
        held = await manager.until(
            lambda records: (
                records["h/holder/1"]["resources"]["gpu"][0].get("health") == "unknown" and records["h/holder/1"]
            )
        )
        assert (held["state"], held["token"]) == ("allocated", token)
        assert held["resources"]["gpu"][0]["health.reason"] == said
        await manager.say(register("waiter", gpu=1), deregister("holder"))
        await manager.state("holder", "ended")
        waiting = await manager.until(
            lambda records: (
                records.get("h/waiter/1", {}).get("reason_code") == "driver-failed" and records["h/waiter/1"]
            )
        )
        assert waiting["state"] == "pending"
        assert "the bus is gone" in waiting["reason"]
        source.report(*DEVICES)
        granted = await manager.state("waiter", "allocated")
        assert [info["id"] for info in granted["resources"]["gpu"]] == ["a"]
        assert "health" not in granted["resources"]["gpu"][0]
        host = (await manager.records())["@host/h"]["resources"]["gpu"]
        assert (host["state"], host["healthy"]) == ("reported", 1)

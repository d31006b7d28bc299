"""Whatever a driver's calls raise is its own failure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from outfitter_drivers.api import (
    ExternalResourceDriver,
    ExternalResourceInfo,
    Grant,
    InUseCheck,
    Preparation,
    Worker,
)
from outfitter_service.core import model as m
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.drivers import supervisor as supervisor_module
from outfitter_service.runtime.drivers.building import inspected
from outfitter_service.runtime.drivers.pool import close
from outfitter_service.runtime.drivers.supervisor import Loaded, Supervisor
from runtime.drivers.odd_errors import RAISED, WordlessError


class Raising(ExternalResourceDriver, Preparation, InUseCheck):
    """Each of its calls raises what it was made with, the first time."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error
        self.called: set[str] = set()

    def once(self, call: str) -> None:
        if call not in self.called:
            self.called.add(call)
            raise self.error()

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        self.once("retrieve")
        return [ExternalResourceInfo({"index": str(index)}) for index in range(amount)]

    async def prepare(self, grant: Grant) -> None:
        self.once("prepare")

    async def unprepare(self, grant: Grant) -> None:
        self.once("unprepare")

    async def in_use(self, grant: Grant) -> str | None:
        self.once("in-use")
        return None

    async def aclose(self) -> None:
        self.once("close")


@pytest.mark.parametrize("what", RAISED)
async def test_whatever_a_driver_raises_is_its_own_failure_and_is_tried_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.01)
    said: list[m.Event] = []
    driver = Raising(RAISED[what])
    loaded = Loaded(spec=m.ResourceSpec(name="bad", on_demand=True), served=inspected(driver))
    supervisor = Supervisor(loaded, host="h", emit=said.append, metrics=Metrics())
    question = m.Discover(host="h", resource="bad", amount=1, least=1, allocation="h/w/1")
    grant = Grant(allocation="h/w/1", token=1, worker=Worker(host="h", resource="bad"), device_ids=(), devices=())
    await supervisor.discover(question, None)
    await supervisor.discover(question, None)
    assert "could not prepare" in (await supervisor.prepare(grant) or "")
    assert await supervisor.prepare(grant) is None
    await supervisor.unprepare(grant)
    assert await supervisor.wait_until_unused(grant) is None
    await close([loaded], 5.0)
    assert driver.called == {"retrieve", "prepare", "unprepare", "in-use", "close"}
    reports = [event for event in said if isinstance(event, m.DriverReport)]
    assert [report.failure is None for report in reports] == [False, True]


class Hidden(Raising):
    """Some of its methods cannot be read the first time."""

    def __init__(self, *methods: str) -> None:
        super().__init__(WordlessError)
        self.called = {"retrieve", "prepare", "unprepare", "in-use", "close"}  # so that no call raises
        self.hidden = set(methods)

    def __getattribute__(self, name: str) -> Any:
        hidden = super().__getattribute__("__dict__").get("hidden", set())
        if name in hidden:
            hidden.discard(name)
            raise SystemExit(f"no {name} today")
        return super().__getattribute__(name)


async def test_a_method_that_cannot_be_read_is_its_drivers_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.01)
    said: list[m.Event] = []
    driver = Hidden("prepare", "unprepare", "in_use", "aclose")
    loaded = Loaded(spec=m.ResourceSpec(name="bad", on_demand=True), served=inspected(driver))
    supervisor = Supervisor(loaded, host="h", emit=said.append, metrics=Metrics())
    grant = Grant(allocation="h/w/1", token=1, worker=Worker(host="h", resource="bad"), device_ids=(), devices=())
    assert "no prepare today" in (await supervisor.prepare(grant) or "")
    await supervisor.unprepare(grant)
    assert await supervisor.wait_until_unused(grant) is None
    await close([loaded], 5.0)
    assert not driver.hidden
    delayed, *_ = (event for event in said if isinstance(event, m.ReleaseDelayed))
    assert "no unprepare today" in delayed.reason

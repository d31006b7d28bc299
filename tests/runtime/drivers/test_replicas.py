"""Resources that lend each device several times: with which drivers, and that nobody looks whether it is in use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import pytest

from outfitter_drivers.api import (
    Device,
    ExternalResourceDriver,
    ExternalResourceInfo,
    Grant,
    InUseCheck,
    Inventory,
    Preparation,
    Worker,
)
from outfitter_proto.clauses import Clauses
from outfitter_proto.records import Condition
from outfitter_service.config.resources import ResourceConfig
from outfitter_service.core.model import NO_CLAUSES, SpecState
from outfitter_service.runtime.drivers import building
from outfitter_service.runtime.drivers.loading import load


class OnDemand(ExternalResourceDriver):
    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        return [ExternalResourceInfo({"index": str(number)}) for number in range(amount)]


class Looking(OnDemand, Inventory, InUseCheck):
    async def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        yield [Device(properties={"index": "0"})]

    async def in_use(self, grant: Grant) -> str | None:
        return None


class Preparing(Looking, Preparation):
    async def prepare(self, grant: Grant) -> None: ...

    async def unprepare(self, grant: Grant) -> None: ...


def loaded(
    monkeypatch: pytest.MonkeyPatch,
    driver: ExternalResourceDriver,
    *,
    replicas: int = 2,
    sharing: str = "exclusive",
    clauses: Clauses = NO_CLAUSES,
) -> Any:
    monkeypatch.setattr(building.registry, "create_driver", lambda *_: driver)
    config = ResourceConfig(name="gpu", amount=1, driver="x", replicas=replicas, sharing=sharing, clauses=clauses)
    return load([config])["gpu"].spec


@pytest.mark.parametrize(
    ("driver", "sharing", "why"),
    [
        (OnDemand(), "exclusive", "its driver, which has no inventory and is asked for each worker"),
        (Preparing(), "exclusive", "its driver, which prepares devices for one worker at a time"),
        (Looking(), "shared", "sharing = shared, which lends each device to everybody"),
    ],
)
def test_what_does_not_go_with_replicas_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, driver: ExternalResourceDriver, sharing: str, why: str
) -> None:
    spec = loaded(monkeypatch, driver, sharing=sharing)
    assert spec.state is SpecState.MISCONFIGURED
    assert f"replicas = 2 does not go with {why}; valid is replicas = 1" in spec.reason


@pytest.mark.parametrize(
    "clauses", [Clauses(where=(("model", Condition(is_="x")),), same=()), Clauses(where=(), same=("model",))]
)
def test_no_devices_are_chosen_of_a_driver_that_names_them_only_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, clauses: Clauses
) -> None:
    spec = loaded(monkeypatch, OnDemand(), replicas=1, clauses=clauses)
    assert spec.state is SpecState.MISCONFIGURED
    assert "where and same do not go with its driver" in spec.reason
    assert loaded(monkeypatch, Looking(), replicas=1, clauses=clauses).state is SpecState.OK


def test_nobody_looks_whether_a_returned_device_is_in_use_that_others_may_still_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert loaded(monkeypatch, Looking(), replicas=1).confirms
    spec = loaded(monkeypatch, Looking())
    assert (spec.state, spec.replicas, spec.confirms) == (SpecState.OK, 2, False)

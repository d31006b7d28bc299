"""Quotas that hold everybody back, set and removed while all work: late, and nothing worse."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from chaos.harm import Harmed
from chaos.scene import Note, playing
from support.kafka.broker import KafkaBroker
from support.kafka.quotas import OF_ALL_CLIENTS, OF_ALL_USERS, set_quotas

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(400)]

QUOTAS = {"producer_byte_rate": 100_000.0, "consumer_byte_rate": 100_000.0, "request_percentage": 10.0}
ANSWERS = 5
"""For each quota, while it holds and afterwards."""


@pytest.mark.parametrize("entity", [OF_ALL_CLIENTS, OF_ALL_USERS], ids=["clients", "users"])
@pytest.mark.parametrize("names", [[name] for name in QUOTAS] + [list(QUOTAS)], ids="-".join)
def test_no_quota_loses_or_doubles_anything(
    harmed: Harmed, tmp_path: Path, note: Note, entity: tuple[str, str | None], names: list[str]
) -> None:
    broker = KafkaBroker(harmed.broker.direct.partition(",")[0])
    quotas: Mapping[str, float] = {name: QUOTAS[name] for name in names}
    name = f"quota of all {entity[0]}s: {', '.join(names)}"
    with playing(harmed.broker, tmp_path, name, note) as scene, scene.fault(name) as trouble:
        try:
            set_quotas(broker, entity, **quotas)
            trouble.begin()
            scene.fleet.await_answers(ANSWERS, since=time.monotonic())
            host = scene.dice.choice(scene.hosts)
            scene.managers[host].kill9()
            scene.managers[host].start(ready=False)
            scene.fleet.await_answers(ANSWERS, since=time.monotonic())
        finally:
            set_quotas(broker, entity, **dict.fromkeys(quotas))

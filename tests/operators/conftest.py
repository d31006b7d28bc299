"""The two setups that test the operators' side: the in-memory fake, and a real bus with a scripted manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outfitter import RuntimeContext
from outfitter.testing import FakeOutfitter
from support.kafka.broker import KafkaBroker
from support.managers.scripted import ScriptedManager

HOST = "gpu-3"
GPUS = [{"id": f"GPU-{name}", "index": str(index)} for index, name in enumerate("abcd")]


class WorkerSetup(NamedTuple):
    """A fake that says what the manager answers, and how a test makes contexts."""

    fake: FakeOutfitter
    context: Callable[..., RuntimeContext]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUS", "CLUSTER", "HOST", "WORKER", "OPERATOR", "INCARNATION", "ALLOW_ENV"):
        monkeypatch.delenv(f"OUTFITTER_{name}", raising=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"


@pytest.fixture
def fake() -> FakeOutfitter:
    return FakeOutfitter({"gpu": GPUS}, env={"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})


@pytest.fixture
def manager(url: str, fake: FakeOutfitter) -> Iterator[ScriptedManager]:
    with ScriptedManager(url, HOST, fake) as manager:
        yield manager


@pytest.fixture
def real(url: str, manager: ScriptedManager, fake: FakeOutfitter) -> WorkerSetup:
    def context(*args: Any, **kwargs: Any) -> RuntimeContext:
        return RuntimeContext(*args, **{"bus": url, "host": HOST, **kwargs})

    return WorkerSetup(fake, context)


@pytest.fixture(params=["fake", "embedded bus", pytest.param("kafka", marks=pytest.mark.kafka)])
def setup(request: pytest.FixtureRequest, fake: FakeOutfitter) -> Iterator[WorkerSetup]:
    match request.param:
        case "fake":
            yield WorkerSetup(fake, fake.context)
        case "embedded bus":
            yield request.getfixturevalue("real")
        case _:
            broker: KafkaBroker = request.getfixturevalue("kafka_broker")
            cluster = broker.new_cluster()

            def context(*args: Any, **kwargs: Any) -> RuntimeContext:
                return RuntimeContext(*args, **{"bus": broker.url, "host": HOST, "cluster": cluster, **kwargs})

            with ScriptedManager(broker.url, HOST, fake, cluster=cluster):
                yield WorkerSetup(fake, context)

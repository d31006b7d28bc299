"""Managers and clients of a broker that lets nobody in unasked (support/kafka/secure_broker.py)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from outfitter_proto.bus import Bus, connect
from outfitter_service.config import load
from outfitter_service.runtime.manager.service import Service
from support.kafka.secure_broker import SecureBroker

WITHIN = 30.0
HOST = f"gpu-{secrets.token_hex(4)}"
"""Of this process: one machine has one manager of a host, and several processes run tests."""


class Managed:
    """A manager in this process, and what became of it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.failure: BaseException | None = None

    def count(self, metric: str) -> float:
        value = self.service.metrics.registry.get_sample_value(metric)
        assert value is not None, f"no metric {metric}"
        return value


@asynccontextmanager
async def managing(
    url: str, login: Mapping[str, str], cluster: str, folder: Path, *, host: str | None = None, scope: str = "host"
) -> AsyncIterator[Managed]:
    """A manager with two devices `gpu`. The block begins when it is ready, or has ended by itself (`failure`)."""
    settings = "".join(f'{name} = "{value}"\n' for name, value in login.items())
    path = folder / "outfitter.toml"
    path.write_text(
        f'bus = "{url}"\nscope = "{scope}"\ncluster = "{cluster}"\nhost = "{host or cluster}"\n'
        f'lease = "20s"\nlease-grace = "20s"\nhttp = "127.0.0.1:0"\n'
        f'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "static"\nparam.count = 2\n'
        f"[kafka]\n{settings}"
    )
    managed = Managed(Service(load(path, environment={})))
    ended = anyio.Event()

    async def live() -> None:
        try:
            await managed.service.run()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            managed.failure = error
        finally:
            ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(live)
        with anyio.fail_after(WITHIN):
            while not managed.service.ready and not ended.is_set():  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        yield managed
        managed.service.stop()
        with anyio.fail_after(WITHIN):
            await ended.wait()


@asynccontextmanager
async def client(broker: SecureBroker, login: Mapping[str, str], listener: str = "sasl") -> AsyncIterator[Bus]:
    """A bus of somebody's who logs in at `listener`."""
    async with connect(broker.at(listener), login) as bus:
        yield bus

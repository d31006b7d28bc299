"""Reaching the bus at the start: it may be away at any moment of it, and the manager goes on trying."""

from __future__ import annotations

import secrets
from pathlib import Path

import anyio
import pytest

from outfitter_proto import bus as buses
from outfitter_proto.bus import BusUnavailableError
from outfitter_service import config as configuration
from outfitter_service.runtime.manager import service
from outfitter_service.runtime.manager.service import Service
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import static

POINTS = ("start:before", "start:after", "create_topics:before", "topic:before", "topic:after")


async def test_a_bus_that_is_away_at_any_moment_of_the_start_is_waited_for(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CONNECT_BACKOFF_S", (0.0, 0.0))
    path = tmp_path / "outfitter.toml"
    path.write_text(f'host = "t-{secrets.token_hex(5)}"\nbus = "{url}"\n{static(1)}')
    settings = configuration.load(path, environment={})
    for point in POINTS:
        for left in range(6):
            await _starts(settings, url, point, left, monkeypatch)


async def _starts(
    settings: configuration.Settings, url: str, point: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start with a fault at the `left`th time that `point` is come to."""

    async def fail(where: str) -> None:
        nonlocal left
        if where == point:
            left -= 1
            if left == -1:
                raise BusUnavailableError("a moment's absence")

    monkeypatch.setattr(buses, "connect", lambda *_, **__: FaultyBus(url, fail))
    manager = Service(settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(manager.run)
        with anyio.fail_after(20):
            while not manager.ready:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.005)
        manager.stop()

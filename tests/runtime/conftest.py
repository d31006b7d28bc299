"""What the service's tests share: an embedded bus, and managers in this process on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import InProcessManager, serving

Serve = Callable[..., AbstractAsyncContextManager[InProcessManager]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"


@pytest.fixture
async def bus(url: str) -> AsyncIterator[FaultyBus]:
    """An embedded bus that fails where a test says."""
    async with FaultyBus(url) as bus:
        yield bus


@pytest.fixture
def serve(bus: FaultyBus, tmp_path: Path) -> Serve:
    """`async with serve(config, **more) as manager`: see support/managers/in_process.py."""
    return lambda config, **more: serving(more.pop("on", bus), config, tmp_path, **more)

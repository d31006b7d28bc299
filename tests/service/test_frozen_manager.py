"""A manager that is stopped for longer than a lease (SIGSTOP) hears what is queued before it judges anybody."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from outfitter_proto.bus import Entry, connect
from support.house import TOPICS, register
from support.manager import Manager, StartManager


def publish(manager: Manager, *bodies: dict[str, object]) -> None:
    async def say() -> None:
        async with connect(manager.bus_url) as bus:
            for body in bodies:
                await bus.publish(TOPICS.registrations, 0, Entry(manager.host.encode(), json.dumps(body).encode()))

    anyio.run(say)


@contextmanager
def beating(manager: Manager, worker: str, every: float = 0.1) -> Iterator[None]:
    """Heartbeats from a thread, until the block is left."""
    over = threading.Event()
    body = {"type": "heartbeat", "host": manager.host, "worker": worker, "incarnation": "1"}

    async def beat() -> None:
        async with connect(manager.bus_url) as bus:
            while not over.is_set():
                await bus.publish(TOPICS.registrations, 0, Entry(manager.host.encode(), json.dumps(body).encode()))
                await anyio.sleep(every)

    thread = threading.Thread(target=lambda: anyio.run(beat))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(60)
def test_frozen_longer_than_a_lease_it_expires_none_whose_heartbeats_are_queued(start_manager: StartManager) -> None:
    manager = start_manager(gpus=2, extra='lease-grace = "100ms"')
    with beating(manager, "alive"):
        publish(
            manager,
            register("alive", host=manager.host, gpu=1, lease_s=0.5),
            register("silent", host=manager.host, gpu=1, lease_s=0.5),
        )
        manager.wait_for(lambda: (manager.metric("outfitter_grants_total") or 0) >= 2)
        manager.signal(signal.SIGSTOP)
        threading.Event().wait(1.5)  # three leases
        manager.signal(signal.SIGCONT)
        manager.wait_for_state("silent", "ended")
        assert manager.record("alive")["state"] == "allocated"  # type: ignore[index]  # it is there
        assert manager.metric("outfitter_lease_expiries_total") == 1
    manager.wait_for_state("alive", "ended")

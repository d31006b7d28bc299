"""A manager that is stopped for longer than a lease (SIGSTOP) hears what is queued before it judges anybody."""

from __future__ import annotations

import fcntl
import json
import signal
import threading
from datetime import UTC, datetime, timedelta

import anyio

from outfitter_proto.bus import Entry, connect
from support.managers.in_process import TOPICS, register
from support.managers.process import Manager, StartManager
from support.processes.freezing import freeze

LEASE_S = 4.0


def publish(manager: Manager, *bodies: dict[str, object]) -> None:
    async def say() -> None:
        async with connect(manager.bus_url) as bus:
            for body in bodies:
                await bus.publish(TOPICS.registrations, 0, Entry(manager.host.encode(), json.dumps(body).encode()))

    anyio.run(say)


def test_frozen_longer_than_a_lease_it_expires_none_whose_heartbeats_are_queued(start_manager: StartManager) -> None:
    """They are heard first, and each lease starts anew with them: it ends one lease later at the earliest."""
    manager = start_manager(gpus=2, extra='lease-grace = "100ms"')
    publish(
        manager,
        register("alive", host=manager.host, gpu=1, lease_s=LEASE_S),
        register("silent", host=manager.host, gpu=1, lease_s=LEASE_S),
    )
    manager.wait_for(lambda: manager.metric("outfitter_grants_total") == 2)
    with (manager.folder / "bus.lock").open() as lock:  # so that it has no lock of the bus while it sleeps
        fcntl.flock(lock, fcntl.LOCK_EX)
        freeze(manager.pid)
    threading.Event().wait(1.5 * LEASE_S)
    publish(manager, {"type": "heartbeat", "host": manager.host, "worker": "alive", "incarnation": "1"})
    woken = datetime.now(UTC)
    manager.signal(signal.SIGCONT)
    assert manager.wait_for_state("silent", "ended")["reason_code"] == "lease-expired"
    alive = manager.wait_for_state("alive", "ended")
    assert alive["reason_code"] == "lease-expired"
    assert datetime.fromisoformat(alive["since"]) >= woken + timedelta(seconds=LEASE_S)
    manager.wait_for(lambda: manager.metric("outfitter_lease_expiries_total") == 2)

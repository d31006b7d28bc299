"""A session asks once more after the grant, and learns whether the manager watches its owner."""

from __future__ import annotations

import subprocess

from msgspec import UNSET

from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import connect
from outfitter_proto.records import Allocation, Owner, Register
from outfitter_service.cli._lib.holding.leasing import CONFIRMATIONS
from support.managers.process import Manager
from support.processes.owners import owner_of, process

__all__ = ["process"]


async def confirmed(manager: Manager, owner: Owner) -> tuple[Allocation | None, bool]:
    """The record after the confirmations, and whether the ledger says that the manager can watch the owner."""
    registration = Register(host=manager.host, worker="w", incarnation="run-1", owner=owner)
    async with connect(manager.bus_url) as bus, WorkerSession(bus, registration, cluster=manager.cluster) as session:
        await session.wait()
        for _ in range(CONFIRMATIONS):
            record = await session.confirm()
        return record, session.watcher is not None and session.watcher.watches(owner)


async def test_the_record_says_what_only_the_manager_can_know(
    manager: Manager, process: subprocess.Popen[bytes]
) -> None:
    """An owner without a time namespace may be the process with its pid, or an earlier one."""
    owner = owner_of(process.pid, start_ticks=1, time_ns=UNSET)
    record, seems_watched = await confirmed(manager, owner)
    assert record is not None
    assert (record.unwatched, seems_watched) == ("time-namespace", True)


async def test_a_watched_owner_is_confirmed(manager: Manager, process: subprocess.Popen[bytes]) -> None:
    record, seems_watched = await confirmed(manager, owner_of(process.pid))
    assert record is not None
    assert (record.state, record.unwatched, seems_watched) == ("allocated", UNSET, True)

"""What `outfitter run` says on standard error while it waits."""

from __future__ import annotations

import anyio
import pytest

from outfitter.session.lease import Lease
from outfitter.session.watch import AllocationWatch
from outfitter_service.cli._lib.running.run_session import print_progress
from support.api import allocation


async def test_a_grant_that_was_read_late_is_told_once_the_manager_has_confirmed_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = 0.0
    watch = AllocationWatch(Lease(lambda: seconds))
    watch.lease.grant(3.0)
    watch.post(allocation("h", "w", "pending", reason="waits for 1 gpu"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(print_progress, watch)
        await anyio.wait_all_tasks_blocked()
        seconds = 9.0
        watch.post(allocation("h", "w", devices=["GPU-0"]))
        await anyio.wait_all_tasks_blocked()
        watch.lease.confirm(seconds)
        watch.touch()
    assert capsys.readouterr().err.splitlines() == [
        "outfitter: w: pending, gpu=1: waits for 1 gpu", "outfitter: has gpu: 0 after 0s"
    ]  # fmt: skip

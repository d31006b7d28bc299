"""What `outfitter run` says on standard error while it waits."""

from __future__ import annotations

import anyio
import pytest

from outfitter.session.lease import Lease
from outfitter.session.watch import AllocationWatch
from outfitter_service.cli._lib.holding.holder import WaitingReasons
from support.api import allocation


async def test_a_grant_that_was_read_late_is_told_only_once_the_session_counts_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch, granted = AllocationWatch(Lease(lambda: 0.0)), allocation("h", "w", devices=["GPU-0"])
    reasons = WaitingReasons(watch)
    watch.post(allocation("h", "w", "pending", reason="waits for 1 gpu"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reasons.run)
        await anyio.wait_all_tasks_blocked()
        watch.touch()  # nothing new is nothing to say
        await anyio.wait_all_tasks_blocked()
        watch.post(granted)
        await anyio.wait_all_tasks_blocked()
        assert capsys.readouterr().err.splitlines() == ["outfitter: w: pending, gpu=1: waits for 1 gpu"]
        tasks.cancel_scope.cancel()
    reasons.say_granted(granted)
    assert capsys.readouterr().err.splitlines() == ["outfitter: has gpu: 0 after 0s"]


def test_whoever_did_not_wait_is_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    WaitingReasons(AllocationWatch()).say_granted(allocation("h", "w", devices=["GPU-0"]))
    assert capsys.readouterr().err == ""

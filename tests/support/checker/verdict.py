"""What the independent checker says of a bus that a test has used."""

from __future__ import annotations

import json
from typing import NamedTuple

import anyio.to_thread

from outfitter_verify import Report, verify
from support.managers.process import Manager


async def verdict(url: str, cluster: str = "outfitter") -> Report:
    """The checker's report on all that is committed on `url` now."""
    return await anyio.to_thread.run_sync(lambda: verify(url, cluster))


class ReplayResult(NamedTuple):
    """What a replay of history has other than the ledger, why it is no whole replay, and how many records it has."""

    differences: list[str]
    partial: tuple[str, ...]
    records: int


async def replay_result(url: str, cluster: str = "outfitter") -> ReplayResult:
    """The checker's comparison of history with the ledger."""
    report = await verdict(url, cluster)
    [check] = [check for check in report.checks if check.name == "replay"]
    differences = [violation.what for violation in report.violations if violation.check == "replay"]
    return ReplayResult(differences, check.partial, check.looked_at)


def verified_with_replay(manager: Manager) -> None:
    """`outfitter verify` finds no fault, and a replay of the whole of history has given the ledger."""
    done = manager.outfitter("verify", "--json")
    assert done.returncode == 0, done.stdout
    [check] = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "replay"]
    assert check["partial"] == []
    assert check["looked_at"] > 0

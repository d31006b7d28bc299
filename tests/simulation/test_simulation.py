"""A few seeds of the simulation, and the planted bugs that are found soonest: `make simulate` runs many, and all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.bugs import BUGS, hunt
from simulation.run import run

pytestmark = pytest.mark.slow

SEEDS = range(20)
QUICKLY_FOUND = (
    "fence-after-restore",
    "checkpoint-apart",
    "token-restarted",
    "zombie-goes-on",
    "uncommitted-ledger",
    "grants-before-releases",
    "commands-not-issued-again",
    "foreign-instance-fenced-back",
    "lent-without-taking-back",
    "survivors-searched-once",
    "grant-judged-by-old-heartbeats",
    "no-grace",
    "outage-blamed",
    "offers-kept",
    "offers-forgotten",
    "names-apart",
    "ahead-for-good",
    "another-request",
    "released-as-configured",
    "lost-input-from-the-end",
    "any-input",
    "orders-forgotten-by-a-restart",
    "lifted-by-anothers-end",
    "ordered-under-one-name",
    "read-and-never-taken",
    "illness-forgotten-by-a-restart",
    "lent-at-the-first-good-report",
    "clauses-forgotten-by-a-restart",
    "whole-beside-its-part",
    "part-beside-the-whole-after-a-restart",
    "part-counted-twice",
    "parts-forgotten",
)
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("first", SEEDS[::4])
def test_whatever_is_done_to_managers_and_their_bus_the_promises_are_kept(first: int) -> None:
    for seed in range(first, first + 4):
        outcome = run(seed)
        assert outcome.violations == [], f"make simulate SEED={seed} shows what happened"
        assert outcome.counts["grants"] > 0


@pytest.mark.timeout(600)  # dozens of seeds, on a machine that may be busy
@pytest.mark.parametrize("name", QUICKLY_FOUND)
def test_a_planted_bug_is_found_within_the_stated_number_of_seeds(name: str) -> None:
    (bug,) = [bug for bug in BUGS if bug.name == name]
    assert hunt(bug).seeds is not None


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Replaying a seed shows what happened: nothing hangs on addresses, hashes, clocks or other dice."""
    digests = set()
    for hashes, traced in (("1", False), ("2", False), ("1", True)):
        program = f"print([run(seed, traced={traced}).digest for seed in (5, 7017, 9033)])"
        done = subprocess.run(  # threads that other tests have left in this one throw the same dice
            [sys.executable, "-c", f"from simulation.run import run; {program}"],
            env={**os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": hashes},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        digests.add(done.stdout.strip())
    assert len(digests) == 1

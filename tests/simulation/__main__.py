"""Run many seeds, or one of them again: `make simulate`, `make simulate SEED=…`.

    PYTHONPATH=tests python -m simulation [--seeds N] [--first N] [--processes N]
    PYTHONPATH=tests python -m simulation --seed N [--bug NAME] [--last N]

The first looks for violations of the promises in seeds that nobody has run before (unless `--first` says which), and
then for each planted bug; a violation, or a bug that is not found, is exit code 1. The second shows one run.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from simulation.bugs import BUGS, Bug, Hunt, hunt
from simulation.run import Outcome, run

SHOWN = 60
"""Lines of a failing run that are shown, and its first violations."""
TOLD = ("commits", "grants", "registrations", "runs", "gave up", "timed out", "lost", "late")


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--first", type=int, help="the first seed (default: by the time of day)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=cores, help="how many at the same time (default: a core each)")
    parser.add_argument("--seed", type=int, help="run this seed alone and show what happened")
    parser.add_argument("--bug", choices=[bug.name for bug in BUGS], help="with a planted bug")
    parser.add_argument("--last", type=int, default=400, help="how many lines of it to show")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        return show(chosen.seed, _named(chosen.bug), chosen.last)
    first = chosen.first if chosen.first is not None else int(time.time()) * 1000
    return search(range(first, first + chosen.seeds), chosen.processes)


def show(seed: int, bug: Bug | None, last: int) -> int:
    """Run one seed with everything written down."""
    outcome = _run(seed, bug, traced=True)
    print("\n".join(outcome.log[-last:]))
    about = ", ".join(f"{outcome.counts.get(name, 0)} {name}" for name in TOLD)
    print(f"\nseed {seed}: {outcome.steps:,} steps in {outcome.seconds:.0f} s, {outcome.faults} faults, {about}")
    print("\n".join(outcome.violations) or "no violations")
    return 1 if outcome.violations else 0


def search(seeds: range, processes: int) -> int:
    """Run all seeds, then look for all planted bugs; say what came of it."""
    begun = time.monotonic()
    counts: Counter[str] = Counter()
    bad: list[int] = []
    steps = 0
    virtual = 0.0
    print(f"seeds {seeds[0]} to {seeds[-1]}, {processes} at a time", flush=True)
    with ProcessPoolExecutor(processes) as pool:
        parts = [pool.submit(_run_all, seeds[start : start + 20]) for start in range(0, len(seeds), 20)]
        for done, part in enumerate(as_completed(parts), start=1):
            for outcome in part.result():
                steps += outcome.steps
                virtual += outcome.seconds
                counts.update(outcome.counts)
                counts["faults"] += outcome.faults
                if outcome.violations:
                    bad.append(outcome.seed)
                    print(f"seed {outcome.seed}: {outcome.violations[0]}", flush=True)
            if done % 10 == 0:
                print(f"  {min(done * 20, len(seeds))} seeds, {time.monotonic() - begun:.0f} s", flush=True)
        took = time.monotonic() - begun
        hunts = list(pool.map(_hunt, [bug.name for bug in BUGS]))
    about = ", ".join(f"{counts[name]:,} {name}" for name in ("faults", *TOLD))
    print(f"\n{len(seeds):,} seeds, {steps:,} steps, {virtual / 3600:.1f} hours in {took:.0f} s; {about}")
    print(f"violations in {len(bad)} seeds\n")
    print(bug_table(hunts))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{time.monotonic() - begun:.0f} s in all, {used.ru_utime + used.ru_stime:.0f} s of processor time")
    for seed in bad[:3]:
        outcome = run(seed, traced=True)
        print(f"\n--- seed {seed}, its last {SHOWN} lines; all of them: make simulate SEED={seed}\n")
        print("\n".join([*outcome.log[-SHOWN:], *outcome.violations[:SHOWN]]))
    return 1 if bad or any(found.seeds is None for found in hunts) else 0


def bug_table(hunts: Iterable[Hunt]) -> str:
    """The planted bugs, a line each: after how many seeds each was found, and by which check."""
    within = {bug.name: bug.within for bug in BUGS}
    lines = [f"{'planted bug':34} {'seeds':>6} {'at most':>8}  found by"]
    for found in hunts:
        by = found.outcome.violations[0][:90] if found.outcome is not None else "NOT FOUND"
        lines.append(f"{found.bug:34} {found.seeds or '-':>6} {within[found.bug]:>8}  {by}")
    return "\n".join(lines)


def _run_all(seeds: range) -> list[Outcome]:
    return [run(seed) for seed in seeds]


def _run(seed: int, bug: Bug | None, *, traced: bool) -> Outcome:
    if bug is None:
        return run(seed, traced=traced)
    with bug.patches():
        return run(seed, make_bus=bug.bus, traced=traced)


def _hunt(name: str) -> Hunt:
    return next(hunt(bug) for bug in BUGS if bug.name == name)


def _named(name: str | None) -> Bug | None:
    return next((bug for bug in BUGS if bug.name == name), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`make fuzz`: every target for a bounded time, guided by coverage (atheris), from the corpus on.

Each target runs in a process of its own: a crash in C code is a finding, too. What finds something is written to
`fuzz-findings/<target>-…`; put it into `tests/fuzz/corpus/<target>/` with the mend, and `make test` replays it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
FINDINGS = Path("fuzz-findings")
LONGEST_INPUT = 4096
LONGEST_S = 20
"""Seconds that one input may take."""
MEMORY_MB = 2048
_STATISTICS = ("stat::number_of_executed_units", "stat::slowest_unit_time_sec")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="all by default")
    parser.add_argument("--seconds", type=int, default=30, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="0: another one with each run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given, rest = parser.parse_known_args()
    if given.one:
        return _run(given.one, [*given.targets, *rest])
    from fuzz.targets import TARGETS

    unknown = set(given.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    FINDINGS.mkdir(exist_ok=True)
    failed = [name for name in given.targets or TARGETS if not _fuzz(name, given.seconds, given.seed)]
    sys.stdout.write(f"found something: {', '.join(failed)}; see {FINDINGS}/\n" if failed else "nothing was found\n")
    return 1 if failed else 0


def _fuzz(name: str, seconds: int, seed: int) -> bool:
    """Whether the target held."""
    sys.stdout.write(f"{name}: {seconds} s\n")
    sys.stdout.flush()
    seeds = CORPUS / name
    with tempfile.TemporaryDirectory() as found:  # what is new of interest is not kept: the corpus stays small
        command = [
            sys.executable, "-m", "fuzz", "--one", name, found, *([str(seeds)] if seeds.is_dir() else []),
            f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={LONGEST_INPUT}", f"-timeout={LONGEST_S}",
            f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={FINDINGS}/{name}-", "-verbosity=0",
            "-print_final_stats=1",
        ]  # fmt: skip
        done = subprocess.run(command, timeout=seconds + 120, stderr=subprocess.PIPE, text=True, errors="replace")
    said = [
        line for line in done.stderr.splitlines() if not line.startswith(("INFO: Instr", "WARNING: Failed to find"))
    ]
    shown = said if done.returncode else [line for line in said if line.startswith(_STATISTICS)]
    sys.stdout.write("".join(f"  {line.removeprefix('stat::')}\n" for line in shown))
    return done.returncode == 0


def _run(name: str, arguments: list[str]) -> int:
    import atheris

    ours = ["outfitter_proto", "outfitter_drivers", "outfitter_service", "outfitter_verify"]
    with atheris.instrument_imports(include=ours):
        from fuzz.targets import TARGETS
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())

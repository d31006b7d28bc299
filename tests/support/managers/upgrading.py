"""A running fleet whose managers are exchanged for those of another version, under load.

Only tests of the kind `upgrade` import this: the last release is one of their tools.
"""

from __future__ import annotations

import subprocess
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from support.managers.process import Manager, environment
from support.polling import until
from tools import tool

EARLIER = (str(tool("earlier") / "venv" / "bin" / "python"), "-m", "outfitter_service.cli")
"""The command line of the last release."""
RUNS = 3
"""Commands of each worker on each host that end as they must, between two steps."""
WITHIN_S = 120.0

CLAIM = """
whole=${CUDA_VISIBLE_DEVICES#???-}
exec 8>>"$LOCKS/$OUTFITTER_HOST-${whole%%-*}"
case $CUDA_VISIBLE_DEVICES in
MIG-*) flock --nonblock --shared 8 && exec 9>>"$LOCKS/$OUTFITTER_HOST-$CUDA_VISIBLE_DEVICES" && flock --nonblock 9 ;;
*) flock --nonblock 8 ;;
esac || { echo "$OUTFITTER_HOST $CUDA_VISIBLE_DEVICES" >>"$LOCKS/twice"; exit 3; }
case "${FITS-$CUDA_VISIBLE_DEVICES}" in
*"$CUDA_VISIBLE_DEVICES"*) ;;
*) echo "$OUTFITTER_HOST $CUDA_VISIBLE_DEVICES is none of $FITS" >>"$LOCKS/unfit"; exit 4 ;;
esac
echo "$OUTFITTER_HOST $CUDA_VISIBLE_DEVICES" >>"$LOCKS/lent"
"""
"""Holds a lock of the device while it lives: whoever is lent the same device meanwhile notes that. A part of a GPU has
the GPU's lock with other parts: `MIG-<GPU>-…` is a part of `GPU-<GPU>-…`. `FITS`, if it is set, names the devices that
the worker takes."""


class Work(NamedTuple):
    """What one of the workers on a host does again and again: `program` runs a command with a device."""

    host: str
    name: str
    program: tuple[str, ...]
    asks: tuple[str, ...] = ("--resource", "gpu=1")
    fits: str | None = None
    """The devices that it takes. None: all."""


class Load:
    """Workers on each host, one after the other. `well`, `refused`: how many ended so, by host and name. `refusal`: how
    a worker is refused that may be."""

    def __init__(self, folder: Path, variables: Mapping[str, str], works: Sequence[Work], refusal: str = "") -> None:
        self.well: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        self.locks = folder / "locks"
        self.locks.mkdir()
        self.works = {(work.host, work.name): work for work in works}
        self._variables = variables
        self._refusal = refusal
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]

    def command(self, work: Work, worker: str, then: str, *options: str) -> list[str]:
        """The command line of a worker that claims its device and goes on with a shell's `then`."""
        wanted = [*work.asks, "--worker", worker, *options]
        return [*work.program, "run", *wanted, "--", "sh", "-c", f"{CLAIM}{then}"]

    def environment(self, work: Work) -> dict[str, str]:
        more = {} if work.fits is None else {"FITS": work.fits}
        return environment(OUTFITTER_HOST=work.host, LOCKS=str(self.locks), **self._variables, **more)

    def _repeat(self, work: Work) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            done = subprocess.run(
                self.command(work, f"{work.name}-{number}", "sleep 0.3", "--wait", "60s"),
                env=self.environment(work), capture_output=True, text=True, timeout=WITHIN_S,
            )  # fmt: skip
            if done.returncode == 0:
                self.well[work.host, work.name] += 1
            elif self._refusal and self._refusal in done.stderr:
                self.refused[work.host, work.name] += 1
            elif "no manager answers" not in done.stderr:  # while it is exchanged
                self.wrong.append(f"{work.host} {work.name}: {done.returncode} {done.stderr}")

    def goes_on(self, refused: Collection[tuple[str, str]] = ()) -> None:
        """Block until each worker has had its device some times more, or was `refused` so often."""
        ends = {key: self.refused if key in refused else self.well for key in self.works}
        before = {key: ends[key][key] for key in ends}
        until(
            lambda: self.wrong or all(ends[key][key] >= before[key] + RUNS for key in ends),
            lambda: f"{before} -> {self.well}, {self.refused}",
            within_s=WITHIN_S,
        )
        self.check()

    def check(self) -> None:
        """No device was lent twice, none to a worker that does not take it, and no worker failed."""
        assert not self.wrong, self.wrong
        for name in ("twice", "unfit"):
            file = self.locks / name
            assert not file.exists(), f"{name}: {file.read_text()}"

    def lent(self, host: str, device: str) -> int:
        """How often a device was lent."""
        return (self.locks / "lent").read_text().splitlines().count(f"{host} {device}")

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in self._threads:
                thread.join()


class Fleet:
    """Managers by host, which are exchanged for those of another program."""

    def __init__(self, managers: Mapping[str, Manager]) -> None:
        self.managers = dict(managers)

    def started(self) -> None:
        for manager in self.managers.values():
            manager.start()

    def exchange(self, host: str, program: Sequence[str]) -> str:
        """Have another program serve a host; give what it logged at its start."""
        manager, begun = self._stopped(host, program)
        manager.start()
        return manager.log.read_bytes()[begun:].decode()

    def refused(self, host: str, program: Sequence[str]) -> str:
        """Have another program try to serve a host that it must refuse; give what it said."""
        manager, begun = self._stopped(host, program)
        manager.start(ready=False)
        assert manager.wait(WITHIN_S) != 0
        return manager.log.read_bytes()[begun:].decode()

    def _stopped(self, host: str, program: Sequence[str]) -> tuple[Manager, int]:
        manager = self.managers[host]
        assert manager.stop() == 0, manager.log_tail()
        manager.change_program(program)
        return manager, manager.log.stat().st_size

    @contextmanager
    def ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for manager in self.managers.values():
                manager.kill9()
                print(f"--- {manager.log}\n{manager.log_tail()}")

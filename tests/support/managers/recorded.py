"""Managers of this version on the recorded buses of earlier versions."""

from __future__ import annotations

import fcntl
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.managers.process import Manager, files_config

Make = Callable[..., Manager]


def unpacked(recording: Path, folder: Path) -> Path:
    """The bus of a recorded file, in `folder`."""
    bus = folder / "bus" / "bus.db"
    bus.parent.mkdir(mode=0o700)
    bus.write_bytes(gzip.decompress(recording.read_bytes()))
    return bus


@contextmanager
def in_turn(recording: Path) -> Iterator[None]:
    """One test at a time in all processes: recorded hosts have their names, and a machine has one manager of each."""
    with recording.open("rb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


@contextmanager
def managers(folder: Path) -> Iterator[Make]:
    """Makes managers whose files are in `folder`: `make(host, bus, gpus)`, or `make(host, bus, config=…, …)`."""
    made: list[Manager] = []

    def make(host: str, bus: Path, gpus: int = 0, *, config: str = "", **options: Any) -> Manager:
        own = folder / f"{host}-{len(made)}"
        text = config or files_config(own / "gpus", gpus=gpus)
        made.append(Manager(own, text, host=host, bus=f"sqlite://{bus}", **options))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.kill9()
            print(f"--- {each.log}\n{each.log_tail()}")

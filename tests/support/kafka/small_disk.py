"""A disk that can be full: a small tmpfs in a mount namespace of its own. Needs no rights, leaves nothing behind.

with SmallDisk(folder, megabytes=96) as disk:
    broker = Broker(folder.parent, within=disk.within)    # keeps its data in `folder`
    disk.fill()
    disk.free()
"""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path
from typing import Self

_HOLD = 'mount -t tmpfs -o "size=$1" none "$0" && echo mounted && read -r _'


class SmallDisk:
    """Mounted at `folder` for the processes that are started by `within`, and for nobody else; gone with the block."""

    def __init__(self, folder: Path, *, megabytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _HOLD, str(folder), f"{megabytes}m"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "mounted\n":
            raise RuntimeError("this machine lets nobody mount a tmpfs in a user namespace of his own")
        return self

    def __exit__(self, *exc: object) -> None:
        self._holder.communicate("over\n", timeout=10)

    @property
    def within(self) -> tuple[str, ...]:
        """What to put before a command that is to see the disk."""
        pid = str(self._holder.pid)
        return "nsenter", "--target", pid, "--user", "--mount", "--preserve-credentials", "--"

    def fill(self) -> None:
        """Leave not a byte free."""
        try:
            with self._filler.open("wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(1 << 16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink()

    @property
    def _filler(self) -> Path:
        return Path(f"/proc/{self._holder.pid}/root{self._folder}/filler")

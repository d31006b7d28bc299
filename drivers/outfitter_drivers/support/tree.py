"""Reads small files of sysfs, procfs and /etc below a root, so that a test or a container's mount can stand for `/`.

Links are followed below the root: an absolute target begins there. Whatever cannot be read is an OSError of that one
path. Nothing here reads more than a bound, and only regular files: a device or a FIFO could block.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath

MAX_BYTES = 64 * 1024
_MOST_LINKS = 40  # as Linux: path_resolution(7)
_MOST_ENTRIES = 10_000


class Tree:
    """The files below `root`. Paths are given from there, such as `sys/module/nvidia/version`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, path: str, *, limit: int = MAX_BYTES) -> str:
        """A file's text.

        Raises:
            OSError: it cannot be read, is no regular file, or has more than `limit` bytes.
        """
        with open(self._opened(path), "rb") as file:  # noqa: PTH123  a descriptor
            content = file.read(limit + 1)
        if len(content) > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), f"/{path}")
        return content.decode("utf-8", "replace")

    def line(self, path: str) -> str | None:
        """A file's first line without blanks around it; None if the file cannot be read, or the line is empty."""
        try:
            return self.text(path).partition("\n")[0].strip() or None
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted. Raises OSError."""
        with os.scandir(self.real(path)) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False))

    def target(self, path: str) -> str | None:
        """The last name of a link's target, such as a device's driver; None if it is no link."""
        try:
            parent, name = os.path.split(path)
            return PurePosixPath((self.real(parent) / name).readlink()).name
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        try:
            self.real(path).stat()
        except OSError:
            return False
        return True

    def real(self, path: str) -> Path:
        """The path without links.

        Raises:
            OSError: a link leads out of the root, or there are too many.
        """
        done: list[str] = []
        rest = [part for part in path.split("/") if part not in ("", ".")][::-1]
        links = 0
        while rest:
            part = rest.pop()
            if part == "..":
                if not done:
                    raise OSError(errno.EXDEV, "a link leads out of the root", f"/{path}")
                done.pop()
                continue
            here = self.root.joinpath(*done, part)
            if not here.is_symlink():
                done.append(part)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), f"/{path}")
            target = os.readlink(here)  # noqa: PTH115  the text, not a path
            if target.startswith("/"):
                done = []
            rest += [each for each in target.split("/") if each not in ("", ".")][::-1]
        return self.root.joinpath(*done)

    def _opened(self, path: str) -> int:
        descriptor = os.open(self.real(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "no regular file", f"/{path}")
        return descriptor

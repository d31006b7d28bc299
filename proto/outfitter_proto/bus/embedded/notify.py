"""How a reader hears of a commit: a datagram socket each, in `bus.wake/`, poked after COMMIT has returned.

A poke says nothing but "look": it may be lost, doubled or late, and readers look once a second anyway. Watching the
file instead would be wrong: with synchronous=FULL the write is seen before the fsync, the commit only after it.

A socket is named `<topic>-<partition>-<process>-<random>`, so writers poke only who waits for their partition. Sockets
are reached through `/proc/self/fd/<directory>/`, as the path of one may have 107 bytes only (unix(7)). Those of dead
readers refuse the poke and are removed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio

from outfitter_proto.bus.embedded import location
from outfitter_proto.bus.port import BusConfigurationError

LOOK_ANYWAY_S: Final = 1.0
"""How often a reader that nobody pokes looks itself."""


class Notifier:
    """The directory of the readers' sockets."""

    def __init__(self, place: location.Location) -> None:
        self._descriptor = _open_directory(place)
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell.setblocking(False)

    def listen(self, topic: int, partition: int) -> Listener:
        """A new ear for pokes about one partition."""
        return Listener(self._descriptor, f"{topic}-{partition}-{os.getpid()}-{os.urandom(4).hex()}")

    def ring(self, partitions: Iterable[tuple[int, int]]) -> None:
        """Poke whoever waits for one of `partitions` (topic, partition). Never blocks, never raises."""
        prefixes = tuple(f"{topic}-{partition}-" for topic, partition in partitions)
        with suppress(OSError):  # no directory, no sockets: readers look by themselves
            for name in os.listdir(self._descriptor):  # noqa: PTH208 - pathlib cannot list a descriptor
                if name.startswith(prefixes):
                    self._poke(name)

    def close(self) -> None:
        self._bell.close()
        os.close(self._descriptor)

    def _poke(self, name: str) -> None:
        try:
            self._bell.sendto(b"", _address(self._descriptor, name))
        except ConnectionRefusedError:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._descriptor)  # its reader was killed
        except OSError:
            pass  # full: it has pokes to come; gone or not ours to poke: it looks by itself


class Listener:
    """One reader's socket."""

    def __init__(self, directory: int, name: str) -> None:
        self._directory = os.dup(directory)
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind(_address(directory, name))
            os.chmod(name, location.FILE_MODE, dir_fd=directory)  # poking takes the right to write
        except OSError as error:
            self.close()
            raise BusConfigurationError(
                f"a reader's socket cannot be made in the bus's .wake directory: {error}"
            ) from error

    def drain(self) -> None:
        """Forget the pokes so far. Call it before looking, never between looking and waiting."""
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1)

    async def wait(self) -> None:
        """Until poked; at once if poked since `drain`."""
        await anyio.wait_readable(self._socket)

    def close(self) -> None:
        if self._directory < 0:
            return
        with suppress(OSError):
            os.unlink(self._name, dir_fd=self._directory)
        self._socket.close()
        os.close(self._directory)
        self._directory = -1


def _address(directory: int, name: str) -> str:
    return f"/proc/self/fd/{directory}/{name}"


def _open_directory(place: location.Location) -> int:
    path: Path = place.wake
    try:
        with suppress(FileExistsError):
            location.make_directory(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        location.raise_for(error, f"{path} cannot be used", path)
    found = os.fstat(descriptor)
    try:
        place.check_rights(path, found)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

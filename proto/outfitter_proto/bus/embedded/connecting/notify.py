"""Wakes readers after a commit: each has a datagram socket in `bus.wake/`, to which a writer sends after COMMIT.

A wake-up has no content. It may be lost, doubled or late, and readers also poll once a second. Watching the file would
be wrong: with synchronous=FULL others see its write before the fsync, but the commit only after it.

A socket is named `<topic>-<partition>-<process>-<random>`, so that writers wake only readers of their partition. Its
path is `/proc/self/fd/<directory>/…`, because unix(7) allows only 107 bytes. Sockets of dead readers refuse the
wake-up, and the writer removes them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio

from outfitter_proto.bus.embedded.connecting.location import FILE_MODE, Location, make_directory, raise_for
from outfitter_proto.bus.port import BusConfigurationError

POLL_INTERVAL_S: Final = 1.0
"""Seconds between two polls of a reader that nobody wakes."""


class Notifier:
    """The directory of the readers' sockets."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._descriptor = _open_directory(location)
        try:
            self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError as error:
            os.close(self._descriptor)
            raise_for(error, f"{location.wake} cannot be used", location.wake)
        self._sender.setblocking(False)

    def listen(self, topic: int, partition: int) -> Listener:
        """A new listener for the wake-ups of one partition.

        Raises:
            BusUnavailableError: no file descriptor is left.
            BusConfigurationError: its socket cannot be created in the directory.
        """
        return Listener(self._location, self._descriptor, f"{topic}-{partition}-{os.getpid()}-{os.urandom(4).hex()}")

    def notify(self, partitions: Iterable[tuple[int, int]]) -> None:
        """Wake the readers of `partitions` (topic, partition). Never blocks, never raises."""
        prefixes = tuple(f"{topic}-{partition}-" for topic, partition in partitions)
        with suppress(OSError):  # without the directory readers poll
            for name in os.listdir(self._descriptor):  # noqa: PTH208 - pathlib cannot list a descriptor
                if name.startswith(prefixes):
                    self._wake_up(name)

    def close(self) -> None:
        self._sender.close()
        os.close(self._descriptor)

    def _wake_up(self, name: str) -> None:
        try:
            self._sender.sendto(b"", _address(self._descriptor, name))
        except ConnectionRefusedError:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._descriptor)  # its reader was killed
        except OSError:
            pass  # full: it has wake-ups already; gone, or not permitted: the reader polls


class Listener:
    """One reader's socket."""

    def __init__(self, location: Location, directory: int, name: str) -> None:
        self._name = name
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError as error:
            raise_for(error, f"{location.wake} cannot be used", location.wake)
        try:
            self._directory = os.dup(directory)
        except OSError as error:
            self._socket.close()
            raise_for(error, f"{location.wake} cannot be used", location.wake)
        self._socket.setblocking(False)
        try:
            self._socket.bind(_address(directory, name))
            os.chmod(name, FILE_MODE, dir_fd=directory)  # waking needs the right to write
        except OSError as error:
            self.close()
            raise BusConfigurationError(
                f"a reader's socket cannot be created in the bus's .wake directory: {error}"
            ) from error

    def drain(self) -> None:
        """Drop the wake-ups so far. Call it before reading, never between reading and waiting."""
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1)

    async def wait(self) -> None:
        """Wait for a wake-up; return at once if one came since `drain`."""
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


def _open_directory(location: Location) -> int:
    path: Path = location.wake
    try:
        with suppress(FileExistsError):
            make_directory(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise_for(error, f"{path} cannot be used", path)
    try:
        location.check_rights(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

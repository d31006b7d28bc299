"""The `files` driver: each file in a folder is a device, described by its `key=value` lines.

For demonstrations, fault tests, and agents that discover devices. Removing a file removes the device. A device is
unhealthy while its file has `health=unhealthy` or an invalid line. The driver ignores hidden files, folders, blank
lines and lines that start with `#`. Write a file elsewhere and rename it into the folder, so that the driver never
reads half of it.

Settings: `path` (the folder; relative to the configuration's) and `poll-interval` (default 0.5 s).
"""

from __future__ import annotations

import stat
from pathlib import Path

from outfitter_drivers import settings
from outfitter_drivers.api import Device, DriverParams, ExternalResourceDriverFactory, TemporaryDriverError
from outfitter_drivers.polling import PollingDriver
from outfitter_drivers.support.description import described_device, natural_order
from outfitter_proto.records import Health
from outfitter_proto.support.one_thread import OneThread

MAX_FILE_BYTES = 64 * 1024
"""A description is a few lines. A larger file is in the folder by mistake."""

DEFAULT_POLL_INTERVAL = 0.5
"""Seconds between two polls of the folder, which are cheap."""


class FilesDriver(PollingDriver):
    """Polls a folder."""

    def __init__(self, folder: Path, *, poll_interval: float = DEFAULT_POLL_INTERVAL) -> None:
        super().__init__(poll_interval=poll_interval)
        self._folder = folder
        # By file name, so that a device keeps its id while its file cannot be read.
        self._last_ids: dict[str, str] = {}
        self._one_thread = OneThread()

    def shortage(self, amount: int, *, healthy: int, known: int) -> str:
        return f"{amount} wanted, but {self._folder} has {healthy} healthy ones among {known} files"

    async def look(self) -> list[Device]:
        # A thread, because the folder's file system may be slow or hang.
        try:
            return await self._one_thread.run(self._read_folder, within_s=self.call_timeout)
        except TimeoutError as error:
            raise TemporaryDriverError(
                f"the file system of {self._folder} {error}; its current devices are unknown"
            ) from error

    def _read_folder(self) -> list[Device]:
        try:
            names = [entry.name for entry in self._folder.iterdir() if entry.name[0] != "." and not entry.is_dir()]
        except OSError as error:
            raise TemporaryDriverError(f"cannot read the folder {self._folder}: {error.strerror}") from error
        devices: list[Device] = []
        files_by_id: dict[str, str] = {}
        for index, name in enumerate(natural_order(names)):
            device = self._read_device(name, index)
            if device.id in files_by_id:
                device = self._unhealthy(
                    name, index, f"has the same id as {files_by_id[device.id]}: {device.id}", own_id=True
                )
            elif device.id is not None:
                files_by_id[device.id] = name
                self._last_ids[name] = device.id
            devices.append(device)
        return devices

    def _read_device(self, name: str, index: int) -> Device:
        path = self._folder / name
        try:
            description = read_description(path)
            return described_device(description, name=_text(name), index=index, default_id=f"file:{_text(path)}")
        except OSError as error:
            return self._unhealthy(name, index, f"cannot read {_text(path)}: {error.strerror}")
        except ValueError as problem:
            return self._unhealthy(name, index, f"{_text(path)}: {problem}")

    def _unhealthy(self, name: str, index: int, reason: str, *, own_id: bool = False) -> Device:
        default_id = f"file:{_text(self._folder / name)}"
        return Device(
            properties={"index": str(index), "name": _text(name)},
            id=default_id if own_id else self._last_ids.get(name, default_id),
            health=Health.UNHEALTHY,
            reason=reason,
        )


class FilesDriverFactory(ExternalResourceDriverFactory):
    """Builds the driver from `path` and `poll-interval`."""

    def create_external_resource_driver(self, config: DriverParams) -> FilesDriver:
        settings.reject_unknown(config, ("path", "poll-interval"))
        path = config.get("path", "").strip()
        if not path:
            raise settings.SettingError("path", "is missing; valid is the folder whose files are the devices")
        folder = (config.directory or Path()) / Path(path).expanduser()
        interval = settings.seconds(config, "poll-interval", default=DEFAULT_POLL_INTERVAL, maximum=3600)
        if not folder.is_dir():
            config.warn(f"path is {path!r}, and this folder does not exist now: {folder.absolute()}")
        return FilesDriver(folder.absolute(), poll_interval=interval)


def read_description(path: Path) -> dict[str, str]:
    """The `key=value` lines of a file, keys and values trimmed.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not regular, too large, not UTF-8, or has an invalid line.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        # Opening a FIFO would wait for a writer.
        raise ValueError("is not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"has more than {MAX_FILE_BYTES} bytes")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from None
    description: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, equals, value = stripped.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"line {number} is {stripped[:80]!r}; valid is key=value")
        if key in description:
            raise ValueError(f"line {number} sets {key} a second time")
        description[key] = value.strip()
    return description


def _text(name: str | Path) -> str:
    """A file name for the wire, with bytes that are not UTF-8 escaped."""
    return str(name).encode("utf-8", "backslashreplace").decode("utf-8")

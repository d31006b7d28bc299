"""The file of a backup: lines of JSON, packed by gzip.

| line | what |
|---|---|
| the first | `Header` |
| the next ones | `SavedRecord`: each record of the ledger, by partition and offset, deletions included |
| | `SavedRegistration`: each message of a worker that is not answered yet, by partition and offset |
| the last | `ArchiveEnd`: their number, and the SHA-256 of all lines before it |

Version 0.2 writes files of version 1, which have no registrations.

A file that was cut off has no last line, and one that was changed has another checksum. Both functions need memory for
one line only.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

VERSION = 2
"""The newest `Header.version` that this version can read."""
LONGEST_LINE = 64 * 1024 * 1024
"""Bytes. A record of the ledger has about a mebibyte at most."""


class BackupError(RuntimeError):
    """A backup cannot be written, read or restored. The message says what to do."""


class Header(Struct, frozen=True, kw_only=True, tag_field="type", tag="outfitter-backup"):
    """What a file has."""

    version: int = VERSION
    """The file's version."""
    at: datetime
    """When reading began; later commits may be missing."""
    cluster: str
    partitions: int
    """How many the cluster's topics have."""
    ledger_id: str
    """The id of the topic that was read."""
    outfitter: str
    """The version that wrote it."""


class SavedRecord(Struct, frozen=True, kw_only=True, tag_field="type", tag="record", omit_defaults=True, gc=False):
    """A record as it was on the bus: its place, when it was written, its bytes. `value` left out: a deletion."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes | None = None


class SavedRegistration(SavedRecord, frozen=True, kw_only=True, tag="registration"):
    """A message of a worker as it was on the bus."""


class ArchiveEnd(Struct, frozen=True, kw_only=True, tag_field="type", tag="end"):
    """The last line. `records`: how many there are. `sha256`: of all lines before this one, in hexadecimal."""

    records: int
    sha256: str


_DECODER = msgspec.json.Decoder(SavedRecord | SavedRegistration | ArchiveEnd)
_HEADER = msgspec.json.Decoder(Header)
_ENCODER = msgspec.json.Encoder()


class ArchiveWriter:
    """Writes one file. `end` is its last line."""

    def __init__(self, stream: gzip.GzipFile, header: Header) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._records = 0
        self._write(header)

    def add(self, record: SavedRecord) -> None:
        self._records += 1
        self._write(record)

    def end(self) -> ArchiveEnd:
        """Write the last line."""
        end = ArchiveEnd(records=self._records, sha256=self._digest.hexdigest())
        self._write(end)
        return end

    def _write(self, line: Struct) -> None:
        text = _ENCODER.encode(line) + b"\n"
        self._digest.update(text)
        self._stream.write(text)


@contextmanager
def writing(path: Path, header: Header) -> Iterator[ArchiveWriter]:
    """Write a file that only its owner may read. It appears under its name once it is complete and on the disk.

    Raises:
        BackupError: there is a file or directory of that name.
        OSError: it cannot be written.
    """
    if path.is_dir():
        raise BackupError(f"{path} is a directory: name a file in it")
    if os.path.lexists(path):
        raise BackupError(f"{path} exists already: name another file")
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # with mode 0600
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # name the file that was asked for
    try:
        with os.fdopen(descriptor, "wb") as file:
            with gzip.GzipFile(filename="", mode="wb", fileobj=file) as stream:
                yield ArchiveWriter(stream, header)
            file.flush()
            os.fsync(file.fileno())
        os.rename(name, path)  # noqa: PTH104 - a path would hide the order of arguments
    except BaseException:
        with suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def reading(path: Path) -> Iterator[tuple[Header, Iterator[SavedRecord]]]:
    """The header of a file, and its records. They count only once all of them are read: the last line says whether the
    file is whole.

    Raises (also while the records are read):
        BackupError: the file is no complete backup, or of a later version.
        OSError: it cannot be read.
    """
    with path.open("rb") as file, gzip.GzipFile(fileobj=file) as stream:
        text = _line(path, stream)
        yield _header(path, text), _records(path, stream, hashlib.sha256(text))


def _records(path: Path, stream: gzip.GzipFile, digest: hashlib._Hash) -> Iterator[SavedRecord]:
    """`digest`: of the header."""
    count = 0
    while True:
        text = _line(path, stream)
        try:
            line = _DECODER.decode(text)
        except msgspec.MsgspecError as error:
            raise BackupError(f"{path} is damaged behind record {count}: {error}") from error
        if isinstance(line, ArchiveEnd):
            if (line.records, line.sha256) != (count, digest.hexdigest()) or _line(path, stream, last=True):
                raise BackupError(f"{path} is damaged: its records are not those that were saved")
            return
        digest.update(text)
        count += 1
        yield line


def _header(path: Path, text: bytes) -> Header:
    try:
        header = _HEADER.decode(text)
    except msgspec.MsgspecError as error:
        raise BackupError(f"{path} is no backup of Outfitter: {error}") from error
    if header.version > VERSION:
        raise BackupError(
            f"{path} has version {header.version}, and this version of Outfitter knows {VERSION}: use the one that "
            f"wrote it ({header.outfitter}), or a newer one"
        )
    return header


def _line(path: Path, stream: gzip.GzipFile, *, last: bool = False) -> bytes:
    """The next line. `last`: there must be none, and the packed stream must be whole."""
    try:
        text = stream.readline(LONGEST_LINE)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BackupError(f"{path} is no complete backup: {error}") from error
    if not last and not text.endswith(b"\n"):
        raise BackupError(f"{path} is no complete backup: it ends too early")
    return text

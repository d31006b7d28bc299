"""Decompresses records with a limit, and compresses managers' batches.

The limit is needed because a topic's limit counts compressed bytes, and 64 kB of these can hold 200 MB of zeros.

gzip uses the standard library. snappy, lz4 and zstd need cramjam, a dependency of managers and monitors. Workers do
not need it: only history, which they do not read, is written with zstd.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_UNPACKED = 2 * 1024 * 1024
"""Limit of one batch's records in bytes. Stock producers fill at most one mebibyte before they compress a batch."""

MOST_TIMES = 512
"""Limit of the compression ratio in workers' batches. Without it, brokers' quotas would limit nothing, because they
count compressed bytes. With zstd, 1,000 registrations that differ only in the worker's number have a ratio of 37, and
243 with 1 KB of equal labels. The other codecs have less: gzip 27 and 98, lz4 14 and 80, snappy 12 and 18. A bomb has
5,000."""

TIMES_OF_GZIP = 2
"""Limit of what workers' messages come to with gzip, as a multiple of their batch's packed size. A manager packs its
answers with gzip, which sees no repetition from more than 32 KiB before, and shortens a long one less than others do.
So what a batch says with few bytes would take many in the ledger. 1,000 registrations that differ only in the worker's
number come to 0.7 times zstd's size, and to 1.5 times with 1 KB of equal labels. Where each incarnation is a UUID, they
come to 1.1 times with these labels, and to 1.9 times with 100 operators that are alike."""

WINDOW_BITS = 13
"""How far that gzip looks back: 8 KiB of messages make up to 32 KiB of records."""

FAST, SMALL = 1, 6
"""Levels of zstd and of gzip. The history of a flood has a ratio of 54 with zstd at 2,200 MB/s, or of 82 in seven times
as long; with gzip 25 at 1,500 MB/s, or 38 in five times as long."""

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
NAMES = {NONE: "none", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}

_PIECE = 16 * 1024

_GZIP = b"\x1f\x8b"
"""The first bytes of a gzip member: RFC 1952."""
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER = 16
"""Length of the header of Java's snappy streams: magic and two versions. Blocks follow, each after its 4-byte
length."""


class UnpackingError(Exception):
    """The data are malformed or exceed the limit. The message continues "the record batch at offset …"."""


def unpack(codec: int, data: bytes, most: int = MAX_UNPACKED) -> bytes:
    """Decompress `data` to at most `most` bytes. `codec` is the number in the batch's attributes.

    Raises:
        UnpackingError: malformed, too large, or an unavailable codec.
    """
    if codec == NONE:
        return data
    if codec == GZIP:
        return _gzip(data, most)
    try:
        import cramjam
    except ImportError as error:
        name = NAMES.get(codec, codec)
        raise UnpackingError(f"is compressed with {name}; write uncompressed or gzip") from error
    try:
        match codec:
            case 2:
                return _snappy(data, most, cramjam.snappy)
            case 3:
                return _into(cramjam.lz4.decompress_into, data, most, cramjam.DecompressionError)
            case 4:
                return _into(cramjam.zstd.decompress_into, data, most, cramjam.DecompressionError)
            case _:
                raise UnpackingError(f"is compressed with the unknown codec {codec}")
    except cramjam.DecompressionError as error:
        raise UnpackingError(f"is no {NAMES[codec]}, or unpacks to more than {most} bytes: {error}") from error


def outgrows(data: bytes, most: int) -> bool:
    """Whether gzip, at the level of answers that outgrow their input, packs `data` to more than `most` bytes."""
    if len(data) <= most:
        return False
    packing, size = zlib.compressobj(SMALL, wbits=16 + WINDOW_BITS), 0
    for start in range(0, len(data), _PIECE):
        size += len(packing.compress(data[start : start + _PIECE]))
        if size > most:
            return True
    return size + len(packing.flush()) > most


def pack(codec: int, data: memoryview, level: int) -> Any:
    """Compress the bytes with gzip or zstd. At gzip's fast level cramjam takes half as long as zlib, at the other one
    longer."""
    import cramjam

    if codec == ZSTD:
        return cramjam.zstd.compress(data, level)
    if level == FAST:
        return cramjam.gzip.compress(data, FAST)
    packing = zlib.compressobj(level, wbits=31)
    return packing.compress(data) + packing.flush()


def _gzip(data: bytes, most: int) -> bytes:
    """Decompress all gzip members, because a broker counts the records of all. Whatever follows and is no member is
    ignored, as by java.util.zip.GZIPInputStream."""
    unpacked = bytearray()
    left, members = memoryview(data), 0
    try:
        while left and (not members or left[:2] == _GZIP):
            members += 1
            member = zlib.decompressobj(wbits=31)
            while left and not member.eof:
                piece = left[:_PIECE]  # zlib copies the rest after a member, so keep the input small
                unpacked += member.decompress(piece, most + 1 - len(unpacked))
                if len(unpacked) > most:
                    raise UnpackingError(f"unpacks to more than {most} bytes")
                left = left[len(piece) - len(member.unused_data) :]
            if not member.eof:
                raise UnpackingError("is cut off within its gzip")
    except zlib.error as error:
        raise UnpackingError(f"is not gzip: {error}") from error
    return bytes(unpacked)


def _into(
    decompress_into: Callable[[bytes, bytearray], int], data: bytes, most: int, too_large: type[Exception]
) -> bytes:
    """Decompress into a buffer of the usual size, and if that is too small, of the largest size."""
    usual = 16 * len(data) + 4096
    if usual < most:
        buffer = bytearray(usual)
        with suppress(too_large):
            return bytes(memoryview(buffer)[: decompress_into(data, buffer)])
    buffer = bytearray(most)
    return bytes(memoryview(buffer)[: decompress_into(data, buffer)])


def _snappy(data: bytes, most: int, snappy: Any) -> bytes:
    """Decompress all blocks. Each starts with its decompressed length."""
    blocks = _xerial_blocks(data) if data.startswith(_XERIAL) else [data]
    if sum(snappy.decompress_raw_len(block) for block in blocks) > most:
        raise UnpackingError(f"unpacks to more than {most} bytes")
    return b"".join(bytes(snappy.decompress_raw(block)) for block in blocks)


def _xerial_blocks(data: bytes) -> list[bytes]:
    """The blocks of all streams. A stream may follow another one, header included."""
    blocks: list[bytes] = []
    position = 0
    while position < len(data):
        if data.startswith(_XERIAL, position):
            position += _XERIAL_HEADER
            if position > len(data):
                raise UnpackingError("is cut off within its snappy stream")
            continue
        try:
            (length,) = struct.unpack_from(">i", data, position)
        except struct.error as error:
            raise UnpackingError("is cut off within its snappy stream") from error
        if not 0 <= length <= len(data) - position - 4:
            raise UnpackingError("is cut off within its snappy stream")
        blocks.append(data[position + 4 : position + 4 + length])
        position += 4 + length
    return blocks

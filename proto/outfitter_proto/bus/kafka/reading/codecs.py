"""Unpacking a record batch's records within a bound: a topic's limit counts packed bytes, and 64 kB of those can hold
200 MB of zeros. And packing what managers write, with gzip.

gzip is unpacked by the standard library. snappy, lz4 and zstd, which other people's producers may be set to, are
cramjam's, which managers bring along; without it they are not read, and workers need none: what managers write is plain
or gzip.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_UNPACKED = 2 * 1024 * 1024
"""Bytes of one batch's records. Stock producers fill batches of at most one mebibyte before they pack them."""

MOST_TIMES = 512
"""How many times its packed size a batch of workers' messages may unpack to, or quotas of packed bytes would bound
nothing. Packed with zstd, 1,000 registrations that are alike but for the worker's number take 1/37, with 1 KB of equal
labels 1/243 (gzip 1/27 and 1/98, lz4 1/14 and 1/80, snappy 1/12 and 1/18); a bomb takes 1/5,000."""

FAST, SMALL = 1, 6
"""Levels of gzip. A flood's history packs to a 19th at 1,300 MB/s, or to a 29th in eight times as long; that of workers
that have less in common to an 11th or a 15th."""

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
NAMES = {NONE: "none", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}

_PIECE = 16 * 1024

_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER = 16
"""Java's snappy streams: this magic and two versions, then blocks, each with its length in four bytes before it."""


class UnpackingError(Exception):
    """Not what it says it is, or more than it may; the message goes on after "the record batch …"."""


def unpack(codec: int, data: bytes, most: int = MAX_UNPACKED) -> bytes:
    """The records in `data`, which a batch with `codec` in its attributes holds: at most so many bytes.

    Raises:
        UnpackingError: they cannot be had.
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


def gzip(data: memoryview, level: int) -> Any:
    """The bytes, packed. Where it is to be fast cramjam takes half as long as zlib, and else longer."""
    if level == FAST:
        import cramjam

        return cramjam.gzip.compress(data, FAST)
    packing = zlib.compressobj(level, wbits=31)
    return packing.compress(data) + packing.flush()


def _gzip(data: bytes, most: int) -> bytes:
    """All members there are, as a broker counts the records of all."""
    unpacked = bytearray()
    left = memoryview(data)
    try:
        while left:
            member = zlib.decompressobj(wbits=31)
            while left and not member.eof:
                piece = left[:_PIECE]  # what a member leaves over is copied: never much at once
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
    """Into a buffer that usually suffices, else into the largest that there may be."""
    usual = 16 * len(data) + 4096
    if usual < most:
        buffer = bytearray(usual)
        with suppress(too_large):
            return bytes(memoryview(buffer)[: decompress_into(data, buffer)])
    buffer = bytearray(most)
    return bytes(memoryview(buffer)[: decompress_into(data, buffer)])


def _snappy(data: bytes, most: int, snappy: Any) -> bytes:
    """Each block says beforehand how long it will be."""
    blocks = _xerial_blocks(data) if data.startswith(_XERIAL) else [data]
    if sum(snappy.decompress_raw_len(block) for block in blocks) > most:
        raise UnpackingError(f"unpacks to more than {most} bytes")
    return b"".join(bytes(snappy.decompress_raw(block)) for block in blocks)


def _xerial_blocks(data: bytes) -> list[bytes]:
    blocks: list[bytes] = []
    position = _XERIAL_HEADER
    while position < len(data):
        try:
            (length,) = struct.unpack_from(">i", data, position)
        except struct.error as error:
            raise UnpackingError("is cut off within its snappy stream") from error
        if not 0 <= length <= len(data) - position - 4:
            raise UnpackingError("is cut off within its snappy stream")
        blocks.append(data[position + 4 : position + 4 + length])
        position += 4 + length
    return blocks

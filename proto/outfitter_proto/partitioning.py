"""The partition of a host's messages, the same on every bus and in every client language.

It is Java's default partitioner for keyed records
(`org.apache.kafka.clients.producer.internals.BuiltInPartitioner.partitionForKey`), and librdkafka's with
`partitioner=murmur2_random`.
"""

from __future__ import annotations

from functools import lru_cache

_MASK = 0xFFFFFFFF
_M = 0x5BD1E995
_SEED = 0x9747B28C


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 (`org.apache.kafka.common.utils.Utils.murmur2`) as an unsigned 32-bit integer."""
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for start in range(0, whole, 4):
        k = int.from_bytes(data[start : start + 4], "little")
        k = k * _M & _MASK
        k ^= k >> 24
        k = k * _M & _MASK
        h = h * _M & _MASK
        h ^= k
    tail = data[whole:]
    if tail:
        h ^= int.from_bytes(tail, "little")
        h = h * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    h ^= h >> 15
    return h


@lru_cache(maxsize=4096)
def partition_of(host: str, partitions: int) -> int:
    """The partition of `host` (UTF-8) among `partitions`: `toPositive(murmur2(host)) mod partitions`."""
    return (murmur2(host.encode()) & 0x7FFFFFFF) % partitions

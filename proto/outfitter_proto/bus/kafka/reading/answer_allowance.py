"""The allowance of bytes of answers that are written uncompressed: a multiple of the input's compressed bytes.

Brokers' quotas count compressed bytes. A registration among similar ones takes 4 bytes in a batch with zstd, but 600
in the ledger. So we compress answers that outgrow their input. Compressing the others costs time and saves little.
"""

from __future__ import annotations

TIMES = 4
"""Uncompressed bytes of answers per byte of input. One uncompressed registration of 280 bytes makes a record of about
600."""
MOST_BYTES = 8 * 1024 * 1024
"""Largest allowance: the answers to the 9,000 registrations that a manager may have prefetched."""
FIRST_BYTES = 64 * 1024
"""The allowance before anything is read: what a manager writes when it starts."""


class Allowance:
    """The allowance of one partition. Every byte of input counts once, even with several readers."""

    def __init__(self) -> None:
        self._left = FIRST_BYTES
        self._upto = 0

    def read(self, upto: int, size: int) -> None:
        """Note a record batch of `size` compressed bytes; `upto` is the offset after it. An input that was deleted and
        created again counts only from the old end on. Until then answers are compressed."""
        if upto > self._upto:
            self._upto = upto
            self._left = min(MOST_BYTES, self._left + TIMES * size)

    def take(self, size: int) -> bool:
        """Take `size` bytes of the allowance. Returns whether they may be written uncompressed. If not, the allowance
        becomes 0. Otherwise one of thirty commits in a flood would be uncompressed."""
        fits = size <= self._left
        self._left = self._left - size if fits else 0
        return fits

"""How many bytes of answers are written plain: as many as the input was worth, in bytes as they were sent.

Brokers' quotas count packed bytes. Registrations that are alike take 4 bytes each in a batch with zstd, and 600 in the
ledger. Answers that outgrow their input are packed, too; to pack the others would cost time and save little.
"""

from __future__ import annotations

TIMES = 4
"""So many bytes of answers are written plain for each byte that was read. One plain registration of 280 bytes makes a
record of some 600."""
MOST_BYTES = 8 * 1024 * 1024
"""What is left at most: the answers to the 9,000 registrations that a manager may have read ahead."""


class Allowance:
    """Of one partition. Every byte of its input counts once, whichever reader comes first."""

    def __init__(self) -> None:
        self._left = MOST_BYTES
        self._upto = 0

    def read(self, upto: int, size: int) -> None:
        """A record batch that was sent as `size` bytes was read; `upto` is the offset after it. An input that begins
        anew has lower offsets, and counts from where the last one ended: until then answers are packed."""
        if upto > self._upto:
            self._upto = upto
            self._left = min(MOST_BYTES, self._left + TIMES * size)

    def take(self, size: int) -> bool:
        """Whether `size` bytes may be written plain. Where they may not, nothing is left: or a flood would have one of
        its commits plain for every thirty that are packed."""
        fits = size <= self._left
        self._left = self._left - size if fits else 0
        return fits

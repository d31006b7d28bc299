"""Promise 1, said once for all judges but the checker: no two have one device, unless both share it.

Each judge has evidence of its own, which it makes `Held` of: tests/README.md lists them.
"""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """The devices that somebody has `alone`, and those that somebody has `together` with others. A device has one name
    in all that are compared, or the same names."""

    alone: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()

    def clash(self, other: Held) -> frozenset[str]:
        """The devices that both have, and one of them alone."""
        return (self.alone & (other.alone | other.together)) | (self.together & other.alone)

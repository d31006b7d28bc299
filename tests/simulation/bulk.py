"""Worlds in which a commit takes little and devices say much of themselves: what cannot be written must not be decided.

Managers know what the topics take; so nothing that was decided may be refused for its size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from outfitter_proto.bus import Entry

RECORD_BYTES, BATCH_BYTES = 12, 61
"""What Kafka's format has around a record, about, and before a batch."""


CHECKPOINT_BYTES = 800
"""What a checkpoint without hosts that are ahead takes, about."""


class Bulk(NamedTuple):
    """How large things are in such a world: what a batch takes, how many devices a host has, and how many bytes one of
    them says of itself at most, which now and then is more than keeps a device healthy. One always fits into a commit
    by itself; all of a host's often do not."""

    takes_bytes: int
    devices: int
    most_info_bytes: int

    def info_bytes(self, dice: random.Random) -> int:
        return int(self.most_info_bytes * dice.random())


def bulk(seed: int) -> Bulk | None:
    """A quarter of the worlds are such."""
    dice = random.Random(f"{seed}/bulk")
    if dice.random() >= 0.25:
        return None
    takes_bytes = dice.choice((10_000, 10_000, 20_000, 200_000))
    devices = dice.randint(3, 8)
    share = dice.uniform(0.5, 4.0) / devices
    return Bulk(takes_bytes, devices, int(takes_bytes * min(share, 0.4)))


def most_decided(takes_bytes: int) -> int:
    """The most bytes of a decision where a batch takes so many: the rest is for the checkpoint, and for what Kafka's
    format has around records."""
    return (takes_bytes - CHECKPOINT_BYTES) * 7 // 8


def batch_bytes(entries: Sequence[Entry]) -> int:
    """What a batch of these takes on the wire, about."""
    return BATCH_BYTES + sum(RECORD_BYTES + len(entry.key or b"") + len(entry.value or b"") for entry in entries)

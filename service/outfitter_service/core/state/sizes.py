"""How many bytes records take, and how many they may: what cannot be written is never decided.

A grant leaves room for what later steps add to its record (its devices' health, why it ended), so that whatever was
granted can be refreshed and released. All numbers are bytes of JSON; the bound comes with `Rules.max_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, structs

from outfitter_proto.codec import MAX_MESSAGE_BYTES, encode
from outfitter_proto.records import Allocation
from outfitter_service.core.state.infos import GrantInfos
from outfitter_service.core.states import GRANTED_STATES, PENDING, Step

ENTRY_BYTES = 16
"""What an entry of a batch takes besides its key and its value."""
HEALTH_BYTES = 24
"""What a granted device's info grows by when the device is unhealthy: `,"health":"unhealthy"`, without a reason."""
REQUEST_BYTES = 2 * MAX_MESSAGE_BYTES + 8192
"""What a record takes besides its devices, at most: its registration (amounts are in it twice), names and reason."""
LONGEST_REASON = 2000
"""Characters of a reason that are kept: drivers and workers write them."""


class OversizeError(Exception):
    """A record would be larger than it may be: `size` bytes, where `most` are the bound."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"{size} bytes, at most {most}")
        self.size = size
        self.most = most


class FullError(Exception):
    """The decision would be larger than a commit takes: the rest is left to one of its own."""


def most_bytes(max_bytes: int, step: Step, record: Allocation) -> int | None:
    """How large a record may become by a step. None: an end is always written."""
    if record.state == PENDING:
        return max_bytes // 4  # a commit may have to hold another record of the same worker besides
    if step in (Step.GRANT, Step.PREPARE):
        devices = sum(map(len, record.resources.values()))
        return most_granted(max_bytes) - devices * HEALTH_BYTES
    if step is Step.REFRESH and record.state in GRANTED_STATES:
        return max_bytes
    return None


def most_granted(max_bytes: int) -> int:
    """How large a grant may be, counting what its devices' infos may grow by. A reason comes on top at its end: for
    that there is room beside decisions."""
    return max_bytes


def info_bytes(info: Mapping[str, str]) -> int:
    """What a granted device's info takes, and may grow to."""
    return len(encode(info)) + HEALTH_BYTES


def granted_bytes(alone: GrantInfos) -> int:
    """What a device takes of a grant at most, by the infos of a grant of it alone."""
    return len(encode(alone)) + ENTRY_BYTES + HEALTH_BYTES


def bare(record: Allocation) -> Allocation:
    """A record that is over, without what it once had: its devices are in history. What was there is empty then, and
    not left out, because that can be told as a change."""
    return structs.replace(
        record,
        resources={},
        operators={},
        env={},
        cdi=[],
        unavailable={},
        aliases={} if record.aliases else UNSET,
        common={} if record.common else UNSET,
    )


def shortened(text: str) -> str:
    """A reason as it goes into records."""
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"

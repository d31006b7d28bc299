"""The sizes of records and their limits, so that the core decides nothing that cannot be written.

A grant leaves room for what later steps add to its record (its devices' health, why it ended), so that every grant can
be refreshed and released. All numbers are bytes of JSON. `Rules.max_bytes` is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, structs

from outfitter_proto.codec import MAX_MESSAGE_BYTES, encode
from outfitter_proto.records import FINAL_STATES, HOLDING_STATES, Allocation, Register, ResolvedRequest
from outfitter_service.core import delays
from outfitter_service.core.state.infos import GrantInfos
from outfitter_service.core.states import PENDING, Step

MAX_BYTES = 864_000
"""Most bytes of one decision. A commit takes a fifteenth more (`MAX_BATCH_BYTES`): that is for the checkpoint, and for
the final reason of a grant that fills all the rest."""
ENTRY_BYTES = 16
"""Bytes of a batch's entry besides its key and its value."""
HEALTH_BYTES = 24
"""Growth of a granted device's info when the device becomes unhealthy: `,"health":"unhealthy"`, without a reason."""
REQUEST_BYTES = 2 * MAX_MESSAGE_BYTES + 8192
"""Most bytes of a record besides its devices: its registration (with the amounts twice), names and reason."""
SHORTEST_REASON = 200
"""Most characters of a reason in a record that `shortest` made, and in its step."""
_LASTING = ("id", "index", "local_index")
LONGEST_REASON = 2000
"""Most characters of a reason. Drivers and workers write them."""


FEW_ITEMS = 8
"""A request with so many items does not count: nearly all workers have fewer."""
FINAL_ITEMS = 32
"""Most items of a request, and most shared devices, in a final record. What has more is left out."""
FINAL_BYTES = 128
"""Most bytes of labels and operators in the record of an end that does not count as rewritten; see `Rules.news`."""


class OversizeError(Exception):
    """A record would be larger than it may be: `size` bytes, at most `most`."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"{size} bytes, at most {most}")
        self.size = size
        self.most = most


class FullError(Exception):
    """The decision would be larger than a commit may be. The rest needs a decision of its own."""


def most_bytes(max_bytes: int, step: Step, record: Allocation) -> int | None:
    """The most bytes of a record after a step. None: no limit, because an end is always written."""
    if record.state == PENDING:
        return max_bytes // 4  # the commit may hold another record of the same worker
    if step in (Step.GRANT, Step.PREPARE):
        devices = sum(map(len, record.resources.values()))
        return max_bytes - devices * HEALTH_BYTES  # its final reason comes on top, and commits have room for it
    if step is Step.REFRESH and record.state in HOLDING_STATES:
        return max_bytes
    return None


def info_bytes(info: Mapping[str, str]) -> int:
    """The bytes of a granted device's info after its possible growth."""
    return len(encode(info)) + HEALTH_BYTES


def granted_bytes(alone: GrantInfos) -> int:
    """Most bytes of one device in a grant. `alone`: the infos of a grant of only this device."""
    return len(encode(alone)) + ENTRY_BYTES + HEALTH_BYTES


def items(request: Register | ResolvedRequest) -> int:
    """The labels, resources, clauses and operators of a request, and its operators' resources. Each takes some 100 to
    900 bytes of memory, whatever it takes in JSON. 0: they are few."""
    count = len(request.labels) + len(request.resources or ())
    if type(request) is ResolvedRequest and request.choices is not UNSET:
        count += sum([len(choice.where) for choice in request.choices.values()])
    if request.operators:
        count += len(request.operators) + sum(map(len, request.operators.values()))
    return count if count > FEW_ITEMS else 0


def shared_devices(record: Allocation) -> int:
    """The devices that a record shares with others. Each takes some 300 bytes of memory and 100 of the ledger, in each
    of its holders' records. 0: they are few."""
    count = sum([len(record.resources.get(resource, ())) for resource in record.shared]) if record.shared else 0
    return count if count > FEW_ITEMS else 0


def is_long(request: Register | ResolvedRequest) -> bool:
    """Whether a final record would repeat much of what a registration said."""
    if not request.labels and not request.operators:
        return False
    return len(encode((request.labels, request.operators))) > FINAL_BYTES


def without_request(record: Allocation) -> Allocation:
    """A final record without what its registration said at length. History has it in earlier steps."""
    request = structs.replace(record.request, resources=None, operators=None, labels={}, choices=UNSET)
    return structs.replace(record, request=request, operators={}, common=UNSET if record.common is UNSET else {})


def without_devices(record: Allocation) -> Allocation:
    """A final record without its devices, which are in history. Its fields are empty and not left out: so history shows
    the change."""
    return structs.replace(
        record,
        resources={},
        operators={},
        env={},
        cdi=[],
        unavailable={},
        aliases=UNSET if record.aliases is UNSET else {},
        uses=UNSET if record.uses is UNSET else {},
        common=UNSET if record.common is UNSET else {},
    )


def shortest(record: Allocation) -> Allocation:
    """A final or `releasing` record with only what the worker's end needs, because the topics take no more. History
    has the rest in earlier steps. A `releasing` record keeps its devices and their names, so that nobody else gets
    them."""
    if record.state in FINAL_STATES:
        record = without_devices(record)
    record = without_request(record)
    resources = {
        name: [{field: info[field] for field in _LASTING if field in info} for info in infos]
        for name, infos in record.resources.items()
    }
    return structs.replace(
        record,
        resources=resources,
        env={},
        cdi=[],
        unavailable={},
        warnings=UNSET if record.warnings is UNSET else [],
        reason=record.reason and record.reason[:SHORTEST_REASON],
        delayed_by=UNSET if record.delayed_by is UNSET else delays.shortest(record.delayed_by),
    )


def shortened(text: str) -> str:
    """A reason, shortened for records."""
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"

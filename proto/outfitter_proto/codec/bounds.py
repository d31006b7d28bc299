"""Size limits for each part of a registration, because a manager keeps it in memory and writes it several times.

Ledger records have no limits, because earlier versions may have written larger ones.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import msgspec

from outfitter_proto.records import (
    MAX_BOOT_ID,
    MAX_CLAUSE_BYTES,
    MAX_KERNEL_NUMBER,
    MAX_LABEL_BYTES,
    MAX_OPERATOR_REQUESTS,
    MAX_OPERATORS,
    MAX_RESOURCES,
    Owner,
    Register,
)

WITHIN_BYTES = 1024
"""A message of at most this size is within all bounds except those of its owner, and needs no check."""


class Excess(NamedTuple):
    """A field over its bound: its JSON path, and the reason."""

    field: str
    problem: str


def excess_of_owner(owner: Owner) -> Excess | None:
    """As `excess`, for a registration's owner."""
    if len(owner.boot_id) > MAX_BOOT_ID:
        return Excess("$.owner.boot_id", f"{len(owner.boot_id)} characters; a boot's id has at most {MAX_BOOT_ID}")
    if owner.start_ticks > MAX_KERNEL_NUMBER:
        return Excess("$.owner.start_ticks", _too_many_bits(owner.start_ticks))
    if owner.pid_ns > MAX_KERNEL_NUMBER:
        return Excess("$.owner.pid_ns", _too_many_bits(owner.pid_ns))
    if owner.time_ns and owner.time_ns > MAX_KERNEL_NUMBER:
        return Excess("$.owner.time_ns", _too_many_bits(owner.time_ns))
    return None


def _too_many_bits(number: int) -> str:
    return f"a number of {number.bit_length()} bits; a kernel's numbers have at most {MAX_KERNEL_NUMBER.bit_length()}"


def excess(message: Register) -> Excess | None:
    """The first field of a registration over its bound; None if all are within bounds."""
    resources, operators = message.resources or {}, message.operators or {}
    if message.owner is not None and (of_owner := excess_of_owner(message.owner)) is not None:
        return of_owner
    if len(resources) > MAX_RESOURCES:
        return Excess("$.resources", f"{len(resources)} resources; a registration names at most {MAX_RESOURCES}")
    if len(operators) > MAX_OPERATORS:
        return Excess("$.operators", f"{len(operators)} operators; a registration names at most {MAX_OPERATORS}")
    together = sum(map(len, operators.values()))
    if together > MAX_OPERATOR_REQUESTS:
        return Excess(
            "$.operators",
            f"the operators name {together} resources together; at most {MAX_OPERATOR_REQUESTS} are taken",
        )
    said = [(request.where or {}, request.same or ()) for request in resources.values()]
    if any(map(any, said)) and (size := len(msgspec.json.encode(said))) > MAX_CLAUSE_BYTES:
        return Excess("$.resources", f"where and same are {size} bytes together; at most {MAX_CLAUSE_BYTES} are taken")
    size = len("".join(chain(message.labels, message.labels.values())).encode("utf-8", "replace"))
    if size > MAX_LABEL_BYTES:
        return Excess("$.labels", f"the labels are {size} bytes together; at most {MAX_LABEL_BYTES} are kept")
    return None

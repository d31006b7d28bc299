"""Size limits for each part of a registration, because a manager keeps it in memory and writes it several times.

Ledger records have no limits, because earlier versions may have written larger ones.
"""

from __future__ import annotations

from itertools import chain

from outfitter_proto.records import (
    MAX_BOOT_ID,
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


def excess_of_owner(owner: Owner) -> tuple[str, str] | None:
    """As `excess`, for a registration's owner."""
    if len(owner.boot_id) > MAX_BOOT_ID:
        return "$.owner.boot_id", f"{len(owner.boot_id)} characters; a boot's id has at most {MAX_BOOT_ID}"
    if owner.start_ticks > MAX_KERNEL_NUMBER:
        return "$.owner.start_ticks", _too_many_bits(owner.start_ticks)
    if owner.pid_ns > MAX_KERNEL_NUMBER:
        return "$.owner.pid_ns", _too_many_bits(owner.pid_ns)
    if owner.time_ns and owner.time_ns > MAX_KERNEL_NUMBER:
        return "$.owner.time_ns", _too_many_bits(owner.time_ns)
    return None


def _too_many_bits(number: int) -> str:
    return f"a number of {number.bit_length()} bits; a kernel's numbers have at most {MAX_KERNEL_NUMBER.bit_length()}"


def excess(message: Register) -> tuple[str, str] | None:
    """The first field (a JSON path) of a registration over its bound, with the reason; None if all are within
    bounds."""
    resources, operators = message.resources or {}, message.operators or {}
    if message.owner is not None and (found := excess_of_owner(message.owner)) is not None:
        return found
    if len(resources) > MAX_RESOURCES:
        return "$.resources", f"{len(resources)} resources; a registration names at most {MAX_RESOURCES}"
    if len(operators) > MAX_OPERATORS:
        return "$.operators", f"{len(operators)} operators; a registration names at most {MAX_OPERATORS}"
    together = sum(map(len, operators.values()))
    if together > MAX_OPERATOR_REQUESTS:
        return (
            "$.operators",
            f"the operators name {together} resources together; at most {MAX_OPERATOR_REQUESTS} are taken",
        )
    size = len("".join(chain(message.labels, message.labels.values())).encode("utf-8", "replace"))
    if size > MAX_LABEL_BYTES:
        return "$.labels", f"the labels are {size} bytes together; at most {MAX_LABEL_BYTES} are kept"
    return None

"""Values and bounds that records share: names, states, codes."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated, NewType

from msgspec import Meta

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$(?!\n)"
"""Valid names of a host, worker, operator, resource or cluster (no `/`, no `@`, never empty).

The pattern's end is necessary because Python's `$` also matches before a last line feed.
"""

MAX_AMOUNT = 2**63 - 1
"""The largest amount: Flink's `external-resource.<name>.amount` is a Java long."""

MAX_RESOURCES = 64
MAX_OPERATORS = 256
MAX_OPERATOR_REQUESTS = 1024
"""Limits of one registration: resources, operators, and resources of all operators together."""

MAX_LABEL_BYTES = 4096
"""Limit of the names and values of a registration's labels together, in bytes of UTF-8."""

MAX_BOOT_ID = 64
"""Most characters; Linux's boot ids have 36."""

MAX_KERNEL_NUMBER = 2**64 - 1
"""The largest start time or inode of a kernel: 64 bits without a sign."""

MAX_REASON = 256
"""How many characters of a deregistration's reason are kept. A longer reason is cut, not refused."""

Name = Annotated[str, Meta(extra_json_schema={"pattern": NAME_PATTERN})]
"""`codec.decode_registration` checks its pattern. In msgspec the check would take half of the decoding time."""
Amount = Annotated[int, Meta(ge=1, le=MAX_AMOUNT)]
Seconds = Annotated[float, Meta(gt=0, le=366 * 86_400)]
KernelNumber = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": MAX_KERNEL_NUMBER})]
"""`outfitter_proto.decoding.bounds` checks its upper bound, because msgspec's bounds have 63 bits."""
Utc = Annotated[datetime, Meta(tz=True)]

Token = NewType("Token", int)
"""A grant's fencing token. Each grant of a writer has a higher one than those before."""
NO_TOKEN = Token(0)
"""Lower than every grant's."""
CommitNumber = NewType("CommitNumber", int)
"""A writer's first commit has the number 1."""
NO_COMMIT = CommitNumber(0)
"""Before a writer's first commit."""


class AllocationState(enum.StrEnum):
    """An allocation's state. Readers need only four cases: waiting, yours, over, failed."""

    PENDING = "pending"
    PREPARING = "preparing"
    ALLOCATED = "allocated"
    RELEASING = "releasing"
    ENDED = "ended"
    FAILED = "failed"


FINAL_STATES = frozenset({AllocationState.ENDED, AllocationState.FAILED})
HOLDING_STATES = frozenset({AllocationState.PREPARING, AllocationState.ALLOCATED, AllocationState.RELEASING})
"""States in which an allocation's devices count as held: the live allocations of promise 1."""


class ReasonCode(enum.StrEnum):
    """Why an allocation is not (or no longer) granted, as words for programs and metric labels."""

    BUSY = "busy"
    INFEASIBLE = "infeasible"
    NOT_REPORTED = "not-reported"
    DRIVER_FAILED = "driver-failed"
    UNKNOWN_RESOURCE = "unknown-resource"
    NO_DRIVER = "no-driver"
    DISABLED = "disabled"
    MISCONFIGURED = "misconfigured"
    INVALID_REQUEST = "invalid-request"
    WAITED_TOO_LONG = "waited-too-long"
    TOO_MANY_WAITING = "too-many-waiting"
    TOO_MANY_LIVE = "too-many-live"
    TOO_LARGE = "too-large"
    PREPARE_FAILED = "prepare-failed"
    DEREGISTERED = "deregistered"
    WITHDRAWN = "withdrawn"
    LEASE_EXPIRED = "lease-expired"
    OWNER_DIED = "owner-died"
    SUPERSEDED = "superseded"


class Unwatched(enum.StrEnum):
    """Why a manager cannot watch an owner process, or not be sure of its identity. Then a lease decides."""

    SCOPE = "scope"
    MACHINE = "machine"
    PID_NAMESPACE = "pid-namespace"
    TIME_NAMESPACE = "time-namespace"
    HIDDEN = "hidden"
    NO_PROCESS = "no-process"
    REFUSED = "refused"
    DESCRIPTORS = "descriptors"


class Health(enum.StrEnum):
    """A device's health. Without reports it becomes unknown after a time. An unhealthy device can become healthy."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"

"""The words and bounds that records share: names, states, codes."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated

from msgspec import Meta

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$(?!\n)"
"""What a host, worker, operator, resource or cluster may be called (no `/`, no `@`, never empty).

Python's `$` also matches before a last line feed, hence the end of the pattern.
"""

MAX_AMOUNT = 2**63 - 1
"""The largest amount: Flink's `external-resource.<name>.amount` is a Java long."""

MAX_RESOURCES = 64
MAX_OPERATORS = 256
MAX_OPERATOR_REQUESTS = 1024
"""What one registration may name: resources, operators, and resources of all operators together."""

MAX_LABEL_BYTES = 4096
"""Names and values of a registration's labels together, in UTF-8."""

MAX_BOOT_ID = 64
"""Characters; Linux's boot ids have 36."""

MAX_KERNEL_NUMBER = 2**64 - 1
"""The largest start time or inode that a kernel can tell: 64 bits without a sign."""

MAX_REASON = 256
"""Characters of a deregistration's reason that are kept: a goodbye is not refused for a long one."""

Name = Annotated[str, Meta(extra_json_schema={"pattern": NAME_PATTERN})]
"""Its pattern is checked where it comes in, by `codec.decode_registration`, and not by msgspec, for which that would be
half of the work."""
Amount = Annotated[int, Meta(ge=1, le=MAX_AMOUNT)]
Seconds = Annotated[float, Meta(gt=0, le=366 * 86_400)]
KernelNumber = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": MAX_KERNEL_NUMBER})]
"""Its upper bound is checked where it comes in, by `outfitter_proto.decoding.bounds`: msgspec's are of 63 bits."""
Utc = Annotated[datetime, Meta(tz=True)]


class AllocationState(enum.StrEnum):
    """Where an allocation stands. A reader needs four words: waiting, yours, over, failed."""

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
    """Why an allocation is not (or no longer) granted, in words that programs and metric labels can bear."""

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
    """Why a manager cannot watch an owner process, or not be sure that it is the right one: then a lease decides."""

    SCOPE = "scope"
    MACHINE = "machine"
    PID_NAMESPACE = "pid-namespace"
    TIME_NAMESPACE = "time-namespace"
    HIDDEN = "hidden"
    NO_PROCESS = "no-process"
    REFUSED = "refused"
    DESCRIPTORS = "descriptors"


class Health(enum.StrEnum):
    """A device's health. Unknown is a value: silence becomes unknown with age; illness can heal."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"

"""What can go wrong for an operator, each kind an error of its own (Flink: one empty set for all of them).

Errors of the bus itself (`BusUnavailableError`, `BusConfigurationError`) come from the bus port and are
re-exported by the package; they name the bus.
"""

from __future__ import annotations

from outfitter_proto.records import Allocation, ReasonCode


class OutfitterError(Exception):
    """Any error of the operators' side, bus errors apart."""


class ContextStateError(OutfitterError, RuntimeError):
    """A context was used before it was entered, after it was left, or entered twice."""


class UsedAfterForkError(ContextStateError):
    """A context was used in a process that was forked from the one that entered it."""


class NoManagerError(OutfitterError):
    """Nobody answered the registration; it has been withdrawn. The message names the hosts that are served."""


class LeaseLostError(OutfitterError):
    """No heartbeat was acknowledged for most of the lease: the devices may soon be, or already are, somebody else's.

    Stop using them. When a heartbeat is acknowledged again while the allocation still stands, the context
    is usable again.
    """


class AllocationError(OutfitterError):
    """There are no infos to hand out, and `record` (where there is one) is why.

    `code` is a `ReasonCode` word, or one of a later version, or None.
    """

    def __init__(self, message: str, *, code: str | None = None, record: Allocation | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.record = record


class AllocationFailedError(AllocationError):
    """The manager's final answer is no."""


class UnknownResourceError(AllocationFailedError):
    """No such resource: not configured on the host, or not among what this worker or operator asked for."""


class NoDriverError(AllocationFailedError):
    """The resource is configured without a driver, so nobody can say which devices there are."""


class ResourceDisabledError(AllocationFailedError):
    """The resource is configured with amount 0: switched off on this host."""


class InvalidRequestError(AllocationFailedError):
    """The registration contradicts itself, or what the manager or an earlier registration says."""


class WaitedTooLongError(AllocationFailedError, TimeoutError):
    """The devices did not become free within `wait`."""


class AllocationEndedError(AllocationError):
    """The allocation is over: released, lost its lease, or superseded by a newer incarnation of the worker."""


class AllocationNotUsableError(AllocationError):
    """The allocation is in a state in which it may not be used, and that is not final."""


_BY_CODE: dict[str, type[AllocationFailedError]] = {
    ReasonCode.UNKNOWN_RESOURCE: UnknownResourceError,
    ReasonCode.NO_DRIVER: NoDriverError,
    ReasonCode.DISABLED: ResourceDisabledError,
    ReasonCode.INVALID_REQUEST: InvalidRequestError,
    ReasonCode.WAITED_TOO_LONG: WaitedTooLongError,
}


def failure(code: str | None, message: str, record: Allocation | None = None) -> AllocationFailedError:
    """The error that a reason code stands for."""
    kind = _BY_CODE.get(code or "", AllocationFailedError)
    return kind(message, code=code, record=record)

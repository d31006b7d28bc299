"""The errors that operators see, one class per kind (Flink returns an empty set for all of them).

The bus port defines the bus errors (`BusUnavailableError`, `BusConfigurationError`), which name the bus. The package
re-exports them.
"""

from __future__ import annotations

from outfitter_proto.records import Allocation, ReasonCode


class OutfitterError(Exception):
    """Base of all errors on the workers' side except bus errors."""


class ContextStateError(OutfitterError, RuntimeError):
    """A context was used before it was entered, after it was left, or entered twice."""


class UsedAfterForkError(ContextStateError):
    """A context was used in a process that was forked from the one that entered it."""


class UnwatchableProcessError(OutfitterError):
    """The process that `ends_with` names is gone, is not there, or cannot be watched."""


class NoManagerError(OutfitterError):
    """No manager answered, and the worker withdrew its registration. The message names the hosts with a manager."""


class LeaseLostError(OutfitterError):
    """No heartbeat was acknowledged for two thirds of the lease. Another worker may get the devices: stop using them.

    If the manager acknowledges a heartbeat while the allocation still stands, the context is usable again.
    """


class AllocationError(OutfitterError):
    """The allocation has no infos. `record` (None if there is no record) has the reason.

    `code` is a `ReasonCode`, a code of a later version, or None.
    """

    def __init__(self, message: str, *, code: str | None = None, record: Allocation | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.record = record


class AllocationFailedError(AllocationError):
    """The manager has refused the request for good."""


class UnknownResourceError(AllocationFailedError):
    """The resource is not configured on the host, or this worker or operator did not request it."""


class NoDriverError(AllocationFailedError):
    """The resource is configured without a driver, so its devices are unknown."""


class ResourceDisabledError(AllocationFailedError):
    """The resource is configured with amount 0: switched off on this host."""


class InvalidRequestError(AllocationFailedError):
    """The registration contradicts itself, the manager's configuration or an earlier registration."""


class ChoiceIgnoredError(AllocationFailedError):
    """The host's manager ignores `where` and `same`, as version 0.2 does. Nothing was registered, or what was granted
    is given back."""


class WaitedTooLongError(AllocationFailedError, TimeoutError):
    """The devices did not become free within `wait`."""


class VariableNotAllowedError(AllocationError):
    """The record sets environment variables that select no device, as far as Outfitter knows, and that this worker does
    not allow. The message has the setting that allows them."""


class AllocationEndedError(AllocationError):
    """The allocation is over: it was released, its lease expired, or a newer incarnation superseded it."""


class AllocationNotUsableError(AllocationError):
    """The allocation is in a state that does not permit use and is not final."""


_BY_CODE: dict[str, type[AllocationFailedError]] = {
    ReasonCode.UNKNOWN_RESOURCE: UnknownResourceError,
    ReasonCode.NO_DRIVER: NoDriverError,
    ReasonCode.DISABLED: ResourceDisabledError,
    ReasonCode.INVALID_REQUEST: InvalidRequestError,
    ReasonCode.WAITED_TOO_LONG: WaitedTooLongError,
}


def failure(code: str | None, message: str, record: Allocation | None = None) -> AllocationFailedError:
    """The error for a reason `code`, with the record that has it."""
    kind = _BY_CODE.get(code or "", AllocationFailedError)
    return kind(message, code=code, record=record)

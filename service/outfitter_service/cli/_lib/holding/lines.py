"""The lines that `outfitter hold` prints, each a JSON object: a record as on the bus, a warning, or an error."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from outfitter.errors import AllocationEndedError, AllocationError, NoManagerError, VariableNotAllowedError
from outfitter_proto import codec
from outfitter_proto.bus import (
    BusAuthenticationError,
    BusAuthorizationError,
    BusConfigurationError,
    BusUnavailableError,
)
from outfitter_proto.records import Allocation, Register
from outfitter_proto.support.printable import printable_json
from outfitter_service.cli._lib.errors import describe, leaves

_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (NoManagerError, "no-manager"),
    (AllocationEndedError, "ended"),
    (VariableNotAllowedError, "variable-not-allowed"),
    (BusUnavailableError, "bus-unavailable"),
    (BusAuthenticationError, "bus-authentication"),
    (BusAuthorizationError, "bus-authorization"),
    (BusConfigurationError, "bus-configuration"),
    (click.UsageError, "usage"),
)
"""The codes of errors that are no manager's answer; the first row that fits counts."""


def of_record(record: Allocation) -> str:
    return printable_json(codec.encode(record).decode())


def at_risk(registration: Register, reason: str) -> str:
    """The lease is in danger. The line of a record that follows takes it back."""
    return _encoded(
        {
            "type": "at-risk",
            "host": registration.host,
            "worker": registration.worker,
            "incarnation": registration.incarnation,
            "reason": reason,
        }
    )


def of_error(error: BaseException) -> str:
    """Why there are no devices, if no record says so."""
    first = next(leaves(error))
    return _encoded({"type": "error", "code": _code(first), "reason": describe(first)})


def _code(error: BaseException) -> str:
    if isinstance(error, AllocationError) and error.code is not None:
        return str(error.code)
    return next((code for kind, code in _CODES if isinstance(error, kind)), "failed")


def _encoded(line: dict[str, Any]) -> str:
    return printable_json(msgspec.json.encode(line).decode())

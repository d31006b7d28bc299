"""The life of an allocation, as one table. A step without a row raises, and nothing has changed.

Repeats have rows of their own. `diagram()` prints the table for the documentation.
"""

from __future__ import annotations

import enum

from outfitter_proto.records import AllocationState as State

# plain names: looking up a member of an enumeration costs as much as comparing it ten times (Python 3.11)
PENDING, PREPARING, ALLOCATED, RELEASING, ENDED, FAILED = State
GRANTED_STATES = (PREPARING, ALLOCATED)
"""A driver prepares the worker's devices, or the worker has them."""


class Step(enum.StrEnum):
    """The steps of an allocation."""

    REGISTER = "register"
    GRANT = "grant"
    PREPARE = "prepare"
    PREPARED = "prepared"
    FAIL = "fail"
    WITHDRAW = "withdraw"
    RELEASE = "release"
    END = "end"
    GIVE_UP = "give-up"
    REFRESH = "refresh"


class IllegalStepError(Exception):
    """The table has no row for a step. That is a defect of Outfitter, never of the input."""


TABLE: dict[tuple[str | None, Step], State] = {
    (None, Step.REGISTER): State.PENDING,
    (None, Step.GRANT): State.ALLOCATED,
    (None, Step.PREPARE): State.PREPARING,
    (None, Step.FAIL): State.FAILED,
    (None, Step.END): State.ENDED,
    (State.PENDING, Step.REFRESH): State.PENDING,
    (State.PENDING, Step.GRANT): State.ALLOCATED,
    (State.PENDING, Step.PREPARE): State.PREPARING,
    (State.PENDING, Step.FAIL): State.FAILED,
    (State.PENDING, Step.WITHDRAW): State.ENDED,
    (State.PREPARING, Step.REFRESH): State.PREPARING,
    (State.PREPARING, Step.PREPARED): State.ALLOCATED,
    (State.PREPARING, Step.RELEASE): State.RELEASING,
    (State.ALLOCATED, Step.REFRESH): State.ALLOCATED,
    (State.ALLOCATED, Step.RELEASE): State.RELEASING,
    (State.ALLOCATED, Step.END): State.ENDED,
    (State.RELEASING, Step.REFRESH): State.RELEASING,
    (State.RELEASING, Step.END): State.ENDED,
    (State.RELEASING, Step.GIVE_UP): State.FAILED,
    (State.ENDED, Step.REFRESH): State.ENDED,
    (State.FAILED, Step.REFRESH): State.FAILED,
}


def advance(state: str | None, step: Step) -> State:
    """The state after `step`.

    Raises:
        IllegalStepError: the table has no row for it.
    """
    try:
        return TABLE[state, step]
    except KeyError:
        raise IllegalStepError(f"an allocation in state {state or '(none)'} cannot take the step {step}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram; repeats are left out."""
    lines = ["stateDiagram-v2"]
    for (before, step), after in TABLE.items():
        if before != after:
            lines.append(f"    {before or '[*]'} --> {after}: {step}")
    lines += [f"    {state} --> [*]: retention" for state in (State.ENDED, State.FAILED)]
    return "\n".join(lines)

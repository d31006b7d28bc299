"""What delays a release, and whose words say so: the driver's, or those of who looked for the worker's processes."""

from __future__ import annotations

from msgspec import UNSET

from outfitter_proto.records import Allocation

Sight = tuple[str | None, int | None]
"""The boot and the PID namespace whose processes a manager sees; None: it sees no processes."""

_OF_DRIVER = "the driver of "
_OUT_OF_SIGHT = (
    ", as an earlier manager saw; this one does not see the worker's processes, and waits for a manager in their PID "
    "namespace, for the machine's restart, or for a deregistration"
)


def of_driver(resource: str, words: str) -> str:
    """A delay by the driver of a resource."""
    return f"{_OF_DRIVER}{resource} {words}"


def shortest(delayed_by: str) -> str:
    """As much of a delay as tells whose words it is."""
    return delayed_by[: len(_OF_DRIVER)]


def is_out_of_sight(record: Allocation, sees: Sight) -> bool:
    """Whether a manager has seen processes that the worker left behind, and one that `sees` others cannot say what has
    become of them. The record names them until a manager that looked finds none: a driver's words come after that."""
    owner, delayed_by = record.request.owner, record.delayed_by
    if not delayed_by or owner is None or record.request.survivors is UNSET:
        return False
    return (owner.boot_id, owner.pid_ns) != sees and not delayed_by.startswith(_OF_DRIVER)


def out_of_sight(delayed_by: str) -> str:
    """The delay of a manager that does not see the processes that this delay is about."""
    return delayed_by.removesuffix(_OUT_OF_SIGHT) + _OUT_OF_SIGHT

"""The core's values that are not on the wire: resource specifications, inventories, events, commands.

A resource specification has the configuration of one resource. An inventory has the devices that its driver last
reported for one host. Both are levels: after a restart the manager observes them again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, ClassVar, get_args

from msgspec import Struct

from outfitter_proto.clauses import Clauses
from outfitter_proto.keys import AllocationKey, allocation_names
from outfitter_proto.records import CordonOrder, Deregister, Health, Heartbeat, Register, Source, Token, Unwatched

NO_ITEMS: dict[str, Any] = {}
NO_NAMES: list[str] = []
NO_CLAUSES = Clauses()
"""Empty containers that records share. No code changes a record's containers."""


class SpecState(enum.StrEnum):
    """Whether a configured resource is in effect."""

    OK = "ok"
    DISABLED = "disabled"
    NO_DRIVER = "no-driver"
    MISCONFIGURED = "misconfigured"


class OnFailure(enum.StrEnum):
    """What happens to a worker whose driver fails permanently: `external-resource.<name>.on-failure`."""

    FAIL_WORKER = "fail-worker"
    NO_INFO = "no-info"
    WAIT = "wait"


class ResourceSpec(Struct, frozen=True, kw_only=True):
    """One configured resource, as the core needs it."""

    name: str
    amount: int | None = None
    """The devices for a worker that names no resources (None: unknown, because the setting is wrong)."""
    state: SpecState = SpecState.OK
    reason: str | None = None
    """Explains any state but OK."""
    shared: bool = False
    """Several workers may hold the same device."""
    on_failure: OnFailure = OnFailure.FAIL_WORKER
    """What a permanent failure of the driver means for workers."""
    on_demand: bool = False
    """The driver has no inventory, and the manager asks it for each worker."""
    per_worker: bool = False
    """What such a driver names is for the worker that it was asked for, and for nobody else."""
    prepares: bool = False
    """Grants go through `preparing`."""
    confirms: bool = False
    """Releases go through `releasing`."""
    replicas: int = 1
    """To how many workers each device is lent at once."""
    replicas_same_device: bool = False
    """One worker may get several replicas of the same device."""
    clauses: Clauses = NO_CLAUSES
    """Which devices a worker takes that does not say it."""
    hint: str | None = None
    """Advice for workers that wait although the driver reported enough devices."""
    min_healthy_s: float = 0.0
    """A device that was ill is lent only after it has been healthy for so many seconds; see `recovery`."""

    def devices_for(self, amount: int) -> int:
        """How many devices one worker needs at least for so much of the resource."""
        return -(-amount // self.replicas) if self.replicas_same_device else amount


class KnownDevice(Struct, frozen=True, kw_only=True):
    """One device as its driver reported it, with its canonical id. `outfitter_drivers.api.Device` says more."""

    id: str
    properties: dict[str, str]
    """Its info for workers, as text."""
    aliases: tuple[str, ...] = ()
    """Its other names on the host."""
    health: Health = Health.HEALTHY
    reason: str | None = None
    """Why it is not healthy, or None."""
    env: dict[str, str] = {}
    """Environment variables for a worker that gets it."""
    cdi: tuple[str, ...] = ()
    """Its names in the Container Device Interface."""
    part_of: str | None = None
    """The id or an alias of the device that this one is a part of, or None."""
    cordon: str | None = None
    """The id of an operator's order that applies to it, or None. The core sets it."""
    used_by: str | None = None
    """The process that uses it, and to which it was not lent, for people: `process 4711 (python) of ada`. None: there
    is none, as far as is known. The runtime finds it."""
    untold: str | None = None
    """Why its driver, which looks who uses it, could not tell. None: it could, or it does not look."""


Devices = dict[str, tuple[KnownDevice, ...]]
"""A grant's devices by resource."""


class DriverFailure(Struct, frozen=True, kw_only=True):
    """A driver could not report."""

    reason: str
    """The driver's error, for people."""
    permanent: bool = False
    """It stays until somebody changes something; else the manager calls the driver again."""
    at_least: int = 0
    """Workers that want fewer devices are not affected. The core sets it for on-demand drivers."""


# --- events: the input of `decide` ---------------------------------------------------------------------


class Incoming(Struct, frozen=True, gc=False):
    """A message of the registrations topic for one of this writer's hosts. `source`: its partition and offset.
    `warnings`: what its decoder complained about; they go into the record."""

    message: Register | Heartbeat | Deregister
    source: Source
    warnings: Sequence[str] = ()


class DriverReport(Struct, frozen=True, kw_only=True):
    """A driver's whole inventory of one host, or its failure. `asked`: the amount that the manager asked an on-demand
    driver for. After a failure the earlier inventory stays known, but none of its devices is granted. A failure with
    `devices` replaces it: nobody knows any more whether they are healthy."""

    kind: ClassVar = "driver-report"
    host: str
    resource: str
    devices: tuple[KnownDevice, ...] = ()
    failure: DriverFailure | None = None
    asked: int = 0


class DriverRetry(Struct, frozen=True, kw_only=True):
    """The delay after an on-demand driver's failure is over: ask the driver again if a worker waits for it. It is due
    after each temporary failure, and with `on-failure = wait` after any failure. Several failures share one retry."""

    kind: ClassVar = "driver-retry"
    host: str
    resource: str


class OwnerDied(Struct, frozen=True, kw_only=True):
    """An allocation's owner process is dead. `detail`: how the manager knows, for people."""

    kind: ClassVar = "owner-died"
    allocation: AllocationKey
    detail: str


class OwnerUnwatched(Struct, frozen=True, kw_only=True):
    """The manager cannot watch an allocation's owner process, or cannot identify it. `code` says why for programs,
    `reason` for people. A worker without a lease gets one of `lease_s` seconds."""

    kind: ClassVar = "owner-unwatched"
    allocation: AllocationKey
    code: Unwatched
    reason: str
    lease_s: float


class LeaseExpired(Struct, frozen=True, kw_only=True):
    """An allocation's lease and grace ended without a heartbeat, and the manager had read its whole input."""

    kind: ClassVar = "lease-expired"
    allocation: AllocationKey


class Prepared(Struct, frozen=True, kw_only=True):
    """`Prepare` succeeded (`error` is None) or failed."""

    kind: ClassVar = "prepared"
    allocation: AllocationKey
    token: Token
    error: str | None = None


class Unprepared(Struct, frozen=True, kw_only=True):
    """`Unprepare` succeeded. `confirmed`: an in-use check found the devices unused. `untold`: else, why nobody could
    tell; None: there is no check. `survivors`: the result of the search for processes that the worker left behind, for
    people; None: it asked for no search."""

    kind: ClassVar = "unprepared"
    allocation: AllocationKey
    token: Token
    confirmed: bool
    untold: str | None = None
    survivors: str | None = None


class ReleaseDelayed(Struct, frozen=True, kw_only=True):
    """`Unprepare` cannot end yet; `reason` has the driver's words, or names the processes that the worker left behind.
    The manager emits it again and again, each time less often. Workers that wait for the devices read it in the record.
    """

    kind: ClassVar = "release-delayed"
    allocation: AllocationKey
    token: Token
    reason: str


class OrderRead(Struct, frozen=True, kw_only=True):
    """The control topic has this order of an operator, new, changed or ended."""

    kind: ClassVar = "order"
    order: CordonOrder


class Tick(Struct, frozen=True, kw_only=True):
    """Time has passed on `host`: check wait deadlines, orders that end by themselves, and retention."""

    kind: ClassVar = "tick"
    host: str


class Reschedule(Struct, frozen=True, kw_only=True):
    """Evaluate `host` again: its queue, and the infos of workers that hold devices. It continues a larger effect, and
    is due once after a restore. `cause` stands in history with its steps. `whole`: evaluate all waiters; else only
    those whose situation may have changed since their last evaluation."""

    kind: ClassVar = "reschedule"
    host: str
    cause: str = "reschedule"
    whole: bool = True


InternalEvent = (
    DriverReport
    | DriverRetry
    | OwnerDied
    | OwnerUnwatched
    | LeaseExpired
    | Prepared
    | Unprepared
    | ReleaseDelayed
    | OrderRead
    | Tick
    | Reschedule
)
Event = Incoming | InternalEvent

INTERNAL_KINDS: tuple[str, ...] = tuple(each.kind for each in get_args(InternalEvent))
"""As what internal events are counted. History has these words as causes of steps."""


def host_of(event: Event) -> str:
    """The host that an event is about."""
    if type(event) is Incoming:
        return event.message.host
    if isinstance(event, DriverReport | DriverRetry | Tick | Reschedule):
        return event.host
    if type(event) is OrderRead:
        return event.order.host
    return allocation_names(event.allocation).host  # type: ignore[union-attr]  # `type is` does not narrow a union


# --- commands: what drivers must do after the commit ---------------------------------------------------


class Discover(Struct, frozen=True, kw_only=True):
    """Ask an on-demand driver for `amount` devices (the `held` ones included), at least `least` of them. `allocation`:
    the waiting worker for which the manager asks."""

    host: str
    resource: str
    amount: int
    least: int
    held: int = 0
    allocation: AllocationKey


class Prepare(Struct, frozen=True, kw_only=True):
    """Prepare the devices of all the allocation's resources. One `Prepared` answers."""

    allocation: AllocationKey
    token: Token


class Unprepare(Struct, frozen=True, kw_only=True):
    """Wait for the processes that the worker left behind, if it asked for that. Take the allocation's devices back, and
    check that nobody uses them. One `Unprepared` answers."""

    allocation: AllocationKey
    token: Token


Command = Discover | Prepare | Unprepare

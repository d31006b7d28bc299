"""The core's values that are not on the wire: resource specifications, inventories, events, commands.

A resource specification is what the configuration says of one resource; an inventory is what its driver
last said of one host. Both are levels: after a restart they are observed anew.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from outfitter_proto.records import Deregister, Health, Heartbeat, Register, Source, Unwatched

NO_ITEMS: dict[str, Any] = {}
NO_NAMES: list[str] = []
"""What those records share that have nothing to say: a record's containers are never changed."""


class SpecState(enum.StrEnum):
    """Whether a configured resource is in effect."""

    OK = "ok"
    DISABLED = "disabled"
    NO_DRIVER = "no-driver"
    MISCONFIGURED = "misconfigured"


class OnFailure(enum.StrEnum):
    """What a worker gets when its resource's driver fails for good: `external-resource.<name>.on-failure`."""

    FAIL_WORKER = "fail-worker"
    NO_INFO = "no-info"
    WAIT = "wait"


class ResourceSpec(Struct, frozen=True, kw_only=True):
    """One configured resource, as the core needs it.

    `amount` is what a worker gets that names no resources (None: not known, the setting is wrong).
    `reason` explains any state but OK. `on_demand`: the driver has no inventory and is asked for each worker.
    `prepares`: grants go through `preparing`. `confirms`: releases go through `releasing`.
    `hint` is told to those who wait although the driver named enough devices.
    """

    name: str
    amount: int | None = None
    state: SpecState = SpecState.OK
    reason: str | None = None
    shared: bool = False
    on_failure: OnFailure = OnFailure.FAIL_WORKER
    on_demand: bool = False
    prepares: bool = False
    confirms: bool = False
    hint: str | None = None


class KnownDevice(Struct, frozen=True, kw_only=True):
    """One device with its canonical id, as the core needs it. See `outfitter_drivers.api.Device`."""

    id: str
    properties: dict[str, str]
    aliases: tuple[str, ...] = ()
    health: Health = Health.HEALTHY
    reason: str | None = None
    env: dict[str, str] = {}
    cdi: tuple[str, ...] = ()


Devices = dict[str, tuple[KnownDevice, ...]]
"""A grant's devices by resource."""


class DriverFailure(Struct, frozen=True, kw_only=True):
    """A driver that could not report: for now, or until somebody changes something.

    `at_least`: whoever wants fewer devices is not concerned. The core sets it for drivers that are asked on demand.
    """

    reason: str
    permanent: bool = False
    at_least: int = 0


# --- events: what the core is told ---------------------------------------------------------------------


class Incoming(Struct, frozen=True, gc=False):
    """A message of the registrations topic that concerns one of this writer's hosts. `warnings` are for the record."""

    message: Register | Heartbeat | Deregister
    source: Source
    warnings: Sequence[str] = ()


class DriverReport(Struct, frozen=True, kw_only=True):
    """A driver's whole inventory of one host, or its failure. For an on-demand driver `asked` is the amount
    that the devices answer to; a failure leaves what was known before in place but grants nothing of it."""

    host: str
    resource: str
    devices: tuple[KnownDevice, ...] = ()
    failure: DriverFailure | None = None
    asked: int = 0


class DriverRetry(Struct, frozen=True, kw_only=True):
    """The delay after an on-demand driver's failure is over: ask it again if anybody waits for it. Due after every
    temporary failure, and after any where `on-failure` is `wait`; once for several that came meanwhile."""

    host: str
    resource: str


class OwnerDied(Struct, frozen=True, kw_only=True):
    """An allocation's owner process is known to be dead."""

    allocation: str
    detail: str


class OwnerUnwatched(Struct, frozen=True, kw_only=True):
    """An allocation's owner process cannot be watched, or not be told from others: a lease of `lease_s` decides where
    the worker asked for none. `reason` says why, for people."""

    allocation: str
    code: Unwatched
    reason: str
    lease_s: float


class LeaseExpired(Struct, frozen=True, kw_only=True):
    """An allocation's lease and grace have ended in silence, judged by a manager that hears."""

    allocation: str


class Prepared(Struct, frozen=True, kw_only=True):
    """`Prepare` ended: well (`error` None) or not."""

    allocation: str
    token: int
    error: str | None = None


class Unprepared(Struct, frozen=True, kw_only=True):
    """`Unprepare` ended well. `confirmed`: an in-use check said that nobody uses the devices any more."""

    allocation: str
    token: int
    confirmed: bool


class ReleaseDelayed(Struct, frozen=True, kw_only=True):
    """`Unprepare` cannot end yet: `words` say why, as the driver does. It is told when that changes, and not too often;
    whoever waits for the devices is to find it in the record."""

    allocation: str
    token: int
    words: str


class Tick(Struct, frozen=True, kw_only=True):
    """Time has passed on `host`: look at wait deadlines and retention."""

    host: str


class Reschedule(Struct, frozen=True, kw_only=True):
    """Look at everything of `host` again: its queue, and what holders were told of their devices. It goes on where
    a larger effect was cut, and is due once after a restore. `cause` is what history says of its steps. Not `whole`: at
    those only who have not been looked at since something was said that may concern them."""

    host: str
    cause: str = "reschedule"
    whole: bool = True


Event = (
    Incoming
    | DriverReport
    | DriverRetry
    | OwnerDied
    | OwnerUnwatched
    | LeaseExpired
    | Prepared
    | Unprepared
    | ReleaseDelayed
    | Tick
    | Reschedule
)


# --- commands: what the core wants done, after the commit ----------------------------------------------


class Discover(Struct, frozen=True, kw_only=True):
    """Ask an on-demand driver for `amount` devices (what is held included), at least `least` of them."""

    host: str
    resource: str
    amount: int
    least: int
    allocation: str


class Prepare(Struct, frozen=True, kw_only=True):
    """Make the allocation's devices ready: all its resources, one `Prepared` in answer."""

    allocation: str
    token: int


class Unprepare(Struct, frozen=True, kw_only=True):
    """Take the allocation's devices back and check that nobody uses them: one `Unprepared` in answer."""

    allocation: str
    token: int


Command = Discover | Prepare | Unprepare

"""Every message and record on the wire, as frozen msgspec structs.

Versions only add: a new field gets a default, no field changes its type, and readers skip unknown types. `state` and
the `*_code` fields are plain strings, so that this version can read states of later ones; `AllocationState` lists those
that it writes.

The text under a field describes it in `outfitter schema`, too.

Units: `*_s` are seconds (float), times are UTC datetimes (RFC 3339 with `Z` on the wire), `*_ticks` are
clock ticks as in field 22 of proc(5) `/proc/<pid>/stat`.
"""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated, Any, NewType

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from outfitter_proto import keys

# --- values: names, amounts, states, codes ---------------------------------------------------------------

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

MAX_CLAUSES = 32
"""Most properties in `where` of one resource."""

MAX_SAME = 4
"""Most properties in `same` of one resource."""

MAX_CLAUSE_BYTES = 4096
"""Limit of `where` and `same` of all resources of a registration together, in bytes of JSON."""

MAX_BOOT_ID = 64
"""Most characters; Linux's boot ids have 36."""

MAX_KERNEL_NUMBER = 2**64 - 1
"""The largest start time or inode of a kernel: 64 bits without a sign."""

MAX_REASON = 256
"""How many characters are kept of the reason of a deregistration or an order. A longer one is cut, not refused."""

Name = Annotated[str, Meta(extra_json_schema={"pattern": NAME_PATTERN})]
"""`codec.decode_registration` checks its pattern. In msgspec the check would take half of the decoding time."""
Amount = Annotated[int, Meta(ge=1, le=MAX_AMOUNT)]
Seconds = Annotated[float, Meta(gt=0, le=366 * 86_400)]
KernelNumber = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": MAX_KERNEL_NUMBER})]
"""`outfitter_proto.codec.bounds` checks its upper bound, because msgspec's bounds have 63 bits."""
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
    CORDONED = "cordoned"
    USED_BY_STRANGER = "used-by-stranger"
    PLACEMENT_NOT_FOUND = "placement-not-found"
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


# --- registrations: the messages of workers --------------------------------------------------------------
#
# These structs forbid unknown fields, so that the codec notices them at no cost. It accepts the message nevertheless:
# see `outfitter_proto.codec.unknown`.


ClauseValue = str | int
"""What a property is compared with. There are no fractions: 8.10 as a number is 8.1, so write it as text."""


class Condition(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """What one property of a device must be. All that is said must hold; see `outfitter_proto.clauses`."""

    is_: ClauseValue | tuple[ClauseValue, ...] | UnsetType = msgspec.field(name="is", default=UNSET)
    """It is this, or one of these. `*` stands for any text, `?` for one character."""
    not_: ClauseValue | tuple[ClauseValue, ...] | UnsetType = msgspec.field(name="not", default=UNSET)
    """It is not this, and none of these. A device without the property meets this."""
    min: ClauseValue | UnsetType = UNSET
    """It is a number, and at least this one: `40Gi`, `8.9`, 2."""
    max: ClauseValue | UnsetType = UNSET
    """As `min`: at most this one."""
    exists: bool | UnsetType = UNSET
    """Whether the device has the property."""


Clause = ClauseValue | tuple[ClauseValue, ...] | Condition
"""A value or a list is short for `is`."""


OBEYED = ("where", "same")
"""What `ManagerIdentity.obeys` lists."""

Where = Annotated[dict[str, Clause], Meta(extra_json_schema={"maxProperties": MAX_CLAUSES})]
Same = Annotated[tuple[str, ...], Meta(extra_json_schema={"maxItems": MAX_SAME})]


class ResourceRequest(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """The requested number of devices of one resource, and which of them."""

    amount: Amount
    where: Where | UnsetType | None = UNSET
    """What each device must be, by property. Left out or null: as the manager is configured; empty: any device will do.
    """
    same: Same | UnsetType | None = UNSET
    """Properties of which all devices have a value in common. Left out or null: as the manager is configured."""


class Owner(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A process, identified beyond PID reuse, PID namespaces and reboots."""

    pid: Annotated[int, Meta(ge=1, le=2**31)]
    start_ticks: KernelNumber
    """Field 22 of proc(5) `/proc/<pid>/stat`."""
    pid_ns: KernelNumber
    """The inode of `/proc/<pid>/ns/pid`."""
    boot_id: Annotated[str, Meta(extra_json_schema={"maxLength": MAX_BOOT_ID})]
    """The content of `/proc/sys/kernel/random/boot_id`."""
    time_ns: KernelNumber | UnsetType | None = UNSET
    """The inode of `/proc/self/ns/time` of the process that read `start_ticks`, because a time namespace shifts them.
    Left out or null: unknown, or none."""


class Survivors(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """Processes that a worker leaves behind keep its devices until they have ended.

    They have the variables OUTFITTER_HOST, OUTFITTER_WORKER and OUTFITTER_INCARNATION with the registration's values in
    their initial environment, or `host/worker/incarnation` in its OUTFITTER_OUTER.
    """

    uid: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    """Their real user id. Processes of others are none of them."""
    kill_after_s: Seconds | UnsetType | None = UNSET
    """The manager sends them SIGTERM, and SIGKILL after so many seconds. Left out or null: it only waits."""
    user_ns: Annotated[int, Meta(ge=0, le=2**32 - 1)] | UnsetType | None = UNSET
    """The inode of `/proc/self/ns/user` of the process that read `uid`, because a user namespace has user ids of its
    own. Left out or null: the manager's."""


Requests = Annotated[dict[Name, ResourceRequest], Meta(extra_json_schema={"maxProperties": MAX_RESOURCES})]
"""`outfitter_proto.codec.bounds` checks its bounds, as those of a registration's other parts."""


class Register(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="register", gc=False, forbid_unknown_fields=True
):
    """A worker requests devices."""

    host: Name
    worker: Name
    incarnation: Name
    resources: Requests | None = None
    """Left out or null: the amounts configured in the manager (Flink's rule)."""
    operators: Annotated[dict[Name, Requests], Meta(extra_json_schema={"maxProperties": MAX_OPERATORS})] | None = None
    """What each named operator sees; they name at most `MAX_OPERATOR_REQUESTS` resources together. Left out or null:
    every operator sees all of the worker's infos (Flink's rule)."""
    owner: Owner | None = None
    """The process whose end ends the allocation."""
    lease_s: Seconds | UnsetType | None = UNSET
    """Left out: the manager's default. Null: until deregistration or the owner's death."""
    wait_s: Annotated[float, Meta(ge=0, le=366 * 86_400)] | None = None
    """How long the worker waits for devices. Left out or null: until they are granted or the registration is withdrawn.
    """
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0
    labels: dict[str, str] = {}
    """Names and values together, they are at most `MAX_LABEL_BYTES` in UTF-8."""
    survivors: Survivors | UnsetType | None = UNSET
    """Left out or null: the devices are free when the allocation ends, whatever still runs. It needs an `owner`,
    because only a manager that can watch the owner's process finds the others."""
    heartbeats: bool | UnsetType = UNSET
    """False: nobody sends any for this worker. Then no lease runs: only the owner's end or a deregistration ends the
    allocation, however long the manager cannot see the owner's process. It counts only with an `owner`. Left out or
    true: the lease decides where nobody watches the owner."""


class Heartbeat(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="heartbeat", gc=False, forbid_unknown_fields=True
):
    """A worker is alive: its lease starts again."""

    host: Name
    worker: Name
    incarnation: Name


class Deregister(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="deregister", gc=False, forbid_unknown_fields=True
):
    """A worker gives back its devices."""

    host: Name
    worker: Name
    incarnation: Name | None = None
    """Left out or null: the current one."""
    reason: Annotated[str, Meta(extra_json_schema={"maxLength": MAX_REASON})] | None = None
    """The manager keeps its first `MAX_REASON` characters."""


Registration = Register | Heartbeat | Deregister


# --- the ledger: managers' records of allocations, hosts, devices and themselves -------------------------


class Source(Struct, frozen=True, kw_only=True, gc=False):
    """The place of an incarnation's first registration in the registrations topic."""

    partition: int
    offset: int


class ResourceChoice(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Which devices of a resource a worker takes."""

    where: dict[str, Clause] = {}
    """As in `ResourceRequest`."""
    same: list[str] = []
    """As in `ResourceRequest`."""


class ResolvedRequest(Struct, frozen=True, kw_only=True, gc=False):
    """The registration, and the values that the manager resolved when it decided.

    A restore uses this, and neither the registrations nor current defaults.
    """

    amounts: dict[str, int]
    """Devices per resource."""
    resources: Requests | None = None
    operators: dict[str, Requests] | None = None
    owner: Owner | None = None
    lease_s: float | None = None
    """Null: no lease."""
    wait_s: float | None = None
    priority: int = 0
    labels: dict[str, str] = {}
    survivors: Survivors | UnsetType = UNSET
    heartbeats: bool | UnsetType = UNSET
    """False: nobody sends any. Left out: as true."""
    choices: dict[str, ResourceChoice] | UnsetType = UNSET
    """Which devices the worker takes of a resource, from the registration or the manager's configuration. `resources`
    and `operators` do not repeat it. Left out, or without a resource: any device."""

    @property
    def waits_for_owner(self) -> bool:
        """Whether only the owner's end or a deregistration ends the allocation, and never a lease."""
        return self.heartbeats is False and self.owner is not None


class OperatorShare(Struct, frozen=True, kw_only=True, gc=False):
    """A named operator's share of its worker's devices."""

    resources: dict[str, list[str]]
    """Device ids by resource."""
    env: dict[str, str] = {}
    cdi: list[str] = []
    """Names in the Container Device Interface."""
    shared: list[str] | UnsetType = UNSET
    """The shared resources that the operator sees, too. `Allocation.common` has their contents, once for all operators.
    Left out: this share has them itself."""


class Unavailable(Struct, frozen=True, kw_only=True, gc=False):
    """Why a resource of a granted worker has no infos (Flink returns an empty set)."""

    code: str
    reason: str


class PoolUse(Struct, frozen=True, array_like=True, gc=False):
    """What one allocation uses of one pool, as `[amount, total, word]`.

    Each device has a pool, under one of its names. Who has the device alone uses all of it. The uses of a pool add up
    to at most its total, and those with a word all have the same one. An allocation does not compete with itself.
    """

    amount: int
    total: int
    word: str = ""
    """`shared`: it shares the device. `parts`: it has a part of the device. `replicas`: the device is lent several
    times. Several of them are joined by `+`, and agree with no other. Empty: it agrees with any."""


class Allocation(Struct, frozen=True, kw_only=True, tag_field="type", tag="allocation", gc=False):
    """The answer to one incarnation: the record under `<host>/<worker>/<incarnation>`."""

    host: str
    worker: str
    incarnation: str
    state: str
    request: ResolvedRequest
    since: Utc
    """When the record came into its state."""
    writer: str
    """Of this version of the record."""
    commit: CommitNumber
    """The number of the writer's commit."""
    source: Source
    """The incarnation's first registration."""
    token: Token | None = None
    """The grant's fencing token. Null: there was no grant yet."""
    resources: dict[str, list[dict[str, str]]] = {}
    """The infos by resource, as string properties with at least `id`, `index` and `local_index`."""
    operators: dict[str, OperatorShare] = {}
    """The share of each named operator."""
    env: dict[str, str] = {}
    """The whole worker's variables."""
    cdi: list[str] = []
    """The whole worker's names in the Container Device Interface."""
    shared: list[str] = []
    """The resources whose devices other workers may have, too. All others are exclusive."""
    prepared: list[str] | UnsetType = UNSET
    """The exclusive resources whose drivers prepare devices or take them back. Left out: none."""
    unavailable: dict[str, Unavailable] = {}
    """The granted resources without infos."""
    reason: str | None = None
    """Why the record is in its state, for people."""
    reason_code: str | None = None
    """The same for programs: a `ReasonCode`."""
    queue_position: int | None = None
    wait_until: Utc | None = None
    """When a pending record gives up, by the clock on the wall."""
    outcome: str | None = None
    """The next state of a `releasing` record: `ended` or `failed`."""
    aliases: dict[str, list[str]] | UnsetType = UNSET
    """The other names of devices by id, from the drivers of all resources. A device held under one name is held under
    all."""
    unwatched: str | UnsetType = UNSET
    """Why the manager does not watch the owner's process (see `Unwatched`). It is set if the host's record does not
    show this to the worker, or if the worker requested no lease: then `request.lease_s` is the manager's default, and
    the worker must send heartbeats."""
    warnings: list[str] | UnsetType = UNSET
    """Sentences about the registration, such as unknown fields."""
    delayed_by: str | UnsetType = UNSET
    """Why a `releasing` record's devices are not free yet: their driver's words, or the processes that the worker left
    behind. `reason` ends with it. Empty: nothing that anybody waits for any more."""
    common: dict[str, OperatorShare] | UnsetType = UNSET
    """By shared resource, the share of all operators that name it in `OperatorShare.shared`."""
    uses: dict[str, PoolUse] | UnsetType = UNSET
    """What it uses of devices' pools, by a name of each device, where `resources` and `shared` do not say it already:
    they say the whole pool of each exclusive device, and `[1, 720720, "shared"]` of each shared one."""

    @property
    def key(self) -> keys.AllocationKey:
        return keys.allocation_key(self.host, self.worker, self.incarnation)


class InventoryDevice(Struct, frozen=True, kw_only=True):
    """One device as reported by its driver."""

    id: str
    health: str = Health.HEALTHY
    reason: str | None = None
    properties: dict[str, str] = {}
    cordon: str | UnsetType = UNSET
    """An order that keeps it from being lent (see `Cordon`). Left out: there is none."""
    used_by: str | UnsetType = UNSET
    """A process that keeps it from being lent, because it uses the device, and the device was not lent to it. Left out:
    there is none."""


class ResourceInventory(Struct, frozen=True, kw_only=True):
    """One resource of one host: its driver's devices, or why there are none."""

    state: str
    """`reported`, `not-reported`, `driver-failed`, `disabled`, `no-driver` or `misconfigured`."""
    reason: str | None = None
    amount: int | None = None
    """The configured amount per worker."""
    sharing: str = "exclusive"
    """`exclusive` or `shared`."""
    devices: list[InventoryDevice] = []
    """At most `MAX_LISTED_DEVICES` of them, in the driver's order."""
    total: int | UnsetType = UNSET
    """The number of all devices."""
    healthy: int | UnsetType = UNSET
    """The number of healthy devices."""
    cordoned: int | UnsetType = UNSET
    """The number of devices that an order keeps from being lent, healthy or not. Left out: 0."""
    names: list[list[str]] | UnsetType = UNSET
    """All names of each device with several names. After a restart the former names stay until the driver has reported.
    """
    parts: dict[str, list[str]] | UnsetType = UNSET
    """The devices that are parts of others, by those others: of a GPU its MIG instances. They stay as `names` do. Left
    out: there are none."""
    replicas: int | UnsetType = UNSET
    """To how many workers each device is lent at once. Left out: to one."""
    on_demand: bool | UnsetType = UNSET
    """The driver has no inventory, and the manager calls it for each worker. Left out: it has one."""
    known: list[str] | UnsetType = UNSET
    """Names of devices that were known before. It is set while a worker holds a device that is no longer reported: a
    new device may be the same one under another name, and is held back. After a restart the former names stay until the
    driver has reported. Left out: all devices are known."""
    unwell: dict[str, Utc | None] | UnsetType = UNSET
    """The devices that are ill (null), or were so: from when each is lent again if it stays well. Some of them may be
    named no longer. After a restart the former ones stay until the driver has reported. Left out: there is none."""
    names_left_out: int | UnsetType = UNSET
    """Version 0.2 had no room for the names of so many more devices. Nobody writes it any more."""
    names_digest: str | UnsetType = UNSET
    """The digest of all names, which version 0.2 wrote with `names_left_out`."""


MAX_LISTED_DEVICES = 256
"""Most devices in a host's record, to keep the record within the topic's limit even with thousands of devices."""


class ManagerIdentity(Struct, frozen=True, kw_only=True, gc=False):
    """The manager of a host."""

    instance: str
    """A new name for each run of a manager."""
    version: str
    """Its Outfitter version."""
    since: Utc
    """When it took the host."""
    machine_id: str | None = None
    """The content of `/etc/machine-id`. Null: unknown."""
    boot_id: str | None = None
    """As in `Owner`: the manager watches processes with the same `boot_id`, `pid_ns` and `time_ns`."""
    stopped_at: Utc | None = None
    """When it stopped in order. Null: it goes on, or was killed."""
    pid_ns: int | UnsetType | None = UNSET
    """See `boot_id`."""
    time_ns: int | UnsetType | None = UNSET
    """See `boot_id`."""
    obeys: list[str] | UnsetType = UNSET
    """What it obeys in a registration, of what version 0.2 ignores: `where` and `same`. Left out: nothing."""

    def watches(self, owner: Owner) -> bool:
        """Whether it can watch this process, by this record. `Allocation.unwatched` overrides it."""
        return _can_watch(self, owner)


class Host(Struct, frozen=True, kw_only=True, tag_field="type", tag="host"):
    """A host's inventory and its manager: the record under `@host/<host>`."""

    host: str
    manager: ManagerIdentity
    since: Utc
    resources: dict[str, ResourceInventory] = {}

    @property
    def key(self) -> keys.HostKey:
        return keys.host_key(self.host)


class Device(Struct, frozen=True, kw_only=True, tag_field="type", tag="device", gc=False):
    """The state of one device apart from allocations: the record under `@device/<host>/<encoded id>`."""

    host: str
    id: str
    since: Utc
    state: str
    reason: str | None = None

    @property
    def key(self) -> keys.DeviceKey:
        return keys.device_key(self.host, self.id)


class Cordon(Struct, frozen=True, kw_only=True, tag_field="type", tag="cordon", gc=False):
    """An operator's order that is in effect: the record under `@cordon/<host>/<order>`, until the order has ended.

    Devices to which it applies are lent to nobody, under none of their names. Whoever has one keeps it.
    """

    host: str
    order: str
    """The id of the order; see `CordonOrder`."""
    author: str
    """Who gave it, as that one says: no proof."""
    reason: str
    since: Utc
    """When the manager took it."""
    resource: str | UnsetType = UNSET
    """It applies to the devices of this resource. Left out: to those of all."""
    device: str | UnsetType = UNSET
    """It applies to the device with this name. Left out: to all."""
    until: Utc | UnsetType = UNSET
    """When it ends by itself, by the manager's clock. Left out: it does not."""

    @property
    def key(self) -> keys.CordonKey:
        return keys.cordon_key(self.host, self.order)


class InputPosition(Struct, frozen=True, kw_only=True, gc=False):
    """The input of a commit."""

    topic_id: str
    """The id of the registrations topic, which changes if the topic is created again."""
    partition: int
    from_: int = msgspec.field(name="from")
    """The first offset."""
    to: int
    """The offset after the last one, the next to read."""
    base: int | UnsetType = UNSET
    """Added to an offset, it gives `Source.offset`. It grows when the topic is created again, so that later messages
    always have higher numbers. Left out: 0."""
    begin: int | UnsetType = UNSET
    """Of a host: the first offset that its managers answer. Earlier messages are the sweeper's. Left out: 0."""
    claimed: int | UnsetType = UNSET
    """Of a sweeper: messages before this offset without a manager at the time of writing become dead letters. Left out:
    `to`."""
    ahead: dict[str, int] | UnsetType = UNSET
    """Of a partition: hosts with their messages decided up to an offset beyond `to`, past another host's flood. Left
    out: none."""

    @property
    def reach(self) -> int:
        """The offset after everything that is decided, of any host."""
        return max([self.to, *(self.ahead or {}).values()])


class Era(Struct, frozen=True, kw_only=True, gc=False):
    """See `Growth`."""

    partitions: int
    until: int


class Growth(Struct, frozen=True, kw_only=True, gc=False):
    """Version 0.2 added partitions. It sent messages before the offset `until` of the input to other partitions, where
    they are answered. Nobody writes or reads it any more, except for the checker."""

    partitions: int
    since: int | UnsetType = UNSET
    until: int | UnsetType = UNSET
    earlier: list[Era] | UnsetType = UNSET


class OrdersPosition(Struct, frozen=True, kw_only=True, gc=False):
    """How far a manager has read operators' orders. What they ask of its hosts is in the ledger."""

    topic_id: str
    """The id of the control topic, which changes if the topic is created again."""
    to: int
    """The next offset."""


class Checkpoint(Struct, frozen=True, kw_only=True, tag_field="type", tag="checkpoint", gc=False):
    """A writer's position and counters: the record under `@checkpoint/<writer>`, last of each ledger batch."""

    writer: str
    instance: str
    """As in `ManagerIdentity`."""
    cluster: str
    scope: str
    """`host` or `cluster`."""
    commit: CommitNumber
    """The number of this writer's transactions."""
    token: Token
    """The last fencing token that it assigned."""
    input: InputPosition
    """The decided messages."""
    at: Utc
    machine_id: str | None = None
    """As in `ManagerIdentity`."""
    boot_id: str | None = None
    """As in `ManagerIdentity`."""
    format: int = 1
    """Of the ledger. A manager refuses a newer one."""
    snapshot: Utc | UnsetType = UNSET
    """When the newest complete snapshot in history was begun, from which a replay of later times starts. Left out:
    there is none."""
    pid_ns: int | UnsetType | None = UNSET
    """As in `ManagerIdentity`."""
    time_ns: int | UnsetType | None = UNSET
    """As in `ManagerIdentity`."""
    partitions: int | UnsetType = UNSET
    """The topics' number of partitions, which determines a host's partition. 0: records are missing yet, because a
    restore is under way, or version 0.2 has moved them in part. Left out: by earlier versions, and by sweepers."""
    ledger_id: str | UnsetType = UNSET
    """The id of the ledger's topic, or `backup/<time>` if `outfitter restore` wrote it from a backup of that time. Left
    out: by earlier versions."""
    ledger_start: int | UnsetType = UNSET
    """The first offset of the ledger's partition. Left out: 0, which compaction does not change. Otherwise records were
    deleted, and an operator made this manager continue without them."""
    grown: Growth | UnsetType = UNSET
    """Of version 0.2."""
    beat_s: float | UnsetType = UNSET
    """The writer says every so many seconds in the topic of managers that it lives (see `Beat`). Left out: it does not,
    so its silence there means nothing."""
    lease_grace_s: float | UnsetType = UNSET
    """The writer ends a lease no sooner than so many seconds after its time. Left out: unknown."""
    needs: list[str] | UnsetType = UNSET
    """What a manager must know to work on a ledger of format 2. One that lacks any of it refuses the ledger."""
    orders: OrdersPosition | UnsetType = UNSET
    """Which operators' orders this commit and those before it have taken. Left out: the writer has read none yet."""
    orders_unread: str | UnsetType = UNSET
    """Why the writer cannot read operators' orders. What is in effect stays. Left out: it can, or is of version 0.2."""

    @property
    def key(self) -> keys.CheckpointKey:
        return keys.checkpoint_key(self.writer)

    def watches(self, owner: Owner) -> bool:
        """Whether this writer can watch this process; see `ManagerIdentity.watches`."""
        return _can_watch(self, owner)


def _can_watch(manager: ManagerIdentity | Checkpoint, owner: Owner) -> bool:
    if (manager.boot_id, manager.pid_ns) != (owner.boot_id, owner.pid_ns):
        return False
    return manager.time_ns is UNSET or owner.time_ns in (UNSET, None) or manager.time_ns == owner.time_ns


StateRecord = Host | Device | Cordon
"""Records that are neither allocations nor checkpoints. History has them as `Put`."""
LedgerRecord = Allocation | StateRecord | Checkpoint


# --- history: each change of the ledger, with the reason. Dead letters: messages without effect ----------


class Transition(Struct, frozen=True, kw_only=True, tag_field="type", tag="transition", gc=False):
    """One step of one allocation: its cause, the new record, and the reason. Key: the allocation's key."""

    at: Utc
    """When the manager decided it."""
    host: str
    worker: str
    incarnation: str
    event: str
    """The cause: `register`, `deregister`, `lease-expired`, `owner-died`, `driver-report`, …"""
    to: str
    """The state after it."""
    explanation: str
    """The reason, for people."""
    record: Allocation | msgspec.Raw
    from_: str | None = msgspec.field(name="from", default=None)
    """The state before it. Null: the allocation is new."""
    source: Source | None = None
    """The message that was the cause, if one was."""
    confirmed: bool | None = None
    """Of a release: whether an in-use check found the devices unused. Of a grant: false if the driver, when it last
    looked, could not tell who uses them. Null: the step is none of these."""


class Note(Struct, frozen=True, kw_only=True, tag_field="type", tag="note", gc=False):
    """An event of a whole host or writer and not of an allocation (input lost, start, stop)."""

    at: Utc
    writer: str
    event: str
    explanation: str
    host: str | UnsetType = UNSET
    """The host that it is about. Left out: the writer's, if it has one."""
    device: str | UnsetType = UNSET
    """The device that it is about. Left out: it is about no single device."""

    @property
    def about(self) -> str | None:
        """The host that it is about, or None."""
        return keys.writer_names(self.writer).host if self.host is UNSET else self.host


class Refresh(Struct, frozen=True, kw_only=True, tag_field="type", tag="refresh", gc=False, omit_defaults=True):
    """A change of an allocation's record without a step: its reason, its infos. Key: the allocation's key."""

    at: Utc
    host: str
    worker: str
    incarnation: str
    writer: str
    event: str
    """As in `Transition`."""
    explanation: str
    changed: dict[str, Any]
    """The new values of the changed fields."""
    source: Source | None = None
    """As in `Transition`."""


class Put(Struct, frozen=True, kw_only=True, tag_field="type", tag="put", gc=False):
    """The new version of another ledger record than an allocation's, such as a host's."""

    writer: str
    key: str
    """Its key in the ledger, and also this record's key."""
    record: StateRecord | msgspec.Raw


class Snapshot(Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot", gc=False, omit_defaults=True):
    """A piece of a writer's state: ledger records by key, as they are after this commit. Key: the writer.

    A large state is spread over several commits. It is complete with the last piece and all changes since the first
    one. History has these changes as usual; records that are new since the first piece are in no piece.
    """

    writer: str
    begun: CommitNumber
    """The number of the commit with the first piece."""
    part: int
    """Counts pieces from 0."""
    records: dict[str, msgspec.Raw]
    last: bool = False
    """This is the last piece."""


class Commit(Struct, frozen=True, kw_only=True, tag_field="type", tag="commit", gc=False, omit_defaults=True):
    """The end of one transaction in history. Key: the writer."""

    writer: str
    checkpoint: Checkpoint | msgspec.Raw
    """The ledger's."""
    positions: dict[str, int] = {}
    """The changed queue positions by allocation key. These records also get the checkpoint's `commit` and `writer`, and
    no other change."""
    dropped: list[str] = []
    """The keys deleted from the ledger."""


HistoryRecord = Transition | Note | Refresh | Put | Snapshot | Commit


class NobodysCode(enum.StrEnum):
    """Why a registration is unroutable: no manager would ever read it as its own."""

    NO_KEY = "no-key"
    UNREADABLE = "unreadable"
    BAD_KEY = "bad-key"
    WRONG_PARTITION = "wrong-partition"
    NO_MANAGER = "no-manager"


class MessageSource(Struct, frozen=True, kw_only=True, gc=False):
    """The place of a message."""

    topic: str
    partition: int
    offset: int


class DeadLetter(Struct, frozen=True, kw_only=True, tag_field="type", tag="dead-letter", gc=False):
    """A message that the manager could not understand or obey. Key: `topic/partition/offset`."""

    at: Utc
    writer: str
    source: MessageSource
    reason: str
    length: int
    """Of the whole message, in bytes."""
    sha256: str
    """Of the whole message."""
    body: bytes
    """At most 4 KiB of its bytes (base64 on the wire)."""
    message_key: str | None = None
    field: str | None = None
    """The JSON path of the wrong field, if any."""
    code: str | UnsetType = UNSET
    """Why a message is unroutable, see `NobodysCode`."""
    first: int | UnsetType = UNSET
    """Of an unreadable record batch: the letter stands for the offsets from this one to the source's."""
    count: int | UnsetType = UNSET
    """The letter stands for this many messages, of which this is the first. Left out: for this one only."""
    until: int | UnsetType = UNSET
    """All messages that the letter stands for are before this offset."""

    @property
    def key(self) -> str:
        return f"{self.source.topic}/{self.source.partition}/{self.source.offset}"


MAX_DEAD_LETTER_BODY = 4 * 1024


# --- signs of life of managers, in a topic of their own that everybody may do without --------------------


class Beat(Struct, frozen=True, kw_only=True, tag_field="type", tag="beat", gc=False):
    """The commit loop of a writer's tenure lives: the record under the writer's name. Its append time says when it
    lived."""

    writer: str
    instance: str
    """As in `ManagerIdentity`."""
    version: str
    """As in `ManagerIdentity`."""
    sweeps: bool = False
    """It also writes the dead letters of hosts without a manager, wherever nobody else must."""
    stopped_at: Utc | UnsetType = UNSET
    """When it stopped in order. Left out: it goes on."""
    process: Owner | UnsetType = UNSET
    """The manager's, if it watches processes itself, so that others on its machine can see its end."""

    @property
    def key(self) -> str:
        return self.writer


# --- operators' orders, in a topic of their own that everybody may do without -----------------------------


class CordonOrder(Struct, frozen=True, kw_only=True, tag_field="type", tag="cordon-order", gc=False):
    """An operator's order: lend no devices of a host, a resource or one device. It is the record under its id.

    It stands until a record under the same id says when it ended, or until its time is over. A tombstone means nothing:
    a manager that has taken the order keeps to it. The devices that several orders name are lent again when all of
    these have ended.
    """

    id: Name
    host: Name
    author: str
    """Who gave it, as that one says: no proof."""
    reason: str
    """The manager keeps its first `MAX_REASON` characters."""
    at: Utc
    """When it was given, by the author's clock."""
    resource: str | UnsetType | None = UNSET
    """Only devices of this resource. Left out or null: of all."""
    device: str | UnsetType | None = UNSET
    """Only the device with this name. Left out or null: all."""
    until: Utc | UnsetType | None = UNSET
    """When it ends by itself, by the manager's clock. Left out or null: it does not."""
    ended_at: Utc | UnsetType | None = UNSET
    """When somebody ended it. Left out or null: it stands."""
    ended_by: str | UnsetType | None = UNSET
    """Who ended it, as that one says."""

    @property
    def key(self) -> str:
        return self.id

    def stands(self, now: datetime) -> bool:
        """Whether it has not ended."""
        return not self.ended_at and (not self.until or now < self.until)

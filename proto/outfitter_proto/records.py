"""Every message and record on the wire, as frozen msgspec structs.

Versions only add: a new field gets a default, no field changes its type, and readers skip unknown types. `state` and
the `*_code` fields are plain strings, so that this version can read states of later ones; `AllocationState` lists those
that it writes.

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


class ResourceRequest(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """The requested number of devices of one resource."""

    amount: Amount


class Owner(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A process, identified beyond PID reuse, PID namespaces and reboots.

    `start_ticks` is field 22 of proc(5) `/proc/<pid>/stat`, `pid_ns` the inode of `/proc/<pid>/ns/pid`,
    `boot_id` the content of `/proc/sys/kernel/random/boot_id`. `time_ns` is the inode of `/proc/self/ns/time` of the
    process that read `start_ticks`, because a time namespace shifts them; left out or null: unknown, or none.
    """

    pid: Annotated[int, Meta(ge=1, le=2**31)]
    start_ticks: KernelNumber
    pid_ns: KernelNumber
    boot_id: Annotated[str, Meta(extra_json_schema={"maxLength": MAX_BOOT_ID})]
    time_ns: KernelNumber | UnsetType | None = UNSET


class Survivors(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """Processes that a worker leaves behind keep its devices until they have ended.

    They are those of the user `uid` (their real user id) that have the variables OUTFITTER_HOST, OUTFITTER_WORKER and
    OUTFITTER_INCARNATION with the registration's values in their initial environment, or `host/worker/incarnation` in
    its OUTFITTER_OUTER. `kill_after_s`: the manager sends them SIGTERM, and SIGKILL after so many seconds; left out or
    null: it only waits. `user_ns` is the inode of `/proc/self/ns/user` of the process that read `uid`, because a user
    namespace has user ids of its own; left out or null: the manager's.
    """

    uid: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    kill_after_s: Seconds | UnsetType | None = UNSET
    user_ns: Annotated[int, Meta(ge=0, le=2**32 - 1)] | UnsetType | None = UNSET


Requests = Annotated[dict[Name, ResourceRequest], Meta(extra_json_schema={"maxProperties": MAX_RESOURCES})]
"""`outfitter_proto.codec.bounds` checks its bounds, as those of a registration's other parts."""


class Register(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="register", gc=False, forbid_unknown_fields=True
):
    """A worker requests devices.

    `resources` left out means the amounts configured in the manager (Flink's rule).
    `operators` left out means that every operator sees all of the worker's infos (Flink's rule).
    `lease_s` left out means the manager's default; null means until deregistration or the owner's death.
    `wait_s` left out or null means: wait until granted or withdrawn.
    `survivors` left out or null means that the devices are free when the allocation ends, whatever still runs. It needs
    an `owner`: only a manager that can watch the owner's process finds the others.
    `heartbeats` false means that nobody sends any for this worker. Then no lease runs: only the owner's end or a
    deregistration ends the allocation, however long the manager cannot see the owner's process. It counts only with an
    `owner`. Left out or true: the lease decides where nobody watches the owner.
    `labels`, names and values together, are at most `MAX_LABEL_BYTES` in UTF-8; the operators name at most
    `MAX_OPERATOR_REQUESTS` resources together.
    """

    host: Name
    worker: Name
    incarnation: Name
    resources: Requests | None = None
    operators: Annotated[dict[Name, Requests], Meta(extra_json_schema={"maxProperties": MAX_OPERATORS})] | None = None
    owner: Owner | None = None
    lease_s: Seconds | UnsetType | None = UNSET
    wait_s: Annotated[float, Meta(ge=0, le=366 * 86_400)] | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0
    labels: dict[str, str] = {}
    survivors: Survivors | UnsetType | None = UNSET
    heartbeats: bool | UnsetType = UNSET


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
    """A worker gives back its devices. Without `incarnation` it ends the current one. The manager keeps the first
    `MAX_REASON` characters of `reason`."""

    host: Name
    worker: Name
    incarnation: Name | None = None
    reason: Annotated[str, Meta(extra_json_schema={"maxLength": MAX_REASON})] | None = None


Registration = Register | Heartbeat | Deregister


# --- the ledger: managers' records of allocations, hosts, devices and themselves -------------------------


class Source(Struct, frozen=True, kw_only=True, gc=False):
    """The place of an incarnation's first registration in the registrations topic."""

    partition: int
    offset: int


class ResolvedRequest(Struct, frozen=True, kw_only=True, gc=False):
    """The registration, and the values that the manager resolved when it decided.

    A restore uses this, and neither the registrations nor current defaults.
    `amounts`: devices per resource. `lease_s` null: no lease. `heartbeats` false: nobody sends any.
    """

    amounts: dict[str, int]
    resources: Requests | None = None
    operators: dict[str, Requests] | None = None
    owner: Owner | None = None
    lease_s: float | None = None
    wait_s: float | None = None
    priority: int = 0
    labels: dict[str, str] = {}
    survivors: Survivors | UnsetType = UNSET
    heartbeats: bool | UnsetType = UNSET

    @property
    def waits_for_owner(self) -> bool:
        """Whether only the owner's end or a deregistration ends the allocation, and never a lease."""
        return self.heartbeats is False and self.owner is not None


class OperatorShare(Struct, frozen=True, kw_only=True, gc=False):
    """A named operator's share of its worker's devices: device ids by resource, env and CDI names.

    `shared`: the shared resources that the operator sees, too. `Allocation.common` has their contents, once for all
    operators. Left out: this share has them itself.
    """

    resources: dict[str, list[str]]
    env: dict[str, str] = {}
    cdi: list[str] = []
    shared: list[str] | UnsetType = UNSET


class Unavailable(Struct, frozen=True, kw_only=True, gc=False):
    """Why a resource of a granted worker has no infos (Flink returns an empty set)."""

    code: str
    reason: str


class Allocation(Struct, frozen=True, kw_only=True, tag_field="type", tag="allocation", gc=False):
    """The answer to one incarnation: the record under `<host>/<worker>/<incarnation>`.

    `writer`: of this version of the record. `commit`: the number of the writer's commit.
    `source`: the incarnation's first registration.
    `token`: the grant's fencing token (null before the first grant).
    `resources`: the infos by resource, as string properties with at least `id`, `index` and `local_index`.
    `env` and `cdi`: the whole worker's variables and CDI names. `operators`: the share of each named operator.
    `unavailable`: the granted resources without infos.
    `since`: when the record came into its state. `reason`: why, for people; `reason_code`: for programs.
    `outcome`: the next state of a `releasing` record, `ended` or `failed`.
    `wait_until`: the wall time at which a pending record gives up.
    `shared`: the resources whose devices other workers may have, too; all others are exclusive.
    `aliases`: the other names of devices by id, from the drivers of all resources. A device held under one name is held
    under all.
    `delayed_by`: why a `releasing` record's devices are not free yet: their driver's words, or the processes that the
    worker left behind; `reason` ends with it. Empty: nothing that anybody waits for any more.
    `warnings`: sentences about the registration, such as unknown fields.
    `unwatched`: why the manager does not watch the owner's process (see `Unwatched`). It is set if the host's record
    does not show this to the worker, or if the worker requested no lease: then `request.lease_s` is the manager's
    default, and the worker must send heartbeats. `common`: by shared resource, the share of all operators that name it
    in `OperatorShare.shared`.
    """

    host: str
    worker: str
    incarnation: str
    state: str
    request: ResolvedRequest
    since: Utc
    writer: str
    commit: CommitNumber
    source: Source
    token: Token | None = None
    resources: dict[str, list[dict[str, str]]] = {}
    operators: dict[str, OperatorShare] = {}
    env: dict[str, str] = {}
    cdi: list[str] = []
    shared: list[str] = []
    prepared: list[str] | UnsetType = UNSET
    unavailable: dict[str, Unavailable] = {}
    reason: str | None = None
    reason_code: str | None = None
    queue_position: int | None = None
    wait_until: Utc | None = None
    outcome: str | None = None
    aliases: dict[str, list[str]] | UnsetType = UNSET
    unwatched: str | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    delayed_by: str | UnsetType = UNSET
    common: dict[str, OperatorShare] | UnsetType = UNSET

    @property
    def key(self) -> keys.AllocationKey:
        return keys.allocation_key(self.host, self.worker, self.incarnation)


class InventoryDevice(Struct, frozen=True, kw_only=True):
    """One device as reported by its driver."""

    id: str
    health: str = Health.HEALTHY
    reason: str | None = None
    properties: dict[str, str] = {}


class ResourceInventory(Struct, frozen=True, kw_only=True):
    """One resource of one host: its driver's devices, or why there are none.

    `state`: `reported`, `not-reported`, `driver-failed`, `disabled`, `no-driver` or `misconfigured`.
    `amount`: the configured amount per worker. `sharing`: `exclusive` or `shared`.
    `total` and `healthy`: the numbers of all and of healthy devices. `devices` lists at most `MAX_LISTED_DEVICES` of
    them, in the driver's order.
    `names`: all names of each device with several names. After a restart the former names stay until the driver has
    reported. `names_left_out` and `names_digest`: version 0.2 had no room for the names of so many more devices, and
    wrote a digest of all. Nobody writes them any more.
    `on_demand`: the driver has no inventory, and the manager calls it for each worker. Left out: it has one.
    `known`: names of devices that were known before. It is set while a worker holds a device that is no longer
    reported: a new device may be the same one under another name, and is held back. After a restart the former names
    stay until the driver has reported. Left out: all devices are known.
    """

    state: str
    reason: str | None = None
    amount: int | None = None
    sharing: str = "exclusive"
    devices: list[InventoryDevice] = []
    total: int | UnsetType = UNSET
    healthy: int | UnsetType = UNSET
    names: list[list[str]] | UnsetType = UNSET
    on_demand: bool | UnsetType = UNSET
    known: list[str] | UnsetType = UNSET
    names_left_out: int | UnsetType = UNSET
    names_digest: str | UnsetType = UNSET


MAX_LISTED_DEVICES = 256
"""Most devices in a host's record, to keep the record within the topic's limit even with thousands of devices."""


class ManagerIdentity(Struct, frozen=True, kw_only=True, gc=False):
    """The manager of a host. An orderly shutdown sets `stopped_at`.

    `instance`: a new name for each run of a manager. `version`: its Outfitter version. `since`: when it took the host.
    `machine_id`: the content of `/etc/machine-id`, null: unknown.
    `boot_id`, `pid_ns` and `time_ns` are as in `Owner`: the manager watches processes with the same three values.
    """

    instance: str
    version: str
    since: Utc
    machine_id: str | None = None
    boot_id: str | None = None
    stopped_at: Utc | None = None
    pid_ns: int | UnsetType | None = UNSET
    time_ns: int | UnsetType | None = UNSET

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


class InputPosition(Struct, frozen=True, kw_only=True, gc=False):
    """The input of a commit: offsets `from` (inclusive) to `to` (exclusive, the next to read).

    `topic_id`: the id of the registrations topic, which changes if the topic is created again.
    `base`: added to an offset, it gives `Source.offset`. It grows when the topic is created again, so that later
    messages always have higher numbers. Left out: 0. `begin` (of a host): the first offset that its managers answer;
    earlier messages are the sweeper's. Left out: 0. `claimed` (of a sweeper): messages before this offset without a
    manager at the time of writing become dead letters. Left out: `to`. `ahead` (of a partition): hosts with their
    messages decided up to an offset beyond `to`, past another host's flood. Left out: none.
    """

    topic_id: str
    partition: int
    from_: int = msgspec.field(name="from")
    to: int
    base: int | UnsetType = UNSET
    begin: int | UnsetType = UNSET
    claimed: int | UnsetType = UNSET
    ahead: dict[str, int] | UnsetType = UNSET

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


class Checkpoint(Struct, frozen=True, kw_only=True, tag_field="type", tag="checkpoint", gc=False):
    """A writer's position and counters: the record under `@checkpoint/<writer>`, last of each ledger batch.

    `commit`: the number of this writer's transactions. `token`: the last fencing token that it assigned.
    `instance` and `machine_id` are as in `ManagerIdentity`. `scope`: `host` or `cluster`. `input`: the decided
    messages. `format`: of the ledger; a manager refuses a newer one.
    `needs`: what a manager must know to work on a ledger of format 2. One that lacks any of it refuses the ledger.
    `snapshot`: when the newest complete snapshot in history was begun, from which a replay of later times starts. Left
    out: there is none.
    `boot_id`, `pid_ns` and `time_ns` are as in `ManagerIdentity`.
    `partitions`: the topics' number of partitions, which determines a host's partition (0: records are missing yet,
    because a restore is under way, or version 0.2 has moved them in part). `ledger_id`: the id of the ledger's topic,
    or `backup/<time>` if `outfitter restore` wrote it from a backup of that time. Both are left out by earlier
    versions, `partitions` by sweepers. `grown`: of version 0.2.
    `ledger_start`: the first offset of the ledger's partition. Left out: 0, which compaction does not change. Otherwise
    records were deleted, and an operator made this manager continue without them.
    `beat_s`: the writer says every so many seconds in the topic of managers that it lives (see `Beat`). Left out: it
    does not, so its silence there means nothing.
    `lease_grace_s`: the writer ends a lease no sooner than so many seconds after its time. Left out: unknown.
    """

    writer: str
    instance: str
    cluster: str
    scope: str
    commit: CommitNumber
    token: Token
    input: InputPosition
    at: Utc
    machine_id: str | None = None
    boot_id: str | None = None
    format: int = 1
    snapshot: Utc | UnsetType = UNSET
    pid_ns: int | UnsetType | None = UNSET
    time_ns: int | UnsetType | None = UNSET
    partitions: int | UnsetType = UNSET
    ledger_id: str | UnsetType = UNSET
    ledger_start: int | UnsetType = UNSET
    grown: Growth | UnsetType = UNSET
    beat_s: float | UnsetType = UNSET
    lease_grace_s: float | UnsetType = UNSET
    needs: list[str] | UnsetType = UNSET

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


StateRecord = Host | Device
"""Records that are neither allocations nor checkpoints. History has them as `Put`."""
LedgerRecord = Allocation | StateRecord | Checkpoint


# --- history: each change of the ledger, with the reason. Dead letters: messages without effect ----------


class Transition(Struct, frozen=True, kw_only=True, tag_field="type", tag="transition", gc=False):
    """One step of one allocation: its cause, the new record, and the reason. Key: the allocation's key.

    `from` and `to`: the states before and after it; `from` null: the allocation is new. `at`: when the manager decided
    it. `event` names the cause (`register`, `deregister`, `lease-expired`, `owner-died`, `driver-report`, …);
    `source` is set when the cause was a message. `explanation`: the reason, for people. `confirmed`: of a release,
    whether an in-use check found the devices unused; null: this step releases none.
    """

    at: Utc
    host: str
    worker: str
    incarnation: str
    event: str
    to: str
    explanation: str
    record: Allocation | msgspec.Raw
    from_: str | None = msgspec.field(name="from", default=None)
    source: Source | None = None
    confirmed: bool | None = None


class Note(Struct, frozen=True, kw_only=True, tag_field="type", tag="note", gc=False):
    """An event of a whole host or writer and not of an allocation (input lost, start, stop)."""

    at: Utc
    writer: str
    event: str
    explanation: str


class Refresh(Struct, frozen=True, kw_only=True, tag_field="type", tag="refresh", gc=False, omit_defaults=True):
    """A change of an allocation's record without a step: its reason, its infos. Key: the allocation's key.

    `changed` has the new values of the changed fields. `event` and `source` as in `Transition`.
    """

    at: Utc
    host: str
    worker: str
    incarnation: str
    writer: str
    event: str
    explanation: str
    changed: dict[str, Any]
    source: Source | None = None


class Put(Struct, frozen=True, kw_only=True, tag_field="type", tag="put", gc=False):
    """The new version of another ledger record than an allocation's, such as a host's. `key` is its key in the ledger
    and also this record's key."""

    writer: str
    key: str
    record: StateRecord | msgspec.Raw


class Snapshot(Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot", gc=False, omit_defaults=True):
    """A piece of a writer's state: ledger records by key, as they are after this commit. Key: the writer.

    A large state is spread over several commits. `begun` is the number of the commit with the first piece, `part`
    counts pieces from 0. The state is complete with the `last` piece and all changes since the first one. History has
    these changes as usual; records that are new since the first piece are in no piece.
    """

    writer: str
    begun: CommitNumber
    part: int
    records: dict[str, msgspec.Raw]
    last: bool = False


class Commit(Struct, frozen=True, kw_only=True, tag_field="type", tag="commit", gc=False, omit_defaults=True):
    """The end of one transaction in history. Key: the writer.

    `checkpoint`: the ledger's. `positions`: the changed queue positions by allocation key; these records also get the
    checkpoint's `commit` and `writer`, and no other change. `dropped`: the keys deleted from the ledger.
    """

    writer: str
    checkpoint: Checkpoint | msgspec.Raw
    positions: dict[str, int] = {}
    dropped: list[str] = []


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
    """A message that the manager could not understand or obey. Key: `topic/partition/offset`.

    `body` has at most 4 KiB of its bytes (base64 on the wire); `length` and `sha256` are of the whole message.
    `field` is the JSON path of the wrong field, if any. `code`: why a message is unroutable, see `NobodysCode`.
    `count`: the letter stands for this many messages, of which this is the first, and all are before the offset
    `until`. Left out: for this one only. `first`: an unreadable record batch, from this offset to the source's.
    """

    at: Utc
    writer: str
    source: MessageSource
    reason: str
    length: int
    sha256: str
    body: bytes
    message_key: str | None = None
    field: str | None = None
    code: str | UnsetType = UNSET
    first: int | UnsetType = UNSET
    count: int | UnsetType = UNSET
    until: int | UnsetType = UNSET

    @property
    def key(self) -> str:
        return f"{self.source.topic}/{self.source.partition}/{self.source.offset}"


MAX_DEAD_LETTER_BODY = 4 * 1024


# --- signs of life of managers, in a topic of their own that everybody may do without --------------------


class Beat(Struct, frozen=True, kw_only=True, tag_field="type", tag="beat", gc=False):
    """The commit loop of a writer's tenure lives: the record under the writer's name.

    `instance` and `version` are as in `ManagerIdentity`. `sweeps`: it also writes the dead letters of hosts without a
    manager, wherever nobody else must. `stopped_at`: when it stopped in order. Left out: it goes on. `process`: the
    manager's, if it watches processes itself, so that others on its machine can see its end. The record's append time
    says when it lived.
    """

    writer: str
    instance: str
    version: str
    sweeps: bool = False
    stopped_at: Utc | UnsetType = UNSET
    process: Owner | UnsetType = UNSET

    @property
    def key(self) -> str:
        return self.writer

"""Every message and record that goes over the wire, as frozen msgspec structs.

Evolution is additive only: a new field gets a default, no field changes its type, and readers skip types
they do not know. `state` and the `*_code` fields are plain strings so that a reader of this version can
read a state of a later one; `AllocationState` lists those this version writes.

Units: `*_s` are seconds (float), times are UTC datetimes (RFC 3339 with `Z` on the wire), `*_ticks` are
clock ticks as in field 22 of proc(5) `/proc/<pid>/stat`.
"""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

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


# --- registrations: what workers say ------------------------------------------------------------------

# These structs forbid unknown fields: so the codec notices them at no cost. Nobody is refused for them: unknown.py.


class ResourceRequest(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """How many devices of one resource are asked for."""

    amount: Amount


class Owner(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A process, by what cannot be confused after PID reuse, in another PID namespace or after a reboot.

    `start_ticks` is field 22 of proc(5) `/proc/<pid>/stat`, `pid_ns` the inode of `/proc/<pid>/ns/pid`,
    `boot_id` the content of `/proc/sys/kernel/random/boot_id`. `time_ns` is the inode of `/proc/self/ns/time` of the
    process that read `start_ticks`, which that time namespace shifts; left out or null: unknown, or there is none.
    """

    pid: Annotated[int, Meta(ge=1, le=2**31)]
    start_ticks: KernelNumber
    pid_ns: KernelNumber
    boot_id: Annotated[str, Meta(extra_json_schema={"maxLength": MAX_BOOT_ID})]
    time_ns: KernelNumber | UnsetType | None = UNSET


Requests = Annotated[dict[Name, ResourceRequest], Meta(extra_json_schema={"maxProperties": MAX_RESOURCES})]
"""Its bounds, as those of a registration's other parts, are checked where it comes in: see
`outfitter_proto.decoding.bounds`."""


class Register(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="register", gc=False, forbid_unknown_fields=True
):
    """A worker asks for devices.

    `resources` left out means the amounts that the manager is configured with (Flink's rule).
    `operators` left out means that every operator sees all of the worker's infos (Flink's rule).
    `lease_s` left out means the manager's default; null means until deregistration or the owner's death.
    `wait_s` left out or null means: wait until granted or withdrawn.
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


class Heartbeat(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="heartbeat", gc=False, forbid_unknown_fields=True
):
    """A worker is alive: its lease starts anew."""

    host: Name
    worker: Name
    incarnation: Name


class Deregister(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="deregister", gc=False, forbid_unknown_fields=True
):
    """A worker gives back what it holds. Without `incarnation` it ends the one that is current there. Of a `reason` the
    first `MAX_REASON` characters are kept."""

    host: Name
    worker: Name
    incarnation: Name | None = None
    reason: Annotated[str, Meta(extra_json_schema={"maxLength": MAX_REASON})] | None = None


Registration = Register | Heartbeat | Deregister


# --- the ledger: what managers say ---------------------------------------------------------------------


class Source(Struct, frozen=True, kw_only=True, gc=False):
    """Where in the registrations topic an incarnation's first registration stands."""

    partition: int
    offset: int


class ResolvedRequest(Struct, frozen=True, kw_only=True, gc=False):
    """The registration as it came, plus what was resolved when it was decided.

    Recovery reads this and neither earlier registrations nor today's defaults.
    `amounts` are devices per resource; `lease_s` null means no lease.
    """

    amounts: dict[str, int]
    resources: Requests | None = None
    operators: dict[str, Requests] | None = None
    owner: Owner | None = None
    lease_s: float | None = None
    wait_s: float | None = None
    priority: int = 0
    labels: dict[str, str] = {}


class OperatorShare(Struct, frozen=True, kw_only=True, gc=False):
    """What one named operator may use of its worker's devices: device ids by resource, env and CDI names.

    `shared` are the shared resources that the operator sees as well: `Allocation.common` says what is in them, once for
    all operators. Left out: what it sees of them is in this share itself.
    """

    resources: dict[str, list[str]]
    env: dict[str, str] = {}
    cdi: list[str] = []
    shared: list[str] | UnsetType = UNSET


class Unavailable(Struct, frozen=True, kw_only=True, gc=False):
    """Why a resource of a granted worker has no infos (Flink hands out an empty set here)."""

    code: str
    reason: str


class Allocation(Struct, frozen=True, kw_only=True, tag_field="type", tag="allocation", gc=False):
    """The answer to one incarnation: the record under `<host>/<worker>/<incarnation>`.

    `token` is the grant's fencing token (null before the first grant). `resources` are the infos by
    resource: string properties with at least `id`, `index` and `local_index`. `since` is when the record
    came into its state. `outcome` is where a `releasing` record is going: `ended` or `failed`.
    `wait_until` is the wall time at which a pending record gives up. `shared` names the resources whose
    devices others may have, too; all others are exclusive. `aliases` are all other names of those devices that
    have such, by id, whichever resource's driver connects them: what is held under one name is held under all.
    `delayed_by` is why a `releasing` record's devices are not free yet, in their driver's words; `reason` ends with it.
    `warnings` are sentences about the registration: fields in it that the manager does not know.
    `unwatched` is why the manager does not watch the owner's process (see `Unwatched`), where the worker cannot
    know that from the host's record or asked for no lease: `request.lease_s` is then the manager's default, and
    heartbeats are due.
    `common` has, by shared resource, what all operators that name it in `OperatorShare.shared` see of it.
    """

    host: str
    worker: str
    incarnation: str
    state: str
    request: ResolvedRequest
    since: Utc
    writer: str
    commit: int
    source: Source
    token: int | None = None
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
    def key(self) -> str:
        return f"{self.host}/{self.worker}/{self.incarnation}"


class InventoryDevice(Struct, frozen=True, kw_only=True):
    """One device as its driver reported it."""

    id: str
    health: str = Health.HEALTHY
    reason: str | None = None
    properties: dict[str, str] = {}


class ResourceInventory(Struct, frozen=True, kw_only=True):
    """One resource of one host: what its driver found, or why there is nothing.

    `state` is `reported`, `not-reported`, `driver-failed`, `disabled`, `no-driver` or `misconfigured`.
    `amount` is the configured amount per worker, `sharing` is `exclusive` or `shared`. Of `total` devices, `healthy`
    of them healthy, `devices` lists at most `MAX_LISTED_DEVICES`, as the driver orders them. `names` are all names of
    those that have several, of as many devices; until a driver has reported after a restart, as they were before it.
    `on_demand`: the driver has no inventory of its own, and is asked for each worker; left out: it has one.
    `known` are names of devices that were known before, as long as new ones may be held back: somebody has a device
    that is not reported any more, which a new one may be. Until a driver has reported after a restart, they are those
    that were known before it. Left out: all devices are known.
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


MAX_LISTED_DEVICES = 256
"""A host's record is one message: thousands of devices must not make it larger than the topic takes."""


class ManagerIdentity(Struct, frozen=True, kw_only=True, gc=False):
    """Who manages a host. `stopped_at` is set by an orderly shutdown.

    `boot_id`, `pid_ns` and `time_ns` are as in `Owner`: processes of the same three are watched by this manager.
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
        """Whether it can watch that process, as far as this record tells. `Allocation.unwatched` has the last word."""
        return _can_watch(self, owner)


class Host(Struct, frozen=True, kw_only=True, tag_field="type", tag="host"):
    """A host's inventory and its manager: the record under `@host/<host>`."""

    host: str
    manager: ManagerIdentity
    since: Utc
    resources: dict[str, ResourceInventory] = {}

    @property
    def key(self) -> str:
        return f"@host/{self.host}"


class Device(Struct, frozen=True, kw_only=True, tag_field="type", tag="device", gc=False):
    """What must outlive allocations about one device: the record under `@device/<host>/<encoded id>`."""

    host: str
    id: str
    since: Utc
    state: str
    reason: str | None = None

    @property
    def key(self) -> str:
        return f"@device/{self.host}/{quote(self.id, safe='')}"


class InputPosition(Struct, frozen=True, kw_only=True, gc=False):
    """The input that a commit consumed: offsets `from` (inclusive) to `to` (exclusive, the next to read).

    `base` is added to an offset to make a `Source.offset`: it is raised where an input begins again (a topic that was
    made anew), so that what comes later always has the higher number. Left out: 0. `begin` is a host's: the first
    offset that its managers answer for, what is before it being the sweeper's; left out: 0. `claimed` is the sweeper's:
    what is before this offset, and had no manager when that was written, is going to be a dead letter; left out: `to`.
    `ahead` is a partition's: hosts whose messages before the offset given are decided as well, although it is beyond
    `to` (another host's flood lies in between); left out: there are none.
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
        """The offset after everything that is decided, whosever it is."""
        return max([self.to, *(self.ahead or {}).values()])


class Era(Struct, frozen=True, kw_only=True, gc=False):
    """What lies in the input before the offset `until` was sent when there were so many `partitions`, or earlier."""

    partitions: int
    until: int


class Growth(Struct, frozen=True, kw_only=True, gc=False):
    """Partitions were added. What lies in the input before the offset `until` was sent when there were `partitions` (0:
    that is not known), or soon after: what was right by that number, and is not by a later one, was carried over and is
    answered there. `until` left out: that has not been done yet. Before the offset `since` nobody can have known of a
    later number (left out: 0). `earlier`: partitions had been added before, the newest first; left out: not known.
    """

    partitions: int
    since: int | UnsetType = UNSET
    until: int | UnsetType = UNSET
    earlier: list[Era] | UnsetType = UNSET


class Checkpoint(Struct, frozen=True, kw_only=True, tag_field="type", tag="checkpoint", gc=False):
    """A writer's position and counters: the record under `@checkpoint/<writer>`, last of each ledger batch.

    `commit` counts this writer's transactions, `token` is the last fencing token it gave out. `snapshot` is when the
    newest complete snapshot in history was begun: a replay of what came after it starts there. Left out: there is none.
    `boot_id`, `pid_ns` and `time_ns` are as in `ManagerIdentity`.
    `partitions` is how many the topics had, which with a host's name gives its place (0: its records are being moved to
    another one), and `ledger_id` the id of the topic that this was written to. Left out: a version before these wrote
    it, or a sweeper. `grown` is said of a partition by whoever looks after what is nobody's there. Left out: none were
    added that it knows of. `ledger_start` is the first offset of the ledger's partition. Left out: 0, which compaction
    leaves as it is; else somebody deleted records, and this manager was told to go on without them.
    """

    writer: str
    instance: str
    cluster: str
    scope: str
    commit: int
    token: int
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

    @property
    def key(self) -> str:
        return f"@checkpoint/{self.writer}"

    def watches(self, owner: Owner) -> bool:
        """Whether this writer can watch that process; see `ManagerIdentity.watches`."""
        return _can_watch(self, owner)


def _can_watch(manager: ManagerIdentity | Checkpoint, owner: Owner) -> bool:
    if (manager.boot_id, manager.pid_ns) != (owner.boot_id, owner.pid_ns):
        return False
    return manager.time_ns is UNSET or owner.time_ns in (UNSET, None) or manager.time_ns == owner.time_ns


LedgerRecord = Allocation | Host | Device | Checkpoint


# --- history and dead letters --------------------------------------------------------------------------


class Transition(Struct, frozen=True, kw_only=True, tag_field="type", tag="transition", gc=False):
    """One step of one allocation: what caused it, what it became, and why. Key: the allocation's key.

    `event` names the cause (`register`, `deregister`, `lease-expired`, `owner-died`, `driver-report`, …);
    `source` is set when the cause was a message.
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
    """Something of a whole host or writer worth keeping that is no allocation's step (input lost, start, stop)."""

    at: Utc
    writer: str
    event: str
    explanation: str


class Refresh(Struct, frozen=True, kw_only=True, tag_field="type", tag="refresh", gc=False, omit_defaults=True):
    """An allocation's record brought up to date without a step: its reason, its infos. Key: the allocation's key.

    `changed` are the fields that are not as before, as they are now; the others stay. `event` and `source` as in
    `Transition`.
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
    """A record of the ledger that is no allocation's (a host's), as it is now. `key` is its key in the ledger; so is
    this record's."""

    writer: str
    key: str
    record: Host | Device | msgspec.Raw


class Snapshot(Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot", gc=False, omit_defaults=True):
    """A piece of a writer's state: records of the ledger by their keys, as they are after the commit that this is part
    of. Key: the writer.

    A large state is spread over several commits. `begun` is the number of the commit with the first piece, `part`
    counts pieces from 0. With the piece that is the `last`, and with all changes since the first, the state is
    complete: what changes behind a piece is told as always, and what is new since the first piece is in none.
    """

    writer: str
    begun: int
    part: int
    records: dict[str, msgspec.Raw]
    last: bool = False


class Commit(Struct, frozen=True, kw_only=True, tag_field="type", tag="commit", gc=False, omit_defaults=True):
    """What one transaction says in history ends here. Key: the writer.

    `checkpoint` is the ledger's. `positions` are the queue positions that are shown now where they have changed, by
    allocation key: such a record has the checkpoint's `commit` and `writer`, and is otherwise as it was. `dropped`
    are the keys that were deleted from the ledger.
    """

    writer: str
    checkpoint: Checkpoint | msgspec.Raw
    positions: dict[str, int] = {}
    dropped: list[str] = []


HistoryRecord = Transition | Note | Refresh | Put | Snapshot | Commit


class NobodysCode(enum.StrEnum):
    """Why a registration is nobody's: no manager would ever read it as its own."""

    NO_KEY = "no-key"
    UNREADABLE = "unreadable"
    BAD_KEY = "bad-key"
    WRONG_PARTITION = "wrong-partition"
    NO_MANAGER = "no-manager"


class MessageSource(Struct, frozen=True, kw_only=True, gc=False):
    """Where a message stood."""

    topic: str
    partition: int
    offset: int


class DeadLetter(Struct, frozen=True, kw_only=True, tag_field="type", tag="dead-letter", gc=False):
    """A message that could not be understood or obeyed. Key: `topic/partition/offset`.

    `body` holds at most 4 KiB of its bytes (base64 on the wire), `length` and `sha256` are of all of it.
    `field` is the JSON path of the wrong field, where there is one. `code` says of a message that is nobody's why it
    is: see `NobodysCode`. `count`: the letter stands for so many messages, this being the first of them and all of them
    standing before the offset `until`; left out: for this one.
    `first`: it is a whole record batch, from that offset to the source's, that cannot be read.
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

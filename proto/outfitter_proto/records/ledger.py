"""The ledger: what managers say of allocations, hosts, devices and themselves."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

from outfitter_proto import keys
from outfitter_proto.records.registrations import Owner, Requests
from outfitter_proto.records.values import Health, Utc


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
    def key(self) -> keys.AllocationKey:
        return keys.allocation_key(self.host, self.worker, self.incarnation)


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
    def key(self) -> keys.HostKey:
        return keys.host_key(self.host)


class Device(Struct, frozen=True, kw_only=True, tag_field="type", tag="device", gc=False):
    """What must outlive allocations about one device: the record under `@device/<host>/<encoded id>`."""

    host: str
    id: str
    since: Utc
    state: str
    reason: str | None = None

    @property
    def key(self) -> keys.DeviceKey:
        return keys.device_key(self.host, self.id)


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
    def key(self) -> keys.CheckpointKey:
        return keys.checkpoint_key(self.writer)

    def watches(self, owner: Owner) -> bool:
        """Whether this writer can watch that process; see `ManagerIdentity.watches`."""
        return _can_watch(self, owner)


def _can_watch(manager: ManagerIdentity | Checkpoint, owner: Owner) -> bool:
    if (manager.boot_id, manager.pid_ns) != (owner.boot_id, owner.pid_ns):
        return False
    return manager.time_ns is UNSET or owner.time_ns in (UNSET, None) or manager.time_ns == owner.time_ns


StateRecord = Host | Device
"""What is neither an allocation nor a writer's position: history says with a `Put` what it is now."""
LedgerRecord = Allocation | StateRecord | Checkpoint

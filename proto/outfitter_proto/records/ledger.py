"""The ledger: managers' records of allocations, hosts, devices and themselves."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

from outfitter_proto import keys
from outfitter_proto.records.registrations import Owner, Requests, Survivors
from outfitter_proto.records.values import CommitNumber, Health, Token, Utc


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

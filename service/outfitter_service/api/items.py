"""The parameters and the items of each list. Fields that are on the wire have the same names here."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Generic, Literal, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from outfitter_proto.records import Checkpoint, HistoryRecord, ManagerIdentity, ResourceInventory
from outfitter_service.api.paging import Page, Paged
from outfitter_service.query.cordons import OrderInEffect
from outfitter_service.query.device_lines import LeftOut

T = TypeVar("T")

State = Literal["pending", "preparing", "allocated", "releasing", "ended", "failed"]
Time = Annotated[datetime, Meta(tz=True)]
HostName = Annotated[str, Meta(description="Only of this host.")]
WorkerName = Annotated[str, Meta(description="Only of workers with this name.")]
Incarnation = Annotated[str, Meta(description="Only of this run of the worker.")]
ResourceName = Annotated[str, Meta(description="Only of this resource.")]
Label = Annotated[str, Meta(pattern="^[^=]+=")]
Labels = Annotated[
    list[Label], Meta(description="Only of workers with this label: NAME=VALUE. If it is repeated, with all of them.")
]
Since = Annotated[datetime, Meta(tz=True, description="Not before this time.")]
Until = Annotated[datetime, Meta(tz=True, description="Not after this time.")]


class HostQuery(Paged, frozen=True, kw_only=True, forbid_unknown_fields=True):
    managed: Annotated[bool, Meta(description="Only hosts that a manager serves, or only others.")] | UnsetType = UNSET
    planned: (
        Annotated[bool, Meta(description="Only hosts without a manager that are taken out, or only others.")]
        | UnsetType
    ) = UNSET


class ResourceQuery(Paged, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: HostName | UnsetType = UNSET
    resource: ResourceName | UnsetType = UNSET
    model: Annotated[str, Meta(description="Only devices whose model's name has this in it.")] | UnsetType = UNSET
    health: Annotated[Literal["healthy", "unhealthy", "unknown"], Meta(description="Only these.")] | UnsetType = UNSET
    label: Annotated[list[Label], Meta(description="Only devices of a worker with this label.")] | UnsetType = UNSET


class DeviceQuery(ResourceQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    held: Annotated[bool, Meta(description="Only devices that a worker holds, or only others.")] | UnsetType = UNSET
    free: Annotated[bool, Meta(description="Only devices that can be lent now, or only others.")] | UnsetType = UNSET
    cordoned: Annotated[bool, Meta(description="Only devices that operators take out, or only others.")] | UnsetType = (
        UNSET
    )


class WorkerQuery(Paged, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: HostName | UnsetType = UNSET
    worker: WorkerName | UnsetType = UNSET
    state: Annotated[State, Meta(description="Only in this state.")] | UnsetType = UNSET
    resource: ResourceName | UnsetType = UNSET
    label: Labels | UnsetType = UNSET


class AllocationQuery(WorkerQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    incarnation: Incarnation | UnsetType = UNSET


class QueueQuery(Paged, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: HostName | UnsetType = UNSET
    resource: ResourceName | UnsetType = UNSET
    reason_code: Annotated[str, Meta(description="Only with this reason.")] | UnsetType = UNSET
    label: Labels | UnsetType = UNSET


class ExplanationQuery(Paged, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: HostName | UnsetType = UNSET
    incarnation: Incarnation | UnsetType = UNSET


class HistoryQuery(Paged, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: HostName | UnsetType = UNSET
    worker: WorkerName | UnsetType = UNSET
    incarnation: Incarnation | UnsetType = UNSET
    device: Annotated[str, Meta(description="Only steps with this device, by any of its names.")] | UnsetType = UNSET
    label: Labels | UnsetType = UNSET
    since: Since | UnsetType = UNSET
    until: Until | UnsetType = UNSET


class TroubleQuery(Paged, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: HostName | UnsetType = UNSET


class LetterQuery(Paged, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="Only of messages with this key.")] | UnsetType = UNSET
    code: Annotated[str, Meta(description="Only with this code.")] | UnsetType = UNSET
    since: Since | UnsetType = UNSET
    until: Until | UnsetType = UNSET


class ResourceSummary(Struct, frozen=True, kw_only=True):
    """One resource of one host without its devices: see `ResourceInventory`. `left_out`: those of `total`, `healthy`
    and `cordoned` that are no items among the devices, unless a worker holds them; null: all devices are."""

    state: str
    reason: str | None
    amount: int | None
    sharing: str
    total: int
    healthy: int
    cordoned: int = 0
    left_out: LeftOut | None = None


class HostItem(Struct, frozen=True, kw_only=True):
    """One host. `managed`: a manager serves it, as far as is known. `life`: `lives`, `stopped`, `dead` (it was killed,
    hangs, or cannot reach the bus), or `unknown`: it does not say on the bus that it lives, or that cannot be read.
    `life_at`: since when it is stopped, or when a dead one was last heard. `process`: of a dead one, which runs on the
    API's machine all the same, so that its log says more; 0: it has no name there, null: no such process.
    `unanswered`: how many messages wait for a manager, if none serves the host; null: a manager does, or it is not
    known. `missed`: somebody must start a manager; after an orderly stop that is so if messages or workers wait.
    `planned`: no manager serves the host, and an operator has taken out all of it; then it is not missed. `orders`:
    those of operators that are in effect, the oldest first. `orders_unread`: why its manager cannot read more of them,
    or null. `workers`: how many are in each state. `manager`, `since` and `resources` are null if there is no record of
    the host itself."""

    host: str
    managed: bool
    life: Literal["lives", "stopped", "dead", "unknown"]
    life_at: datetime | None
    process: int | None
    unanswered: int | None
    missed: bool
    planned: bool = False
    orders: list[OrderInEffect] = []
    orders_unread: str | None = None
    since: datetime | None
    manager: ManagerIdentity | None
    resources: dict[str, ResourceSummary] | None
    workers: dict[str, int]


class HostDetail(HostItem, frozen=True, kw_only=True):
    """One host with its record's inventories."""

    inventories: dict[str, ResourceInventory] | None


class WorkerItem(Struct, frozen=True, kw_only=True):
    """The newest run of one worker. `devices`: the ids of those that it has, by resource."""

    host: str
    worker: str
    incarnation: str
    state: str
    since: datetime
    amounts: dict[str, int]
    devices: dict[str, list[str]]
    queue_position: int | None
    priority: int
    labels: dict[str, str]
    reason: str | None
    reason_code: str | None
    wait_until: datetime | None
    warnings: list[str]


class QueueItem(Struct, frozen=True, kw_only=True):
    """One waiting worker. `reason` is for people, `reason_code` for programs."""

    host: str
    worker: str
    incarnation: str
    queue_position: int | None
    since: datetime
    priority: int
    amounts: dict[str, int]
    reason: str | None
    reason_code: str | None
    wait_until: datetime | None
    labels: dict[str, str] = {}


class Trouble(Struct, frozen=True, kw_only=True):
    """What needs a person. `kind` is for programs; the others are for people: `title` says what it is, `text` what it
    means, and `remedy` what to do, with commands between backticks. `urgent`: somebody must act now, exactly where the
    alert for the same is critical. `since`: when it began, if that is known. `host`, `device` and `worker`: where to
    look first, if one place says more."""

    kind: str
    urgent: bool
    title: str
    text: str
    remedy: str
    since: datetime | None
    host: str | None
    device: str | None
    worker: str | None


class StepItem(Struct, frozen=True, kw_only=True):
    """One step of history, and its place in the topic."""

    partition: int
    offset: int
    key: str
    record: HistoryRecord | Raw


class TailPage(Page[T], Generic[T], frozen=True, kw_only=True):
    """A part of a list with the newest items first. `oldest`: earlier items may be left out here and are in the topic;
    null: nothing is left out."""

    oldest: datetime | None = None


class Writer(Struct, frozen=True, kw_only=True):
    """A writer of the ledger. `end`: the end of its input. `lag`: how many offsets of its input it has not
    decided; null: not known yet. In host scope most of them are other hosts'."""

    writer: str
    checkpoint: Checkpoint
    end: int | None
    lag: int | None


class Status(Struct, frozen=True, kw_only=True):
    """What the API itself is doing. `ready`: it has read the topics; `condition` says what it does. `as_of`: it has
    everything up to this moment. `behind`: how many offsets of the ledger it has not read, as of the last look.
    `outage`: why the bus cannot be read now. `history` and `dead_letters`: why there are none here, or null.
    `event_id`: the last event's. `hosts`: how many there are, `workers`: how many by state."""

    cluster: str
    host: str | None
    version: str
    ready: bool
    condition: str
    as_of: datetime | None
    behind: int | None
    outage: str | None
    history: str | None
    dead_letters: str | None
    event_id: str | None
    hosts: int
    workers: dict[str, int]

"""Registrations: the messages of workers.

These structs forbid unknown fields, so that the codec notices them at no cost. It accepts the message nevertheless: see
`outfitter_proto.decoding.unknown`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from outfitter_proto.records.values import (
    MAX_BOOT_ID,
    MAX_OPERATORS,
    MAX_REASON,
    MAX_RESOURCES,
    Amount,
    KernelNumber,
    Name,
    Seconds,
)


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
"""`outfitter_proto.decoding.bounds` checks its bounds, as those of a registration's other parts."""


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

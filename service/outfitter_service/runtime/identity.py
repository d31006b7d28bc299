"""A manager's identity: its instance, its machine, and the machine's current boot."""

from __future__ import annotations

import secrets
import time
from datetime import datetime
from pathlib import Path

from msgspec import Struct, structs

from outfitter_proto import __version__
from outfitter_proto.keys import host_writer, partition_writer
from outfitter_proto.records import OBEYED, ManagerIdentity
from outfitter_proto.support.processes import boot_id, pid_namespace, time_namespace
from outfitter_service.core.delays import Sight
from outfitter_service.runtime.clock import Clock

SUSPEND_THRESHOLD_S = 1.0
"""The machine counts as suspended if boot time runs ahead of monotonic time by more than this."""


class Identity(Struct, frozen=True, kw_only=True):
    """One running manager (`instance`) of a `cluster`, as one `writer`. Its `scope` is "host" or "cluster". `boot_id`,
    `pid_ns` and `time_ns`: None if the manager watches no processes; `time_ns` also if the kernel has no time
    namespaces."""

    cluster: str
    scope: str
    host: str | None
    """The one that it serves; None: many (cluster scope)."""
    writer: str
    instance: str
    machine_id: str | None
    """None if the machine has none (machine-id(5))."""
    boot_id: str | None
    pid_ns: int | None
    time_ns: int | None = None

    @property
    def sees(self) -> Sight:
        """Whose processes the manager can find."""
        return self.boot_id, self.pid_ns

    def manager(self, since: datetime, stopped_at: datetime | None = None) -> ManagerIdentity:
        """The manager, as host records name it. `since`: when it started; `stopped_at`: when it stopped, or None."""
        return ManagerIdentity(
            instance=self.instance,
            version=__version__,
            since=since,
            machine_id=self.machine_id,
            boot_id=self.boot_id,
            pid_ns=self.pid_ns,
            time_ns=self.time_ns,
            stopped_at=stopped_at,
            obeys=list(OBEYED),
        )


def _instance() -> str:
    return f"{time.time_ns() // 1_000_000:x}-{secrets.token_hex(4)}"


def host_identity(cluster: str, host: str) -> Identity:
    """The identity of a host-scope manager that starts now."""
    return Identity(
        cluster=cluster,
        scope="host",
        host=host,
        writer=host_writer(host),
        instance=_instance(),
        machine_id=machine_id(),
        boot_id=boot_id(),
        pid_ns=pid_namespace(),
        time_ns=time_namespace(),
    )


def replica_identity(cluster: str) -> Identity:
    """The identity of a cluster-scope manager that starts now, before it has a partition (see `of_partition`). It
    watches no processes, because those of its hosts run on other machines."""
    return Identity(
        cluster=cluster,
        scope="cluster",
        host=None,
        writer="",
        instance=_instance(),
        machine_id=machine_id(),
        boot_id=None,
        pid_ns=None,
    )


def of_partition(identity: Identity, partition: int) -> Identity:
    """The identity with which a cluster-scope manager writes to one of its partitions."""
    return structs.replace(identity, writer=partition_writer(partition))


def machine_id() -> str | None:
    """The machine's id by machine-id(5), or None: then the manager cannot recognise another machine."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        try:
            content = path.read_text().strip()
        except OSError:
            continue
        if content and content != "uninitialized":
            return content
    return None


class SuspendWatch:
    """Notices that the machine was suspended. Then CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC (time(7))."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead = clock.suspended()

    def slept(self) -> bool:
        """Whether the machine has been suspended since the last call."""
        before, self._ahead = self._ahead, self._clock.suspended()
        return self._ahead - before > SUSPEND_THRESHOLD_S

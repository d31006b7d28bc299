"""Keys of the ledger, and what they are made of. Only this module makes and parses them.

| what stands under it | key |
|---|---|
| an allocation | `<host>/<worker>/<incarnation>` |
| a host | `@host/<host>` |
| a device | `@device/<host>/<percent-encoded id>` |
| a writer's checkpoint | `@checkpoint/<writer>` |

A writer is `host/<host>`, `partition/<number>` or `sweeper/<number>`. A name has neither `/` nor `@`, so no two keys
are alike. On the bus a key is bytes in UTF-8; nobody promises that what stands there is a key of ours.
"""

from __future__ import annotations

from typing import NamedTuple, NewType
from urllib.parse import quote

AllocationKey = NewType("AllocationKey", str)
HostKey = NewType("HostKey", str)
DeviceKey = NewType("DeviceKey", str)
CheckpointKey = NewType("CheckpointKey", str)
StateKey = HostKey | DeviceKey
"""The keys of `records.StateRecord`."""
Writer = NewType("Writer", str)

HOST, DEVICE, CHECKPOINT = b"@host/", b"@device/", b"@checkpoint/"
"""What the keys of each kind begin with, and those of no other; an allocation's begin with its host."""
_OF_HOSTS = (HOST, DEVICE)
"""Those that go on with the name of a host."""


def allocation_key(host: str, worker: str, incarnation: str) -> AllocationKey:
    return AllocationKey(f"{host}/{worker}/{incarnation}")


def host_key(host: str) -> HostKey:
    return HostKey(f"@host/{host}")


def device_key(host: str, device: str) -> DeviceKey:
    return DeviceKey(f"@device/{host}/{quote(device, safe='')}")


def checkpoint_key(writer: str) -> CheckpointKey:
    return CheckpointKey(f"@checkpoint/{writer}")


class AllocationNames(NamedTuple):
    """What an allocation's key is made of."""

    host: str
    worker: str
    incarnation: str


def allocation_names(key: str) -> AllocationNames:
    """Raises ValueError if `key` is not an allocation's."""
    host, worker, incarnation = key.split("/")
    return AllocationNames(host, worker, incarnation)


def worker_of(key: str) -> str | None:
    """The worker that a ledger record's key is about, or None: it is about something else."""
    return key.split("/")[1] if is_allocation_key(key) and "/" in key else None


def is_allocation_key(key: str) -> bool:
    """Whether `key`, which is one of the ledger's, is an allocation's."""
    return not key.startswith("@")


def host_of(key: bytes) -> str | None:
    """The host that a ledger record's key is about, or None: a checkpoint's, or no key of the ledger."""
    kind, slash, rest = key.partition(b"/")
    if kind.startswith(b"@"):
        host = rest.partition(b"/")[0] if kind + slash in _OF_HOSTS else None
    else:
        host = kind if slash else None
    return host.decode("utf-8", "replace") if host is not None else None


def prefixes_of(host: str) -> tuple[bytes, ...]:
    """What all keys about `host` but its own begin with, and no others."""
    return tuple(kind + f"{host}/".encode() for kind in (b"", *_OF_HOSTS))


def writer_of(key: bytes) -> Writer | None:
    """The writer whose checkpoint stands under `key`, or None: it is no checkpoint's."""
    return Writer(key[len(CHECKPOINT) :].decode("utf-8", "replace")) if key.startswith(CHECKPOINT) else None


def host_writer(host: str) -> Writer:
    """The writer identity of a host-scope manager: `host/<host>`."""
    return Writer(f"host/{host}")


def partition_writer(partition: int) -> Writer:
    """The writer identity of whoever owns a partition in cluster scope: `partition/<n>`."""
    return Writer(f"partition/{partition}")


def sweeper_writer(partition: int) -> Writer:
    """The writer identity of whoever dead-letters what is nobody's in a partition, in host scope: `sweeper/<n>`."""
    return Writer(f"sweeper/{partition}")


class WriterNames(NamedTuple):
    """What a writer is made of. `kind` is `host`, `partition` or `sweeper`, `name` the host or the partition."""

    kind: str
    name: str

    @property
    def host(self) -> str | None:
        """The host of a host-scope manager, or None: another kind of writer."""
        return self.name if self.kind == "host" else None


def writer_names(writer: str) -> WriterNames:
    kind, _, name = writer.partition("/")
    return WriterNames(kind, name)


def is_sweeper(writer: str) -> bool:
    return writer_names(writer).kind == "sweeper"

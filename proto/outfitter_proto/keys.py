"""Keys of the ledger and their parts. Only this module makes and parses them.

| record | key |
|---|---|
| an allocation | `<host>/<worker>/<incarnation>` |
| a host | `@host/<host>` |
| a device | `@device/<host>/<percent-encoded id>` |
| an operator's order in effect | `@cordon/<host>/<order>` |
| a writer's checkpoint | `@checkpoint/<writer>` |

A writer is `host/<host>`, `partition/<number>` or `sweeper/<number>`. Names have neither `/` nor `@`, so keys are
unique. On the bus a key is bytes in UTF-8, and may be any bytes.
"""

from __future__ import annotations

from typing import NamedTuple, NewType
from urllib.parse import quote

AllocationKey = NewType("AllocationKey", str)
HostKey = NewType("HostKey", str)
DeviceKey = NewType("DeviceKey", str)
CordonKey = NewType("CordonKey", str)
CheckpointKey = NewType("CheckpointKey", str)
StateKey = HostKey | DeviceKey | CordonKey
"""The keys of `records.StateRecord`."""
Writer = NewType("Writer", str)

HOST, DEVICE, CORDON, CHECKPOINT = b"@host/", b"@device/", b"@cordon/", b"@checkpoint/"
"""The prefix of each kind of key. An allocation's key has none and begins with its host."""
_OF_HOSTS = (HOST, DEVICE, CORDON)
"""Prefixes that are followed by a host's name."""


def allocation_key(host: str, worker: str, incarnation: str) -> AllocationKey:
    # Called for each record that is read. Calling a NewType would take longer than making the string.
    return f"{host}/{worker}/{incarnation}"  # type: ignore[return-value]


def host_key(host: str) -> HostKey:
    return HostKey(f"@host/{host}")


def device_key(host: str, device: str) -> DeviceKey:
    return DeviceKey(f"@device/{host}/{quote(device, safe='')}")


def cordon_key(host: str, order: str) -> CordonKey:
    return CordonKey(f"@cordon/{host}/{order}")


def checkpoint_key(writer: str) -> CheckpointKey:
    return CheckpointKey(f"@checkpoint/{writer}")


class AllocationNames(NamedTuple):
    """The parts of an allocation's key."""

    host: str
    worker: str
    incarnation: str


def allocation_names(key: str) -> AllocationNames:
    """Raises ValueError if `key` is not an allocation's."""
    host, worker, incarnation = key.split("/")
    return AllocationNames(host, worker, incarnation)


def is_allocation_key(key: str) -> bool:
    """Whether a key of the ledger is an allocation's."""
    return not key.startswith("@")


def host_of(key: bytes) -> str | None:
    """The host in a ledger record's key; None for a checkpoint, or for a key that is not the ledger's."""
    kind, slash, rest = key.partition(b"/")
    if kind.startswith(b"@"):
        host = rest.partition(b"/")[0] if kind + slash in _OF_HOSTS else None
    else:
        host = kind if slash else None
    return host.decode("utf-8", "replace") if host is not None else None


def prefixes_of(host: str) -> tuple[bytes, ...]:
    """The prefixes of all keys of `host` except its own record's."""
    return tuple(kind + f"{host}/".encode() for kind in (b"", *_OF_HOSTS))


def writer_of(key: bytes) -> Writer | None:
    """The writer in a checkpoint's key; None for other keys."""
    return Writer(key[len(CHECKPOINT) :].decode("utf-8", "replace")) if key.startswith(CHECKPOINT) else None


def host_writer(host: str) -> Writer:
    """The writer identity of a manager in host scope: `host/<host>`."""
    return Writer(f"host/{host}")


def partition_writer(partition: int) -> Writer:
    """The writer identity of a partition's owner in cluster scope: `partition/<n>`."""
    return Writer(f"partition/{partition}")


def sweeper_writer(partition: int) -> Writer:
    """The writer identity of a partition's sweeper, in host scope: `sweeper/<n>`."""
    return Writer(f"sweeper/{partition}")


class WriterNames(NamedTuple):
    """The parts of a writer. `kind` is `host`, `partition` or `sweeper`, `name` the host or the partition."""

    kind: str
    name: str

    @property
    def host(self) -> str | None:
        """The host of a manager in host scope; None for other kinds of writers."""
        return self.name if self.kind == "host" else None


def writer_names(writer: str) -> WriterNames:
    kind, _, name = writer.partition("/")
    return WriterNames(kind, name)


def is_sweeper(writer: str) -> bool:
    return writer_names(writer).kind == "sweeper"

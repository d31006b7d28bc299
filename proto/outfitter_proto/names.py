"""Names of topics, groups and transactional ids. Two programs must spell them alike to meet on the bus."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from outfitter_proto.keys import writer_names
from outfitter_proto.records import NAME_PATTERN

DEFAULT_CLUSTER = "outfitter"

_HISTORY = ".history"
_LIKE_AN_IDENTITY = re.compile("-(?:host|partition)-")
_MOST = 253
_MOST_OF = {
    "cluster": (
        249 - len(".registrations"),
        "; Kafka's topics, such as NAME.registrations, have at most 249 characters",
    ),
    "replica": (249, "; Kafka's group.instance.id has at most 249 characters"),
}
"""Kafka's limits for the names that contain these names, with the reason for messages."""
_NAME = re.compile(NAME_PATTERN.replace("$", r"\Z"))


class InvalidNameError(ValueError):
    """A name that the wire does not allow."""


def check_name(value: str, what: str) -> str:
    """Return `value` if it may name a `what` (host, worker, operator, resource, cluster, replica).

    Raises:
        InvalidNameError: it does not match `NAME_PATTERN`, or is too long for Kafka. The message has the kind of name,
            the valid characters, the limit, and the length of a name that is too long.
    """
    most, why = _MOST_OF.get(what, (_MOST, ""))
    if not _NAME.match(value) or len(value) > most:
        raise InvalidNameError(
            f"{what} {_shown(value, most)} is not a valid name: 1 to {most} letters, digits, '.', '_' and '-', "
            f"the first a letter or a digit{why if len(value) > most else ''}"
        )
    return value


def is_name(value: str) -> bool:
    """Whether a host, a worker or an incarnation can have this name."""
    return len(value) <= _MOST and _NAME.match(value) is not None


def _shown(value: str, most: int) -> str:
    """A wrong name, shortened and escaped for a message."""
    return repr(value) if len(value) <= most else f"{value[:40]!r}… ({len(value)} characters)"


def default_host() -> str:
    """The default name of the host: `OUTFITTER_HOST`, else the machine's hostname in lower case."""
    return os.environ.get("OUTFITTER_HOST") or os.uname().nodename.lower()


class Topics(NamedTuple):
    """A cluster's four topics."""

    registrations: str
    allocations: str
    history: str
    dead_letters: str

    def written(self, *, history: bool) -> tuple[str, ...]:
        """The topics in managers' transactions, with or without `history`."""
        return (self.allocations, *((self.history,) if history else ()), self.dead_letters)


def topics(cluster: str = DEFAULT_CLUSTER) -> Topics:
    """The four topics of `cluster`. Its name is their prefix, so that clusters can share brokers."""
    check_name(cluster, "cluster")
    return Topics(
        f"{cluster}.registrations", f"{cluster}.allocations", f"{cluster}{_HISTORY}", f"{cluster}.dead-letters"
    )


def managers_topic(cluster: str = DEFAULT_CLUSTER) -> str:
    """The topic in which managers say that they live. It is not among `topics`: everybody does without it."""
    check_name(cluster, "cluster")
    return f"{cluster}.managers"


def control_topic(cluster: str = DEFAULT_CLUSTER) -> str:
    """The topic of operators' orders. It has one partition, and is not among `topics`: managers serve without it."""
    check_name(cluster, "cluster")
    return f"{cluster}.control"


def is_history(topic: str) -> bool:
    """Whether a topic is some cluster's history, which monitors read and workers do not."""
    return topic.endswith(_HISTORY)


def managers_group(cluster: str) -> str:
    """The consumer group that divides the partitions among managers in cluster scope."""
    return f"{cluster}-managers"


def transactional_id(cluster: str, writer: str) -> str:
    """The transactional id of a writer: `<cluster>-host-<host>`, `…-partition-<n>` or `…-sweeper-<n>`, always unique.

    If the cluster's own name looks like one of these ids (`a-host-b`), the id has colons, which no name has. Otherwise
    cluster `a` on host `b-host-c` and cluster `a-host-b` on host `c` would fence each other.
    """
    kind, which = writer_names(writer)
    mark = ":" if _LIKE_AN_IDENTITY.search(f"{cluster}-") else "-"
    return f"{cluster}{mark}{kind}{mark}{which}"

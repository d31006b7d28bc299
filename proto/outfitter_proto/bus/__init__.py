"""The bus port and its two adapters. `connect` imports only the adapter of the URL."""

from __future__ import annotations

import os
from collections.abc import Mapping

from outfitter_proto.bus import schemes
from outfitter_proto.bus.port import (
    Bus,
    BusAccessError,
    BusAuthenticationError,
    BusAuthorizationError,
    BusConfigurationError,
    BusError,
    BusUnavailableError,
    CommitUnknownError,
    Create,
    DamagedTopicError,
    Entry,
    FencedError,
    MemberReplacedError,
    Membership,
    Message,
    MissingBusError,
    Obstacle,
    OffsetOutOfRangeError,
    Reader,
    Right,
    TooLargeError,
    TopicInfo,
    TopicLayout,
    TopicSpec,
    UnknownTopicError,
    Writer,
)

CLIENT = "outfitter"
"""The client id of whoever gives none."""
WORKER = f"{CLIENT}-worker-"
"""The beginning of workers' client ids. The host follows, so that a quota of a client id is one host's."""
DEFAULT_BUS = "sqlite:////var/lib/outfitter/bus.db"
"""One file for the whole machine, so that the workers of all users share one bus."""


def connect(
    url: str | None = None,
    login: Mapping[str, str] | None = None,
    *,
    create: Create = Create.DIRECTORY,
    client: str = CLIENT,
) -> Bus:
    """The bus at `url`, else at `OUTFITTER_BUS`, else `DEFAULT_BUS`. Connects to nothing yet.

    `kafka://host:9092[,host2:9092]` or `sqlite:///path/to/bus.db` (three slashes, then the absolute path). `login` has
    the settings for logging in to Kafka's brokers, by the names of `kafka.login.SETTINGS`; the environment has the
    rest. `create`: what starting may create of a missing embedded bus; otherwise it raises a MissingBusError.
    `client`: the client id of connections to Kafka. Brokers may count quotas by it.

    Raises:
        BusConfigurationError: no known bus has this URL, or the settings for logging in are invalid.
    """
    url = url or os.environ.get("OUTFITTER_BUS") or DEFAULT_BUS
    scheme = schemes.find(url)
    if scheme is None:
        raise BusConfigurationError(f"{url!r} is no bus URL: write {schemes.SYNTAX}")
    return scheme.connect(url, login, create, client)


__all__ = [
    "CLIENT",
    "DEFAULT_BUS",
    "WORKER",
    "Bus",
    "BusAccessError",
    "BusAuthenticationError",
    "BusAuthorizationError",
    "BusConfigurationError",
    "BusError",
    "BusUnavailableError",
    "CommitUnknownError",
    "Create",
    "DamagedTopicError",
    "Entry",
    "FencedError",
    "MemberReplacedError",
    "Membership",
    "Message",
    "MissingBusError",
    "Obstacle",
    "OffsetOutOfRangeError",
    "Reader",
    "Right",
    "TooLargeError",
    "TopicInfo",
    "TopicLayout",
    "TopicSpec",
    "UnknownTopicError",
    "Writer",
    "connect",
]
